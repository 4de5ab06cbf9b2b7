"""One record to one row of a comparison: its problem, times, profile and checks, and the ratios among rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from harness import cost, stats
from harness.record import (
    CHECKS_FILE,
    READ_CEILING,
    REPEAT_FILE,
    STREAM_READ,
    Record,
    RecordError,
    read,
    records_file,
    series_label,
)
from impls.catalog import ABLATIONS, OURS
from impls.problem import DecodeProblem

CHOSEN = ("block_n", "num_stages", "eager", "work_items", "splits_max")
"""What of a plan our rules choose, by which an own choice is told from an older one."""

PROBLEM_COLUMNS = ("dtype", "batch", "heads_q", "heads_kv", "head_dim", "total_kv", "max_kv", "kv_bytes")

Row: TypeAlias = dict[str, Any]


def newest(measurements: Iterable[Record]) -> list[Record]:
    """Each case's rows of its newest run alone, and the later of two rows of one series."""
    by_case: dict[str, dict[str, Record]] = {}
    for record in measurements:
        # The read ceiling has no case; it is one "case" of each run.
        key = record["case"] or f"{READ_CEILING} of {record['run_id']}"
        kept = by_case.setdefault(key, {})
        if any(r["run_id"] != record["run_id"] for r in kept.values()):
            kept.clear()
        kept[series_label(record)] = record
    return [record for kept in by_case.values() for record in kept.values()]


def device_of(run: Record) -> str:
    """What a run's device is called in a figure, e.g. ``H200``."""
    env = run["env"]
    return str(env.get("gpu") or env.get("cpu") or env.get("device") or "unknown device").removeprefix("NVIDIA ")


def smallest_effect(run: Record) -> float:
    """The difference, as a share, that a run's study calls the smallest that matters."""
    effect: float = run.get("smallest_effect", stats.SMALLEST_EFFECT)
    return effect


def row_of(record: Record) -> Row:
    """What a measurement says by itself."""
    problem = DecodeProblem.from_dict(record["problem"])
    config, check = record["config"], record["check"] or {}
    row: Row = {key: record[key] for key in ("run_id", "impl", "role", "status", "reason", "compile_ms", "plan_us")}
    row |= {"problem": problem} | {key: getattr(problem, key) for key in PROBLEM_COLUMNS}
    row |= {key: check.get(key) for key in ("rel_l2", "worst_row", "lse_err")}
    row |= {key: config.get(key) for key in ("num_splits", "splits_max", "work_items", "splits_note", "merge")}
    row |= {key: config.get(key) for key in ("library", "version", "function")}
    row |= {"label": series_label(record), "config": _settings(config)} | times_of(record)
    row |= _asked_splits(config.get("asked") or {}, record["impl"])
    if record["impl"] in (*OURS, *ABLATIONS):
        row |= _as_it_ran(row, config, problem)
    if (us := row.get("us")) is not None:
        is_bound = record["role"] == "bound"
        row["gbps"] = cost.gbps(problem.kv_bytes if is_bound else cost.io_bytes(problem), us)
        row["tflops"] = None if is_bound else cost.tflops(cost.flops(problem), us)
    return row


def _as_it_ran(row: Row, config: Mapping[str, Any], problem: DecodeProblem) -> Row:
    """What tells whether two of our plans are one kernel with the same splits, what of that our rules have chosen,
    and how many splits there are."""
    splits, items, block_h = (config.get(key) for key in ("splits_max", "work_items", "block_h"))
    if splits is None or items is None:
        return {}
    chosen = {key: config[key] for key in CHOSEN if key in config}
    ran: Row = {"ran": (row["config"], splits, items), "chosen": chosen}
    if block_h:  # a CTA takes one split, one KV head and up to block_h of the query heads that share it
        total = items / problem.tiles_per_split(block_h)
        ran["splits_total"] = total if total == int(total) else None
    return ran


def _asked_splits(asked: Mapping[str, Any], impl: str) -> Row:
    """The fixed split count that a study asks for, if any, and what the series is called without it."""
    count = asked.get("num_splits")
    fixed = isinstance(count, int) and not isinstance(count, bool) and count >= 1  # 0 and "auto" leave the choice
    rest = {key: value for key, value in asked.items() if key != "num_splits"}
    return {
        "asked_splits": count if fixed else None,
        "family": series_label({"impl": impl, "config": {"asked": rest}}),
    }


def profiles_of(folder: Path) -> dict[tuple[str, str, str], Row]:
    """(case, label, device) -> where the time of its calls went, as far as a run of method ``kernels`` told.

    Raises:
        harness.record.RecordError: for a profile whose run is not recorded.
    """
    path = folder / records_file("kernels")
    if not path.exists():
        return {}
    records = read(path)
    runs = {r["run_id"]: r for r in records if r["kind"] == "run"}
    profiles = {}
    for record in newest(r for r in records if r["kind"] == "measurement"):
        found = (record["timing"] or {}).get("breakdown")
        if found is not None and record["status"] == "ok" and record["case"] is not None:
            times = [kernel["us"] for kernel in found["kernels"]]
            # Ours launch the split kernel first. It need not be the longest: one that merges waits in place for it.
            main = times[0] if record["impl"] in (*OURS, *ABLATIONS) else max(times)
            others = sum(times) - main
            run = runs.get(record["run_id"])
            if run is None:
                raise RecordError(f"{path}: expected a run record of {record['run_id']}, got none")
            profiles[record["case"], series_label(record), device_of(run)] = {
                "profiled_us": found["total_us"],
                "traced_us": found["traced_us"],
                "main_us": main,
                "others_us": others,
                "gap_us": found["gap_us"],
                "between_us": found["between_us"],
                "kernel_names": tuple(kernel["name"] for kernel in found["kernels"]),
                "traced_config": record["config"],
                "traced_run": record["run_id"],
                "traced_git": run["env"].get("git"),
                **_without_waiting(main, others, found["gap_us"], found["between_us"]),
            }
    return profiles


def _without_waiting(main: float, others: float, gap: float, between: float) -> Row:
    """The parts of a call without the time in which a kernel, already in place, waits for the one before it.

    A gap or a pause below 0 is such an overlap, in both kernels' durations. That with the call before is taken off
    the main kernel, that within the call off the others, and what exceeds one of them off the other one: nothing
    is below 0, and the sum stays what it was.
    """
    main, others = main + min(0.0, between), others + min(0.0, gap)
    main, others = main + min(0.0, others), others + min(0.0, main)
    return {
        "main_net_us": max(0.0, main),
        "others_net_us": max(0.0, others),
        "gap_net_us": max(0.0, gap),
        "between_net_us": max(0.0, between),
    }


def traced_alike(timed: Record, parts: Row) -> bool:
    """Whether a profile is of what a record timed: its plan came to the same, as far as both of them tell."""
    told, traced = timed["config"], parts["traced_config"]
    apart = ("asked", "num_splits", "splits_note", "workspace_bytes")
    return all(told[key] == traced[key] for key in told.keys() & traced.keys() - set(apart))


def deep_checks_of(folder: Path) -> dict[tuple[str, str], str]:
    """(case, label) -> what ``splitkv check`` said, from the folder's ``checks.jsonl``: ``wrong`` if it ever did.

    What could not be tried, for want of a library or of support, is left out.
    """
    path = folder / CHECKS_FILE
    found: dict[tuple[str, str], str] = {}
    for record in read(path) if path.is_file() else ():
        if record["kind"] == "check" and record["status"] not in ("unsupported", "unavailable"):
            key = (record["case"], series_label(record))
            found[key] = record["status"] if found.get(key, "ok") == "ok" else found[key]
    return found


@dataclass(frozen=True)
class CheckedElsewhere:
    """What ``splitkv check`` found of a study's implementations on the cases of another study.

    Args:
        folder: of the other study, beside this one's.
        counts: implementation -> on how many cases it is right, and how many it was tried on.
        runs: the ids of those of its runs.
    """

    folder: Path
    counts: Mapping[str, tuple[int, int]]
    runs: frozenset[str]


def checked_elsewhere(
    folder: Path, runs: Iterable[Record], impls: Sequence[str], problems: Mapping[str, DecodeProblem]
) -> CheckedElsewhere | None:
    """The deeper check of the same kernels beside a study: of the same commit, on a GPU of the same name.

    Args:
        folder: of the study.
        runs: its ``run`` records.
        impls: its implementation ids.
        problems: its cases -> their problems.

    Returns:
        Of the folders in which any of the implementations was checked, the one with the most of the cases, then of
        the implementations, then the first by name; or None. A run whose commit is not known, or that had local
        changes, is of no other's commit.
    """
    best: tuple[tuple[int, int], CheckedElsewhere] | None = None
    for path, records, alike in _beside(folder, runs, CHECKS_FILE):
        told = [
            record
            for record in records
            if record["kind"] == "check"
            and record["run_id"] in alike
            and record["status"] not in ("unsupported", "unavailable")
        ]
        counts: dict[str, tuple[int, int]] = {}
        for impl in impls:
            mine = [record["status"] for record in told if series_label(record) == impl]
            if mine:
                counts[impl] = (mine.count("ok"), len(mine))
        if counts:
            near = (len({record["case"] for record in told if _is_of(record, problems)}), len(counts))
            if best is None or near > best[0]:
                best = near, CheckedElsewhere(path.parent, counts, frozenset(alike))
    return None if best is None else best[1]


def split_counts_elsewhere(
    folder: Path, runs: Iterable[Record], problems: Mapping[str, DecodeProblem], min_counts: int
) -> tuple[Path, int] | None:
    """The study beside another that times its cases at fixed split counts: of the same commit and GPU name.

    Args:
        folder: of the study.
        runs: its ``run`` records.
        problems: its cases -> their problems.
        min_counts: the fewest fixed split counts of one implementation that count.

    Returns:
        The folder that has the most of the cases, the first of them by name, and how many; None where none has any.
    """
    best: tuple[Path, int] | None = None
    for path, records, alike in _beside(folder, runs, records_file()):
        counts: dict[tuple[str, str], set[int]] = {}
        for record in records:
            if record["kind"] == "measurement" and record["role"] == "impl" and record["run_id"] in alike:
                told = _asked_splits(record["config"].get("asked") or {}, record["impl"])
                if record["status"] == "ok" and told["asked_splits"] and _is_of(record, problems):
                    counts.setdefault((record["case"], told["family"]), set()).add(told["asked_splits"])
        cases = len({case for (case, _), asked in counts.items() if len(asked) >= min_counts})
        if cases and (best is None or cases > best[1]):
            best = path.parent, cases
    return best


def repeated_elsewhere(
    folder: Path, runs: Iterable[Record], impls: Sequence[str], problems: Mapping[str, DecodeProblem]
) -> Path | None:
    """The study beside another with two runs of some of its cases and implementations, of the same code and GPU.

    Args:
        folder: of the study.
        runs: its ``run`` records.
        impls: its implementation ids.
        problems: its cases -> their problems.

    Returns:
        The folder that has the most (case, implementation) pairs in both runs, the first of them by name; None
        where none has any.
    """

    def timed(records: Iterable[Record], alike: Collection[str]) -> set[tuple[str, str]]:
        return {
            (record["case"], record["impl"])
            for record in records
            if record["kind"] == "measurement"
            and record["run_id"] in alike
            and record["status"] == "ok"
            and record["impl"] in impls
            and _is_of(record, problems)
        }

    first = {path.parent: timed(records, alike) for path, records, alike in _beside(folder, runs, records_file())}
    best: tuple[Path, int] | None = None
    for path, records, alike in _beside(folder, runs, REPEAT_FILE):
        pairs = len(first.get(path.parent, set()) & timed(records, alike))
        if pairs and (best is None or pairs > best[1]):
            best = path.parent, pairs
    return None if best is None else best[0]


def _is_of(record: Record, problems: Mapping[str, DecodeProblem]) -> bool:
    """Whether a record is of a case of these, of the same name and the same problem."""
    known = problems.get(record["case"])
    return known is not None and DecodeProblem.from_dict(record["problem"]) == known


def _beside(
    folder: Path, runs: Iterable[Record], name: str
) -> Iterator[tuple[Path, Sequence[Record], Collection[str]]]:
    """Each file of a name in folders beside one: its path, records, and which runs are of the same code and GPU.

    A run whose commit is not known, or that had local changes, is of no other's commit; a file without such a run
    is left out.
    """
    mine = {key for run in runs if (key := _code_and_gpu(run)) is not None}
    for path in sorted(folder.resolve().parent.glob(f"*/{name}")):
        # A look for the commit alone is quick, where reading every record is not.
        if path.parent == folder.resolve() or not any(git.encode() in path.read_bytes() for git, _ in mine):
            continue
        try:
            records = read(path)
        except RecordError:  # its own report says so
            continue
        alike = {r["run_id"] for r in records if r["kind"] == "run" and _code_and_gpu(r) in mine}
        if alike:
            yield path, records, alike


def _code_and_gpu(run: Record) -> tuple[str, str] | None:
    env = run["env"]
    return None if env.get("dirty") or not env.get("git") else (str(env["git"]), device_of(run))


def _settings(config: Mapping[str, Any]) -> str | None:
    """What a plan came to beyond the columns of its own and what varies with the lengths, as text."""
    apart = ("asked", "num_splits", "splits_max", "work_items", "splits_note", "workspace_bytes")
    return ", ".join(f"{key}={value}" for key, value in config.items() if key not in apart) or None


def times_of(record: Record) -> Row:
    """How a record was timed and, for status ``ok``, its median; throttled samples are counted, not used."""
    timing = record["timing"]
    if timing is None:
        return {}
    finite = [s for s in timing["samples"] if s["us"] is not None]
    throttled = sum(bool(s["throttled"]) for s in finite)
    # Where every sample was throttled, their median is still the best that is known; the count says so.
    used = {s["round"]: s["us"] for s in finite if not s["throttled"] or throttled == len(finite)}
    times: Row = {key: timing[key] for key in ("method", "cache", "working_set_bytes", "kernels")}
    host = timing.get("host") or {}
    times |= {"n": len(used), "n_throttled": throttled}
    times |= {"host_launch_us": host.get("launch_us"), "host_total_us": host.get("end_to_end_us")}
    if record["status"] == "ok" and used:
        estimate = stats.median_interval(list(used.values()))
        times |= {"us": estimate.median, "us_low": estimate.low, "us_high": estimate.high, "samples": used}
    return times


def own_choices(rows: Iterable[Mapping[Any, Any]]) -> set[str]:
    """The labels of series that are not a fixed split count of what is also here with its own choice."""
    first = {row["label"]: row for row in rows if row["role"] == "impl"}
    chosen = {row["family"] for row in first.values() if row["asked_splits"] is None}
    return {s for s, row in first.items() if row["asked_splits"] is None or row["family"] not in chosen}


def add_ratios(
    rows: Iterable[Row], smallest_effects: Mapping[str, float], shown: Collection[str] | None = None
) -> None:
    """Put every ratio of rows of one run, case, method and cache state into the rows, in place.

    Args:
        rows: of any runs and cases.
        smallest_effects: run id -> the smallest difference that matters there, as a share.
        shown: the labels among which a case's fastest is sought; None for all.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.get("us") is not None:
            key = tuple(row[column] for column in ("study", "run_id", "case", "method", "cache"))
            groups.setdefault(key, []).append(row)
    for group in groups.values():
        bound = next((row for row in group if row["impl"] == STREAM_READ), None)
        impls = [row for row in group if row["role"] == "impl"]
        rivals = [row for row in impls if shown is None or row["label"] in shown]
        _name_the_same(rivals)
        rivals = [row for row in rivals if row.get("same_as") is None]
        best = min(rivals or impls, key=lambda row: row["us"], default=None)
        peers = [row for row in impls if row["impl"] not in (*OURS, *ABLATIONS)]
        peer = min(peers, key=lambda row: row["us"], default=None)
        for row in impls:
            smallest = smallest_effects[row["run_id"]]
            if best is not None and (slowdown := _set_ratio(row, "slowdown", row, best)) is not None:
                row["tied"] = stats.verdict(slowdown, smallest) == stats.TIE
            if bound is not None:
                _set_ratio(row, "share", bound, row, factor=100)
            if peer is not None and row["impl"] in OURS:
                ahead = _set_ratio(row, "ahead", peer, row)
                if ahead is not None:
                    row |= {"peer": peer["label"], "verdict": stats.verdict(ahead.inverse(), smallest)}


def _name_the_same(rivals: Iterable[Row]) -> None:
    """Put into the row of an ablation which of our kernels ran the very same there: it is no rival of that one."""
    rivals = list(rivals)
    for row in rivals:
        if row["impl"] in ABLATIONS and row.get("ran") is not None:
            same = (r["label"] for r in rivals if r["impl"] in OURS and r.get("ran") == row["ran"])
            row["same_as"] = next(same, None)


def _set_ratio(row: Row, name: str, over: Row, under: Row, *, factor: float = 1.0) -> stats.Estimate | None:
    """Put ``factor`` times the time of ``over`` over that of ``under`` into a row, paired by round."""
    ratio = stats.ratio_interval(over["samples"], under["samples"])
    if ratio is None:
        return None
    ratio = ratio.scaled(factor)
    row |= {name: ratio.median, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
    shared = sorted(over["samples"].keys() & under["samples"].keys())
    row[f"{name}_rounds"] = [factor * over["samples"][i] / under["samples"][i] for i in shared]
    return ratio
