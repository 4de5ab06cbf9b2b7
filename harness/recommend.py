"""What to run for a batch that was not measured: from committed records, without a GPU.

The expected time of an implementation is that of the bound over the share of the bound that it should reach:

* the bound of a batch is interpolated between the recorded ones by their bytes of K and V, on a straight line
  between two neighbours and along the last one beyond the ends;
* the share follows from what an implementation takes beyond the bound: starts, merges, CTAs that wait. That is
  taken to be the mean over the :data:`NEAREST` recorded cases nearest to the batch (:func:`distance`), weighted by
  ``(distance + 1/4) ** -2``. It changes less with size than the share does: for our kernels on the committed
  records, each case left out, it misses half as much;
* how far that may be off is measured, not assumed: each recorded case is predicted from all others by the same
  rule, and the largest miss among the nearest cases is the stated uncertainty.

A batch that was recorded itself is not predicted: then the records are the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import stats
from harness.record import READ_CEILING, STREAM_READ, TUNING_FILE, Record, RecordError, read, records_file
from harness.render.rows import add_ratios, device_of, newest, row_of, smallest_effect
from harness.tuning import Tuned, tuned
from impls.catalog import ABLATIONS, OURS
from impls.problem import DecodeProblem

if TYPE_CHECKING:
    from impls.splitkv_plan import Splitting

NEAREST = 3
"""Recorded cases that an expectation is made of."""

FAR = 2.0
"""A distance, in doublings, from which on an expectation is called an extrapolation."""


RING_KEYS = 256
"""Keys of TileLang's whole ring at head dim 128: :func:`impls.tilelang_tile.ring_share`."""

PACKED_AN_SM = 2
"""Programs of Triton's tile for packed work that an SM surely holds (:func:`impls.triton_tile.at_once`)."""

HOPPER = ("GH200", "H100", "H20", "H200", "H800")
"""GPUs of compute capability 9.0, as their names have it: what Triton's rule knows of them is known without one."""

OTHER_WORK = "which is another shape or kind of work: the kernel may take another tile, and other counts"
"""Said of a tile that stands in for one that no record has."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One recorded case.

    Args:
        name: the case's name.
        problem: what was computed.
        run: the environment it was measured in.
        bound_us: time of the bound.
        rows: implementation -> its row as of :mod:`harness.render.rows`, for those that are ``ok``.
        configs: implementation -> what its plan came to.
    """

    name: str
    problem: DecodeProblem
    run: Record
    bound_us: float
    rows: Mapping[str, Mapping[str, Any]]
    configs: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One implementation on the batch.

    Args:
        impl: implementation id.
        us: its expected time.
        low: the lower end of what the miss allows.
        high: the upper end.
        share: of the bound, from 0 to 1.
        miss: the largest error of the same rule on the nearest cases, as a share; None where the batch itself was
            recorded, and the interval is that of the median.
        cases: the recorded cases it is made of, nearest first.
    """

    impl: str
    us: float
    low: float
    high: float
    share: float
    miss: float | None
    cases: tuple[Seen, ...]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer.

    Args:
        problem: the batch.
        bound_us: expected time of the bound.
        ranking: what to expect of each implementation, fastest first.
        ties: implementations that the records cannot tell from the first: on the nearest case it is not slower, or
            on another of the nearest it is faster.
        splits: implementation -> (length -> splits), for ours among the first and its ties, with the CTAs of all.
        ctas: implementation -> CTAs of its split kernel.
        tiles: implementation -> where the tile comes from that this is computed with, in words: its rule, or the
            case that has it, and a word of doubt where the kernel may choose another.
        far: why this is an extrapolation; empty where it is none.
        tuning: implementation -> what a tuning found on the nearest cases, where there was one.
        coverage: of the first place, as of :func:`coverage`.
        device: the GPU of the records.
        sm_count: its SMs.
    """

    problem: DecodeProblem
    bound_us: float
    ranking: tuple[Expectation, ...]
    ties: tuple[str, ...]
    splits: Mapping[str, Mapping[int, int]]
    ctas: Mapping[str, int]
    tiles: Mapping[str, str]
    far: tuple[str, ...]
    tuning: Mapping[str, Sequence[Tuned]]
    coverage: tuple[int, int]
    device: str
    sm_count: int


def recommend(problem: DecodeProblem, folder: Path) -> Advice:
    """The advice for a batch.

    Args:
        problem: at least one key.
        folder: of a study that was run on a GPU.

    Raises:
        RecordError: for a folder without timed records of one GPU, with their bounds.
        ValueError: for a batch without keys.
    """
    if not problem.total_kv:
        raise ValueError("kv_lens: expected at least one key, got none: there is nothing to run")
    seen = read_cases(folder)
    same = next((case for case in seen if case.problem == problem), None)
    impls = [impl for impl in dict.fromkeys(impl for case in seen for impl in case.rows) if impl not in ABLATIONS]
    found = [made for impl in impls if (made := expect(problem, impl, seen, same)) is not None]
    if not found:
        raise RecordError(f"{folder}: expected an implementation that is ok on this case, got none")
    ranking = tuple(sorted(found, key=lambda made: made.us))
    first = ranking[0]
    ties = tuple(made.impl for made in ranking[1:] if _is_tie(first, made.impl))
    sm_count, device = int(seen[0].run["env"]["sm_count"]), device_of(seen[0].run)
    splits, ctas, tiles = {}, {}, {}
    for made in ranking:
        if made.impl in OURS and made.impl in (first.impl, *ties):
            tile, sure = tile_of(problem, made.impl, seen, sm_count)
            counts = splits_of(problem, tile.configs[made.impl], sm_count, device)
            splits[made.impl], ctas[made.impl], exact = counts
            like = f"tile as on {tile.name}"
            tiles[made.impl] = "by its rule" if exact else like if sure else f"{like}, {OTHER_WORK}"
    path = folder / TUNING_FILE
    known = tuned(read(path)) if path.exists() else []
    names = [case.name for case in first.cases]
    return Advice(
        problem=problem,
        bound_us=same.bound_us if same else bound_us(problem.kv_bytes, seen),
        ranking=ranking,
        ties=ties,
        splits=splits,
        ctas=ctas,
        tiles=tiles,
        far=() if same else tuple(_far(problem, first.cases)),
        tuning={impl: [row for row in known if row.impl == impl and row.case in names] for impl in splits},
        coverage=coverage(first.impl, seen),
        device=device,
        sm_count=sm_count,
    )


def read_cases(folder: Path) -> list[Seen]:
    """The recorded cases of a study that have a bound.

    Raises:
        RecordError: for a folder without records, on a CPU, of several devices, or without a bound.
    """
    path = folder / records_file()
    if not path.is_file():
        raise RecordError(f"{path}: expected the records of a run on a GPU, got no such file")
    records = read(path)
    runs = {r["run_id"]: r for r in records if r["kind"] == "run"}
    measured = [r for r in newest(r for r in records if r["kind"] == "measurement") if r["impl"] != READ_CEILING]
    devices = {device_of(runs[r["run_id"]]) for r in measured}
    if len(devices) != 1 or any(runs[r["run_id"]]["env"].get("device") != "cuda" for r in measured):
        raise RecordError(f"{path}: expected records of one GPU, got {', '.join(sorted(devices)) or 'none'}")
    rows = [(r, row_of(r) | {"case": r["case"], "study": folder.name}) for r in measured]
    add_ratios([row for _, row in rows], {run_id: smallest_effect(run) for run_id, run in runs.items()})
    seen = []
    for name in dict.fromkeys(r["case"] for r in measured):
        mine = [(r, row) for r, row in rows if r["case"] == name and row.get("us") is not None]
        bound = next((row for r, row in mine if r["impl"] == STREAM_READ), None)
        # A series with something asked of it (a split count) is another choice than an implementation's own.
        own = [(r, row) for r, row in mine if r["role"] == "impl" and not r["config"].get("asked")]
        if bound is not None and own:
            seen.append(
                Seen(
                    name=name,
                    problem=DecodeProblem.from_dict(own[0][0]["problem"]),
                    run=runs[own[0][0]["run_id"]],
                    bound_us=bound["us"],
                    rows={r["impl"]: row for r, row in own if row.get("share") is not None},
                    configs={r["impl"]: r["config"] for r, _ in own},
                )
            )
    if len(seen) < NEAREST + 2:
        raise RecordError(f"{path}: expected at least {NEAREST + 2} cases with a bound, got {len(seen)}")
    return seen


def distance(problem: DecodeProblem, other: DecodeProblem) -> float:
    """How far two batches are apart, in doublings of bytes.

    A doubling of the bytes of K and V, or of the skew (longest over mean length), counts 1; of the CTAs that there
    are without splitting (batch times KV heads) or of the head dim 1/2; of the query heads that share a KV head, or
    another dtype, 1/4.
    """

    def doublings(value: float, by: float) -> float:
        return abs(math.log2(value / by))

    return (
        doublings(problem.kv_bytes, other.kv_bytes)
        + doublings(skew(problem), skew(other))
        + doublings(problem.batch * problem.heads_kv, other.batch * other.heads_kv) / 2
        + doublings(problem.head_dim, other.head_dim) / 2
        + doublings(problem.group, other.group) / 4
        + (problem.dtype != other.dtype) / 4
    )


def skew(problem: DecodeProblem) -> float:
    """The longest sequence over the mean one: 1 where all are alike."""
    return problem.max_kv * problem.batch / problem.total_kv


def bound_us(kv_bytes: int, seen: Iterable[Seen]) -> float:
    """The time of the bound for so many bytes, on straight lines through the recorded ones; µs."""
    by_bytes: dict[int, list[float]] = {}
    for case in seen:
        by_bytes.setdefault(case.problem.kv_bytes, []).append(case.bound_us)
    points = sorted((size, sum(times) / len(times)) for size, times in by_bytes.items())
    after = next((i for i, (size, _) in enumerate(points) if size >= kv_bytes), len(points))
    place = min(max(after, 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (kv_bytes - x0) / (x1 - x0)


def expect(problem: DecodeProblem, impl: str, seen: Sequence[Seen], same: Seen | None = None) -> Expectation | None:
    """What to expect of an implementation; None where too few cases have it, or the recorded batch does not.

    Args:
        problem: the batch.
        impl: implementation id.
        seen: the recorded cases.
        same: the one of them that is this very batch.
    """
    if same is not None:
        if (row := same.rows.get(impl)) is None:
            return None
        share = row["share"] / 100
        return Expectation(
            impl=impl, us=row["us"], low=row["us_low"], high=row["us_high"], share=share, miss=None, cases=(same,)
        )
    made = _predict(problem, impl, seen)
    if made is None:
        return None
    misses = []
    for case in made.cases:
        others = [other for other in seen if other is not case]
        if (guess := _predict(case.problem, impl, others)) is not None:
            misses.append(abs(math.log(case.rows[impl]["us"] / guess.us)))
    if not misses:
        return None
    factor = math.exp(max(misses))
    return replace(made, low=made.us / factor, high=made.us * factor, miss=factor - 1)


def coverage(impl: str, seen: Sequence[Seen]) -> tuple[int, int]:
    """Of how many recorded cases, each left out, such an interval holds the time; and of how many it was tried."""
    hits = tried = 0
    for case in seen:
        if impl in case.rows:
            made = expect(case.problem, impl, [other for other in seen if other is not case])
            if made is not None:
                tried += 1
                hits += made.low <= case.rows[impl]["us"] <= made.high
    return hits, tried


def _predict(problem: DecodeProblem, impl: str, seen: Sequence[Seen]) -> Expectation | None:
    near = sorted((case for case in seen if impl in case.rows), key=lambda case: distance(problem, case.problem))
    near = near[:NEAREST]
    if len(near) < NEAREST:
        return None
    weights = [(distance(problem, case.problem) + 0.25) ** -2 for case in near]
    beyond = [case.rows[impl]["us"] - case.bound_us for case in near]
    bound = bound_us(problem.kv_bytes, seen)
    us = bound + sum(w * more for w, more in zip(weights, beyond, strict=True)) / sum(weights)
    return Expectation(impl=impl, us=us, low=us, high=us, share=bound / us, miss=None, cases=tuple(near))


def against(case: Seen, impl: str, other: str) -> stats.Estimate | None:
    """The time of one implementation over that of another on a recorded case, paired by round."""
    if impl not in case.rows or other not in case.rows:
        return None
    return stats.ratio_interval(case.rows[impl]["samples"], case.rows[other]["samples"])


def verdict_on(case: Seen, impl: str, other: str) -> str | None:
    """:func:`harness.stats.verdict` on that ratio."""
    ratio = against(case, impl, other)
    return None if ratio is None else stats.verdict(ratio, smallest_effect(case.run))


def _is_tie(first: Expectation, other: str) -> bool:
    told = [v for case in first.cases if (v := verdict_on(case, first.impl, other)) is not None]
    return bool(told) and (told[0] != stats.FASTER or stats.SLOWER in told)


def tile_of(problem: DecodeProblem, impl: str, seen: Sequence[Seen], sm_count: int) -> tuple[Seen, bool]:
    """The nearest case whose tile this implementation would also take here, and whether it surely would.

    Our rules choose it by the shape and by the kind of work. TileLang's takes a part of its ring for some of one
    kind, such as even work where nothing is split; so the longest is the one to count splits with. Where no
    recorded case is of this kind, the nearest stands in.
    """
    # Imports torch, which takes a second or two.
    from impls.splitkv_plan import few_unlike, share_exceeds, work_of

    def kind(p: DecodeProblem) -> tuple[object, ...]:
        unlike = few_unlike(p, sm_count)
        much = unlike and share_exceeds(p, sm_count, RING_KEYS)
        return p.head_dim, p.dtype, p.group, work_of(p, sm_count), unlike, much

    near = sorted((case for case in seen if impl in case.rows), key=lambda case: distance(problem, case.problem))
    same = [case for case in near if kind(case.problem)[:3] == kind(problem)[:3]] or near[:1]
    alike = [case for case in same if kind(case.problem) == kind(problem)]
    ring = max(
        alike or same[:1], key=lambda case: case.configs[impl]["block_n"] * case.configs[impl].get("num_stages", 1)
    )
    return ring, bool(alike)


def splits_of(
    problem: DecodeProblem, tile: Mapping[str, Any], sm_count: int, device: str
) -> tuple[dict[int, int], int, bool]:
    """Length -> splits, the longest first; CTAs; and whether the tile is the rule's too, not that of another plan.

    The rules have the tile too: TileLang's where that library is installed, Triton's for a GPU of
    compute capability 9.0. Else the splits are made with the tile of a recorded plan, and near to the rule's:
    Triton's takes somewhat fewer splits where they can merge without a kernel of their own; here that is where
    the SMs hold a CTA each, for how many more one holds is not in a record. Nor is another tile weighed.

    Args:
        problem: the batch.
        tile: what a recorded plan came to.
        sm_count: SMs of the GPU of the records.
        device: its name.
    """
    # Imports torch, which takes a second or two.
    from impls.splitkv_plan import (
        SPLIT_TUNING,
        TRITON_WHOLE,
        choose_splits,
        rounds_splits,
        split_limits,
        stays_whole,
    )
    from impls.triton_tile import TILE_TUNING, can_exchange

    if (made := _by_tilelang(problem, tile, sm_count) or _by_triton(problem, tile, sm_count, device)) is not None:
        table, per_split = made.table, made.tiles_per_split
    else:
        limits = split_limits(
            sm_count,
            problem,
            block_n=tile["block_n"],
            num_stages=tile.get("num_stages", 1),
            tma=bool(tile.get("tma")),
        )
        per_split = problem.tiles_per_split(tile["block_h"])
        choice, fixed = {**SPLIT_TUNING, **TILE_TUNING}, None
        if tile.get("library") == "triton":
            shape = {"sms": sm_count, "tiles_per_split": per_split}
            at_once = PACKED_AN_SM * sm_count
            whole = stays_whole(problem, choice, **shape, at_once=at_once, kinds=TRITON_WHOLE)
            fixed = 1 if whole else rounds_splits(problem, choice, **shape)
        table = choose_splits(
            problem,
            SPLIT_TUNING if fixed is None else {**SPLIT_TUNING, "num_splits": fixed},
            sm_count=sm_count,
            tiles_per_split=per_split,
            limits=limits,
            at_once=sm_count if can_exchange(problem) else 0,
        )
    counts = dict(sorted(zip(problem.kv_lens, table.counts.tolist(), strict=True), reverse=True))
    return counts, table.splits * per_split, made is not None


def _by_tilelang(problem: DecodeProblem, tile: Mapping[str, Any], sm_count: int) -> Splitting | None:
    """What TileLang's rule makes of a problem on the machine of a recorded plan; None where nobody can be asked."""
    from impls.contract import ImplUnavailable, PlanRefused

    if tile.get("library") != "tilelang":
        return None
    try:
        from impls import tilelang_splitkv
        from impls.tilelang_machines import MACHINES
    except ImplUnavailable:
        return None
    if tilelang_splitkv.refused_problem(problem, gpu=True) is not None:
        return None
    machine = MACHINES[tile["machine"]]
    try:
        return tilelang_splitkv.decide(machine, problem, tilelang_splitkv.TUNING, sm_count).splitting
    except PlanRefused:
        return None


def _by_triton(problem: DecodeProblem, tile: Mapping[str, Any], sm_count: int, device: str) -> Splitting | None:
    """What Triton's rule makes of a problem on the GPU of the records; None but for :data:`HOPPER`."""
    from impls.contract import PlanRefused
    from impls.splitkv_plan import SPLIT_TUNING
    from impls.triton_rule import choose_plan, refused_problem, tiles_of
    from impls.triton_tile import TILE_TUNING, sm_90

    if tile.get("library") != "triton" or not set(HOPPER) & set(device.split()):
        return None
    if refused_problem(problem) is not None:
        return None
    machine, choice = sm_90(sm_count), {**SPLIT_TUNING, **TILE_TUNING}
    tiles = tiles_of(problem, machine, choice)
    try:
        return choose_plan(problem, machine, choice, tiles)[1]
    except PlanRefused:
        return None


def _far(problem: DecodeProblem, cases: Sequence[Seen]) -> Iterable[str]:
    """What of the batch lies outside the nearest cases, in words."""
    nearest = distance(problem, cases[0].problem)
    if nearest >= FAR:
        yield f"the nearest case, {cases[0].name}, is {nearest:.1f} doublings away"
    sizes = [case.problem.kv_bytes for case in cases]
    if problem.kv_bytes > 2 * max(sizes) or 2 * problem.kv_bytes < min(sizes):
        yield f"its {problem.kv_bytes / 1e6:.4g} MB of K and V lie outside theirs by more than twofold"
    for name in ("head_dim", "dtype", "group"):
        values = {getattr(case.problem, name) for case in cases}
        if getattr(problem, name) not in values:
            what = "query heads a KV head" if name == "group" else name
            told = ", ".join(map(str, sorted(values)))
            yield f"{what} {getattr(problem, name)} is none of theirs ({told})"
