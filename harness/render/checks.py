"""What the check catches (impostors, honest errors, random problems), and what it said of a study; from records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.families import FAMILY_NAMES, FAMILY_NOTES, PROBE_NOTES
from harness.record import (
    CHECKS_FILE,
    FINDINGS_FILE,
    IMPOSTORS_FILE,
    RANDOM_FILE,
    Record,
    RecordError,
    largest_share,
    read,
)
from harness.render.template import Table, fill
from harness.render.text import cases_text, code, escape, join, number_text, versions

NAMED = 3
"""From so many families on, a cell leaves the other probes out."""

FLOOR_FAMILIES = ("normal", "needles", "exact")
"""Families whose honest errors the report shows; the records hold all."""

TRUE_SHARE = 2.0
"""A wrong answer that came again, in a process of its own, at this multiple of its budget is a true one."""

SIMULATED = "simulated"

FEW = 10.0
"""Up to so many budgets a wrong answer is told as that multiple of unavoidable rounding."""

SMALL_ERROR = 0.01
"""Relative error of a row under which it is right as a whole, whatever single elements are."""

MEANT_BY: Mapping[str, str] = {
    "again": ", only once its inputs' tensors hold other values",
    "memory": ", only where other numbers lie in rows that do not belong to the sequence",
    "layout": ", only where its inputs are strided views",
    "graph": ", only when replayed from a CUDA graph",
    "repeat": ", only in some runs on the same input",
}
"""Probe -> what sets a wrong answer apart from the plain run, which is right."""


def write_check_report(folder: Path) -> Path:
    """Write the report of ``impostors.jsonl`` and, where it exists, ``random.jsonl`` into their folder.

    Raises:
        harness.record.RecordError: if there is no impostor, or a line is no record.
    """
    records = read(folder / IMPOSTORS_FILE)
    checks = [r for r in records if r["kind"] == "check"]
    impostors = [r for r in checks if r["config"].get("role") == "impostor"]
    if not impostors:
        raise RecordError(f"{folder / IMPOSTORS_FILE}: expected a check of an impostor, got none")
    floors = [r for r in checks if r["config"].get("role") == "floor"]
    has_random = (folder / RANDOM_FILE).is_file()
    random = read(folder / RANDOM_FILE) if has_random else []
    tried = [r for r in random if r["kind"] == "check"]
    simulated = [r for r in impostors if r["config"]["around"] == SIMULATED]
    values = {
        "headline": _headline(impostors, tried),
        "environments": _environments([*records, *random]),
        "catches": _catches(simulated),
        "silent": _silent(simulated),
        "real": _real(impostors),
        "families": [f"`{name}`: {note}." for name, note in FAMILY_NOTES.items()],
        "floors": _floors(floors),
        "random": _random(tried) if tried else None,
        "coverage": _coverage(tried) if tried else [],
        "findings": _findings(tried),
    }
    return fill("checks.md.j2", values, folder)


def _headline(impostors: Sequence[Record], tried: Sequence[Record]) -> list[str]:
    names = {r["impl"] for r in impostors}
    count = [r for r in impostors if r["config"]["counts"]]
    missed = [r for r in count if r["status"] != "wrong"]
    sentences = [
        f"{len(names)} wrong kernels were tried at {join([f'{n:,}' for n in _lengths(impostors)])} keys, "
        f"{len(count)} times with an error that is visible at all: "
        + ("all were caught." if not missed else f"**{len(missed)} were missed**.")
    ]
    if tried:
        judged = [r for r in tried if r["status"] in ("ok", "wrong")]
        alarms = [r for r in judged if r["status"] == "wrong" and not _is_true(r)]
        true = [r for r in judged if _is_true(r)]
        sentences.append(
            f"{len({r['case'] for r in tried}):,} random problems gave {len(judged):,} answers: "
            f"{_some(len(alarms), 'false alarm')}, {_some(len(true), 'true failure')}."
        )
    return sentences


def _some(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _environments(records: Sequence[Record], *, with_study: bool = True) -> str:
    lines = []
    for run in (r for r in records if r["kind"] == "run"):
        env = run["env"]
        parts = [str(env.get("gpu") or env.get("cpu") or env.get("device"))]
        parts += versions(env, ("torch", "triton", "tilelang"))
        study = f", {run['study']}" if with_study else ""
        lines.append(f"{escape(', '.join(parts))} (run `{run['run_id']}`{study}).")
    return "<br>\n".join(lines)


def _lengths(rows: Sequence[Record]) -> list[int]:
    return sorted({r["config"]["length"] for r in rows})


def _catches(rows: Sequence[Record]) -> Table:
    """Impostor by length: what caught it."""
    lengths = _lengths(rows)
    by_place = {(r["impl"], r["config"]["length"]): r for r in rows}
    lines = [
        [escape(name), *(_catch(by_place.get((name, length))) for length in lengths)]
        for name in dict.fromkeys(r["impl"] for r in sorted(rows, key=lambda r: r["config"]["length"]))
    ]
    header = ["wrong kernel", *(f"{n:,} key{'' if n == 1 else 's'}" for n in lengths)]
    return Table(header, "l" * len(header), lines)


def _catch(row: Record | None) -> str:
    if row is None:
        return ""
    if not row["config"]["counts"]:
        return "–"
    caught = row["check"]["caught"]
    families = [name for name in FAMILY_NAMES if name in caught]
    if len(families) == len(FAMILY_NAMES):
        return "every family"
    others = [title.split()[-1] for title in caught if title not in FAMILY_NAMES]
    return ", ".join([*families, *others] if len(families) < NAMED else families) or "**missed**"


def _silent(rows: Sequence[Record]) -> Table | None:
    """The impostors that do not count at a length, and why."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in rows:
        if not r["config"]["counts"]:
            groups.setdefault((r["impl"], _why(r)), []).append(r)
    lines = [
        [
            escape(name),
            ", ".join(f"{r['config']['length']:,}" for r in of_group),
            f"{max(r['config']['excess'] for r in of_group):.2g} ×",
            why,
        ]
        for (name, why), of_group in groups.items()
    ]
    return Table(["wrong kernel", "keys", "error ÷ honest", "why"], "lrrl", lines) if lines else None


def _why(row: Record) -> str:
    if row["config"]["excess"] <= 1:
        return "right: nothing of what it does wrong happens at this length"
    return "within what honest kernels differ by" + (", and caught all the same" if row["check"]["caught"] else "")


def _real(rows: Sequence[Record]) -> Table | None:
    """How the impostors around each kernel fared, length by length."""
    lines = []
    for kernel in sorted({r["config"]["around"] for r in rows}, key=lambda name: (name != SIMULATED, name)):
        for length in _lengths(rows):
            mine = [r for r in rows if (r["config"]["around"], r["config"]["length"]) == (kernel, length)]
            count = [r for r in mine if r["config"]["counts"]]
            caught = sum(r["status"] == "wrong" for r in count)
            if mine:
                name = kernel if kernel == SIMULATED else code(kernel)
                lines.append([name, f"{length:,}", str(len(mine)), str(len(count)), str(caught)])
    return Table(["around", "keys", "tried", "count", "caught"], "lrrrr", lines)


def _floors(rows: Sequence[Record]) -> Table | None:
    """What honest kernels are off by."""
    if not rows:
        return None
    header, lines = ["dtype", "keys"], []
    for family in FLOOR_FAMILIES:
        header += [f"{family}: row", "÷ budget", "LSE", "÷ budget"]
    for row in sorted(rows, key=lambda r: (r["problem"]["dtype"], r["config"]["length"])):
        line = [row["problem"]["dtype"], f"{row['config']['length']:,}"]
        for family in FLOOR_FAMILIES:
            found = next(p for p in row["check"]["probes"] if p["family"] == family)
            line += [
                _short(found["rel_row"]),
                _short(found["worst_row"]),
                _short(found["lse_err"]),
                _short(found["worst_lse"]),
            ]
        lines.append(line)
    return Table(header, "lr" + "r" * 4 * len(FLOOR_FAMILIES), lines)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _is_true(row: Record) -> bool:
    """Whether a wrong answer came again in a process of its own, far over its budget."""
    again = row["config"].get("again")
    return (
        row["status"] == "wrong"
        and bool(again)
        and min(largest_share(row["check"]), largest_share(again)) >= TRUE_SHARE
    )


def _random(rows: Sequence[Record]) -> Table:
    lines = []
    for name in dict.fromkeys(r["impl"] for r in rows):
        mine = [r for r in rows if r["impl"] == name]
        counts = Counter(r["status"] for r in mine)
        true = sum(map(_is_true, mine))
        shares = [largest_share(r["check"]) for r in mine if r["status"] == "ok"]
        lines.append(
            [
                code(name),
                f"{counts['ok']:,}",
                str(counts["wrong"] - true),
                str(true),
                f"{counts['unsupported']:,}",
                f"{counts['failed'] + counts['unavailable']:,}",
                f"{max(shares):.2f}" if shares else "–",
            ]
        )
    header = ["implementation", "right", "false alarms", "true failures", "unsupported", "failed or missing"]
    return Table([*header, "largest share of a budget"], "lrrrrrr", lines)


def _coverage(rows: Sequence[Record]) -> list[str]:
    """What the random problems cover, in sentences."""
    problems = list({r["case"]: r for r in rows}.values())
    lens = [n for r in problems for n in r["problem"]["kv_lens"]]
    shapes = {tuple(r["problem"][key] for key in ("heads_q", "heads_kv", "head_dim", "dtype")) for r in problems}
    totals = sorted(sum(r["problem"]["kv_lens"]) for r in problems)
    asked = {str(r["config"]["num_splits"]) for r in rows if "num_splits" in r["config"]}
    splits = f"; split counts {', '.join(sorted(asked, key=_order))}" if asked else ""
    return [
        f"{len(lens):,} sequences of {min(lens, default=0)} to {max(lens, default=0):,} keys, "
        f"{sum(n == 0 for n in lens):,} of them empty and {sum(0 < n < 130 for n in lens):,} under 130 keys; "
        f"problems of {totals[0]} to {totals[-1]:,} keys, half of them under {totals[len(totals) // 2]:,}.",
        f"{len(shapes)} combinations of heads, head dim and dtype{splits}.",
    ]


def _order(text: str) -> tuple[bool, int]:
    return (text.isdigit(), int(text) if text.isdigit() else 0)


def _findings(rows: Sequence[Record]) -> list[str]:
    """Each true failure, with what repeats it."""
    lines = []
    for r in filter(_is_true, rows):
        number = int(r["case"].removeprefix("random_"))
        command = f"python -m harness.fuzz --only {number} --seed {r['config']['sequence']} --impls {r['impl']}"
        shape = {key: value for key, value in r["problem"].items() if key != "kv_lens"}
        lens = ", ".join(map(str, r["problem"]["kv_lens"]))
        lines.append(f"{code(r['impl'])} on [{lens}], {shape}: {escape(str(r['reason']))}. `{command}`")
    return lines


# --- the checks of a study ------------------------------------------------------------------------------


def deep_check(folder: Path) -> dict[str, Any] | None:
    """What a study's ``checks.jsonl`` says: errors by family, disagreement of implementations, determinism.

    Args:
        folder: of the study.

    Returns:
        What the study's template fills in, or None where there is no such file.
    """
    path = folder / CHECKS_FILE
    if not path.is_file():
        return None
    records = read(path)
    rows = [r for r in records if r["kind"] == "check" and r["check"] is not None]
    if not rows:
        return None
    wrong = sum(r["status"] == "wrong" for r in rows)
    cases = len({r["case"] for r in rows})
    return {
        "note": f"{cases_text(cases)}, {len(rows)} checks, {wrong or 'none'} wrong{_whose(rows)}.",
        "environments": _environments(records, with_study=False),
        "probes": _probe_notes(rows),
        "families": _by_family(rows),
        "wrong": _wrong(rows),
        "pairs": _pairs([r for r in rows if r["status"] == "ok"]),
        "determinism": _determinism([r for r in rows if r["status"] == "ok"]),
        "faults": _faults(rows, folder),
    }


def in_short(folder: Path, runs: Collection[str] | None = None) -> dict[str, str]:
    """Implementation -> what its worst wrong answer in a folder's ``checks.jsonl`` means, in a clause.

    Args:
        folder: of a study; without the file nothing is wrong.
        runs: the runs that count; None takes all.

    Raises:
        harness.record.RecordError: for a line that is no record.
    """
    path = folder / CHECKS_FILE
    rows = [
        r
        for r in (read(path) if path.exists() else ())
        if r["kind"] == "check" and r["check"] is not None and (runs is None or r["run_id"] in runs)
    ]
    wrong = [r for r in rows if r["status"] == "wrong"]
    told = {}
    for label in _labels(wrong):
        mine = [r for r in wrong if _label(r) == label]
        groups: dict[tuple[str, str], list[tuple[Record, Mapping[str, Any]]]] = {}
        for r in mine:
            for p in r["check"].get("probes", ()):
                if not p["ok"]:
                    groups.setdefault((p["family"], p["probe"]), []).append((r, p))
        if not groups:
            continue
        place = max(groups, key=lambda key: max(largest_share(p) for _, p in groups[key]))
        family, probe = place
        found = [p for _, p in groups[place]]
        error = max(p["rel_row"] or 0.0 for p in found)
        if all(p["finite"] for p in found) and error >= SMALL_ERROR:
            told[label] = f"a row is off by up to {number_text(100 * error, 3)} % of its own size"
        else:
            told[label] = _meaning(probe, found, clean=all(_right_on(r, family) for r, _ in groups[place]))
        if probe == "values" and family in FAMILY_NOTES:
            told[label] += f", on {code(family)} inputs ({FAMILY_NOTES[family].partition(':')[0]})"
    return told


def _probe_notes(rows: Sequence[Record]) -> list[str]:
    """What each family and each probe of these checks is, in a few words."""
    families, probes = [], []
    for family, probe in _places(rows):
        if probe == "values" and family in FAMILY_NOTES:
            families.append(f"`{family}`: {FAMILY_NOTES[family]}")
        elif probe in PROBE_NOTES:
            probes.append(f"`{_heading(rows, (family, probe))}` (inputs: `{family}`): {PROBE_NOTES[probe]}")
    return [f"{note}." for note in (*families, *probes)]


def _places(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """(family, probe) of everything that was tried, in order."""
    return list(dict.fromkeys((p["family"], p["probe"]) for r in rows for p in r["check"]["probes"]))


def _heading(rows: Sequence[Record], place: tuple[str, str]) -> str:
    """What a probe's column is called: its family, or the experiment, with its family where that is not clear."""
    family, probe = place
    if probe == "values":
        return family
    return probe if sum(other == probe for _, other in _places(rows)) == 1 else f"{family} {probe}"


def _wrong(rows: Sequence[Record]) -> Table | None:
    """Each implementation and probe with a wrong answer: by how much, where, and what that means."""
    groups: dict[tuple[str, str, str], list[tuple[Record, Mapping[str, Any]]]] = {}
    for r in rows:
        for p in r["check"]["probes"]:
            if not p["ok"]:
                groups.setdefault((_label(r), p["family"], p["probe"]), []).append((r, p))
    cases = {label: len({r["case"] for r in rows if _label(r) == label}) for label in _labels(rows)}
    lines = []
    for (label, family, probe), found in groups.items():
        lines.append(
            [
                code(label),
                _heading(rows, (family, probe)),
                f"{len(found)} of {cases[label]}",
                *(_most([p[key] for _, p in found]) for key in ("worst_element", "worst_row", "worst_lse")),
                _most([p["rel_row"] for _, p in found], percent=True),
                _meaning(probe, [p for _, p in found], clean=all(_right_on(r, family) for r, _ in found)),
                ", ".join(code(r["case"]) for r, _ in found),
            ]
        )
    header = ["implementation", "wrong by", "cases", "element ÷ budget", "row ÷ budget", "LSE ÷ budget"]
    return Table([*header, "error of a row", "what that means", "on"], "llrrrrrll", lines) if lines else None


def _most(values: Sequence[float | None], *, percent: bool = False) -> str:
    """The largest of several errors, with three digits; a dash where none is a number."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{number_text(100 * max(known), 3)} %" if percent else number_text(max(known), 3)


def _right_on(row: Record, family: str) -> bool:
    """Whether the plain run on a family's inputs was right."""
    return any(p["ok"] for p in row["check"]["probes"] if (p["family"], p["probe"]) == (family, "values"))


def _meaning(probe: str, found: Sequence[Mapping[str, Any]], *, clean: bool) -> str:
    """One sentence on wrong answers of one implementation by one probe, from the kind of probe and the numbers.

    Args:
        probe: its name.
        found: what the probe said, a case each.
        clean: whether the plain run on the same inputs was right on each of the cases.
    """
    when = MEANT_BY.get(probe, "") if clean else ""
    if not all(p["finite"] for p in found):
        if not any("finite" in str(p["reason"]) for p in found if not p["finite"]):
            return f"its output cannot be compared with the reference; the reason says why{when}"
        if probe != "memory":
            return f"NaN or Inf where the reference is finite{when}"
        text = "NaN or Inf in rows that do not belong to a sequence reach its output"
        return text + ("; with finite numbers everywhere it is right" if clean else "")
    share = max(map(largest_share, found))
    if share <= 1:
        return f"within the budgets, and wrong in what else the probe looks at; the reason says in what{when}"
    error = max(p["rel_row"] or 0.0 for p in found)
    by, size = number_text(share, 3), number_text(100 * error, 3)
    if error >= SMALL_ERROR:
        text = f"off by up to {by} budgets, a row by up to {size} % of its own size"
    elif share <= FEW:
        text = f"off by up to {by} times the rounding that the dtype makes unavoidable"
    else:
        text = (
            f"single elements are off by up to {by} times the rounding that the dtype makes unavoidable, a row as a"
            f" whole by {size} % at most"
        )
    return text + when


def _whose(rows: Sequence[Record]) -> str:
    """Whose the wrong answers are, in parentheses; nothing where there is none."""
    counts = Counter(_label(r) for r in rows if r["status"] == "wrong")
    return f" ({join([f'{code(label)} on {n}' for label, n in counts.most_common()])})" if counts else ""


def _faults(rows: Sequence[Record], folder: Path) -> list[dict[str, str]]:
    """Each implementation and probe with a wrong answer: a sentence, and what repeats it on a small problem."""
    smallest = {}
    if (folder / FINDINGS_FILE).is_file():
        least = [r for r in read(folder / FINDINGS_FILE) if r["kind"] == "check"]
        smallest = {(r["impl"], r["config"]["probe"]): r for r in least}
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in rows:
        if r["status"] == "wrong":
            title = r["check"].get("family") or str(r["reason"]).partition(":")[0]
            groups.setdefault((r["impl"], title), []).append(r)
    faults = []
    for (impl, title), of_group in groups.items():
        row = smallest.get((impl, title))
        again = (
            ""
            if row is None
            else "; right when tried again"
            if row["status"] == "ok"
            else "; smallest failing problem:"
        )
        shown = row if row is not None and row["status"] == "wrong" else of_group[0]
        faults.append(
            {
                "text": f"{code(impl)} is wrong by {_told(title)}, on {code(of_group[0]['case'])} for"
                " example: "
                f"{escape(str(of_group[0]['reason']).removeprefix(f'{title}: '))}{again}",
                "snippet": _snippet(shown, title),
            }
        )
    return faults


def _told(title: str) -> str:
    """A probe's title in a sentence: its family, or the experiment with the inputs on which it is made."""
    family, _, probe = title.partition(" ")
    return f"`{probe}` (inputs: `{family}`)" if probe in PROBE_NOTES else f"`{title}`"


def _snippet(row: Record, title: str) -> str:
    """Python that puts the row's implementation through the probe on the row's problem."""
    problem = {**row["problem"], "kv_lens": tuple(row["problem"]["kv_lens"])}
    arguments = ", ".join(f"{key}={value!r}" for key, value in problem.items())
    return f"""import torch
from harness.probes import probes
from impls.catalog import load
from impls.problem import DecodeProblem

problem = DecodeProblem({arguments})
device = torch.device("cuda")
plan = load({row["impl"]!r}).plan(problem, device)
for probe in probes(problem, {row["seed"]}, device, families=({title.partition(" ")[0]!r},)):
    print(probe.title, probe.apply(plan).result.reason)
"""


def _label(row: Record) -> str:
    asked = row["config"].get("asked", {})
    return " ".join([row["impl"], *(f"{key}={value}" for key, value in asked.items())])


def _labels(rows: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(map(_label, rows)))


def _by_family(rows: Sequence[Record]) -> Table:
    """The worst row of all cases, as a share of its budget, by implementation and probe."""
    probes = _places(rows)
    lines = []
    for label in _labels(rows):
        line = [code(label)]
        for place in probes:
            mine = [
                p
                for r in rows
                if _label(r) == label
                for p in r["check"]["probes"]
                if (p["family"], p["probe"]) == place
            ]
            shares = [p["worst_row"] for p in mine if p["worst_row"] is not None]
            faults = sum(not p["ok"] for p in mine)
            line.append(f"**{faults} wrong**" if faults else f"{max(shares):.2f}" if shares else "–")
        lines.append(line)
    names = [_heading(rows, place) for place in probes]
    return Table(["implementation", *names], "l" + "r" * len(names), lines)


def _pairs(rows: Sequence[Record]) -> Table:
    """How far right outputs are from float64 and from each other, at most over all cases."""
    labels = _labels(rows)
    largest: dict[tuple[str, str], tuple[float, float]] = {}
    entries = {(r["case"], number): _label(r) for r in rows for number in [r["check"].get("entry")]}
    for r in rows:
        for pair in r["check"]["pairs"]:
            other = entries.get((r["case"], pair["entry"]), pair["impl"])
            now = (pair["rel_l2"] or 0.0, pair["worst_row"] or 0.0)
            before = largest.get((_label(r), other), (0.0, 0.0))
            largest[_label(r), other] = (max(now[0], before[0]), max(now[1], before[1]))
    lines = []
    for label in labels:
        mine = [p for r in rows if _label(r) == label for p in r["check"]["probes"][:1]]
        errors = [p["rel_l2"] for p in mine if p["rel_l2"] is not None]
        lines.append([code(label), f"{max(errors, default=0.0):.2g}", *(_apart(largest, label, o) for o in labels)])
    return Table(["", "float64", *(code(label) for label in labels)], "lr" + "r" * len(labels), lines)


def _apart(largest: Mapping[tuple[str, str], tuple[float, float]], label: str, other: str) -> str:
    if (label, other) not in largest:
        return ""
    rel_l2, worst_row = largest[label, other]
    return f"{rel_l2:.2g} ({worst_row:.2f})"


def _determinism(rows: Sequence[Record]) -> Table:
    lines = []
    for label in _labels(rows):
        mine = [r["check"] for r in rows if _label(r) == label]
        line = [code(label)]
        for key in ("same_input_ulp", "other_batch_ulp", "one_split_ulp"):
            values = [check[key] for check in mine if check.get(key) is not None]
            line.append(f"{max(values):,}" if values else "–")
        lines.append(line)
    header = [
        "implementation",
        "same input again",
        "same sequence in another batch",
        "one split instead of its own",
    ]
    return Table(header, "lrrr", lines)
