"""What too few and too many splits cost, and where that time goes: in the split kernel, in merging, or in gaps.

Times are of the report; what a call consists of is from a run of method ``kernels``, where there is one. Splits
that merge inside of the split kernel leave no trace of that by itself: there the CTAs and their bytes say what they
can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.render.decisions import paired, splits_text
from harness.render.frame import Comparison, impl_of
from harness.render.groups import Curve, curves_of
from harness.render.template import Table
from harness.render.text import (
    ABSENT,
    bytes_text,
    code,
    interval_text,
    join,
    linked,
    number_text,
    us_text,
)
from impls.catalog import ABLATIONS, OURS

SPLIT, MERGE, GAPS = "split kernel", "merging", "gaps"
"""What the time of a call goes to."""

INSIDE = {"cluster": "in a cluster", "exchange": "by exchange"}
"""How splits merge inside of the split kernel, by what a plan's configuration calls it."""

SHOWN_US = 0.005
"""A difference under so many µs is none to speak of."""

FEWEST, DEFAULT, BEST, MOST = "fewest", "default", "best", "most"


@dataclass(frozen=True)
class Loss:
    """What a split count costs beside the best one, as far as traces of both tell.

    Args:
        row: the count.
        parts: part of a call -> how many µs more than at the best it takes; they add up to the difference.
    """

    row: Any
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """The difference of the two traced calls, in µs."""
        return math.fsum(self.parts.values())

    @property
    def main(self) -> str:
        """The part that takes most of it."""
        return max(self.parts, key=lambda part: self.parts[part])


def splits(comparison: Comparison) -> Table | None:
    """The default beside the best fixed count, and what the fewest and the most splits cost and why."""
    lines = []
    for curve in curves_of(comparison):
        best, few, many, own = curve.best, curve.fixed[0], curve.fixed[-1], curve.own
        ratio = None if own is None else paired(own, best)
        lines.append(
            [
                code(curve.case),
                code(curve.family),
                *((splits_text(own), linked(us_text(own.us), own.anchor)) if own is not None else (ABSENT, ABSENT)),
                str(best.asked_splits),
                linked(us_text(best.us), best.anchor),
                ABSENT if ratio is None else interval_text(ratio.median, ratio.low, ratio.high),
                _cost(few, best, _few(few)),
                _cost(many, best, _many(many)),
            ]
        )
    header = ["case", "implementation", "default", "µs", "best fixed count", "µs", "default ÷ best"]
    return Table([*header, "fewest splits", "most splits"], "lllrrrrll", lines) if lines else None


def _cost(row: Any, best: Any, why: str) -> str:
    """How many times the best count's time a count takes, where the difference goes, and what its plan says."""
    cost = linked(f"{row.asked_splits}: {row.us / best.us:.2f} ×", row.anchor)
    if row.asked_splits == best.asked_splits:
        return f"{cost}, the best"
    loss = loss_of(row, best)
    told = [f"{cost}, {_loss_text(loss)}" if loss is not None else cost, why]
    return (", " if loss is None else "; ").join(filter(None, told))


def _loss_text(loss: Loss) -> str:
    """``+41.0 µs (split kernel +40.9, gaps +0.1)``."""
    told = [f"{_name(loss.row, part)} {_more(us)}" for part, us in loss.parts.items() if abs(us) >= SHOWN_US]
    return f"traced {_more(loss.total)} µs" + (f" ({', '.join(told)})" if told else "")


def _more(us: float) -> str:
    return f"{'-' if us < 0 else '+'}{us_text(abs(us))}"


def _name(row: Any, part: str) -> str:
    """What a part is called: of another implementation only the longest kernel is known, and all others."""
    if _ours(row):
        return {MERGE: "combine kernel"}.get(part, part)
    return {SPLIT: "longest kernel", MERGE: "other kernels"}.get(part, part)


def _ours(row: Any) -> bool:
    return impl_of(row.label) in (*OURS, *ABLATIONS)


def _few(row: Any) -> str:
    """What a plan's CTAs are against the device's SMs, and what each reads."""
    if math.isnan(row.work_items) or math.isnan(row.sm_count):
        return ""
    text = f"{row.work_items:,.0f} CTAs for {row.sm_count:.0f} SMs"
    largest, mean = largest_bytes(row), mean_bytes(row)
    if not math.isnan(largest):
        return f"{text}, {bytes_text(mean)} each in the mean and at most {bytes_text(largest)}"
    return text if math.isnan(mean) else f"{text}, {bytes_text(mean)} each"


def _many(row: Any) -> str:
    """How many CTAs a plan has, what each reads, and how many partial results a row has."""
    if math.isnan(row.work_items) or math.isnan(row.splits_max):
        return ""
    mean = mean_bytes(row)
    each = "" if math.isnan(mean) else f" of {bytes_text(mean)}{'' if _even(row) else ' in the mean'}"
    return f"{row.work_items:,.0f} CTAs{each} and up to {row.splits_max:.0f} partial results a row to merge"


def is_traced(row: Any) -> bool:
    """Whether a trace tells what the row's time consists of: of a plan that came to the same."""
    return bool(row.traced_alike)


def loss_of(row: Any, best: Any) -> Loss | None:
    """What a count takes beyond the best, part by part; None where not both were traced."""
    if not is_traced(row) or not is_traced(best):
        return None
    return Loss(row, {part: us - _parts(best)[part] for part, us in _parts(row).items()})


def _parts(row: Any) -> dict[str, float]:
    return {SPLIT: row.main_net_us, MERGE: row.others_net_us, GAPS: row.gap_net_us + row.between_net_us}


def mean_bytes(row: Any) -> float:
    """The bytes of K and V that a CTA reads in the mean; NaN where the splits are not known."""
    return float(row.kv_bytes / (row.heads_kv * row.splits_total)) if row.splits_total > 0 else math.nan


def largest_bytes(row: Any) -> float:
    """The most bytes of K and V that one CTA reads, where lengths differ and every sequence has as many splits."""
    count = row.asked_splits or (1 if row.splits_max == 1 else None)
    if count is None or _even(row) or not row.splits_total > 0:
        return math.nan
    return float(row.kv_bytes / row.total_kv / row.heads_kv * math.ceil(row.max_kv / count))


def _even(row: Any) -> bool:
    return bool(row.batch * row.max_kv == row.total_kv)


def marked(curve: Curve) -> list[tuple[str, Any]]:
    """The rows that a curve is explained by, each once, and what each is: fewest, default, best, most splits."""
    own, best = curve.own, curve.best
    if own is not None and own.ran is not None and own.ran == best.ran:
        own, best_words = None, f"{DEFAULT}, {BEST}"  # the same kernel with the same splits, timed twice
    else:
        best_words = BEST
    found = [(FEWEST, curve.fixed[0]), (DEFAULT, own), (best_words, best), (MOST, curve.fixed[-1])]
    rows: dict[str, Any] = {}
    words: dict[str, list[str]] = {}
    for word, row in found:
        if row is not None:
            rows[row.label] = row
            words.setdefault(row.label, []).append(word)
    return [(", ".join(words[label]), row) for label, row in rows.items()]


def split_parts(comparison: Comparison) -> dict[str, Any] | None:
    """Of what a call consists at the fewest splits, the default, the best count and the most; None without any."""
    curves = curves_of(comparison)
    rows = [(curve, word, row) for curve in curves for word, row in marked(curve)]
    if not rows:
        return None
    traced = any(is_traced(row) for _, _, row in rows)
    header = ["case", "implementation", "splits", "which", "merged", "CTAs", "CTAs ÷ SMs", "K and V a CTA", "µs"]
    if traced:
        header += ["split (longest) kernel", "combine (other) kernels", "gaps", "sum"]
    lines = []
    for curve, word, row in rows:
        line = [code(curve.case), code(curve.family), splits_text(row), word, _merged(row)]
        line += [number_text(row.work_items, 6), number_text(row.work_items / row.sm_count, 2), _bytes(row)]
        line.append(linked(us_text(row.us), row.anchor))
        if traced:
            line += _part_cells(row)
        lines.append(line)
    return {"note": _note(comparison, [row for _, _, row in rows]), "table": _table(header, lines)}


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    return Table(header, "".join("l" if i < 5 else "r" for i in range(len(header))), lines)


def _part_cells(row: Any) -> list[str]:
    if not is_traced(row):
        return ["not traced", *[ABSENT] * 3]
    parts = _parts(row)
    merging = "in the split kernel" if row.merge in INSIDE else us_text(parts[MERGE])
    return [us_text(parts[SPLIT]), merging, f"{parts[GAPS]:.2f}", us_text(row.traced_us)]


def _merged(row: Any) -> str:
    """How the splits of a row merge."""
    if row.merge == "combine":
        return "by a combine kernel"
    return "nothing to merge" if row.splits_max == 1 and _ours(row) else INSIDE.get(row.merge, ABSENT)


def _bytes(row: Any) -> str:
    mean, largest = mean_bytes(row), largest_bytes(row)
    if math.isnan(mean):
        return ABSENT
    return bytes_text(mean) + ("" if math.isnan(largest) else f", at most {bytes_text(largest)}")


def _note(comparison: Comparison, rows: Sequence[Any]) -> str:
    """How to read :func:`split_parts`, what is not traced, and of what run the traces are."""
    text = (
        "µs are medians. CTAs are those of the split kernel, and K and V a CTA what one of them reads in the mean,"
        " and at most where lengths differ."
    )
    traced = [row for row in rows if is_traced(row)]
    if not traced:
        return f"{text} {_untraced(rows)}"
    text += (
        " A call of ours is the split kernel and the combine kernel, a call of others their longest kernel and all"
        " other ones, planning on the device included; gaps are within it and to the next one. The wait of a kernel"
        f" that is put in place early is in none of them. {inside_text()}{traced_by(comparison, traced)}"
    )
    other = [row for row in rows if not math.isnan(row.traced_us) and not is_traced(row)]
    if other:
        names = join([f"{code(row.label)} on {code(row.case)}" for row in other])
        text += (
            f" Traced in another version or configuration than timed, or with other splits, so left out: {names}."
        )
    return text


def traced_by(comparison: Comparison, traced: Sequence[Any]) -> str:
    """The runs that the traces are of, and their commits where they are not those of the times."""
    commits = {run["run_id"]: run["env"].get("git") for run in comparison.runs}
    told = []
    for run_id in dict.fromkeys(row.traced_run for row in traced):
        mine = [row for row in traced if row.traced_run == run_id]
        git, timed = mine[0].traced_git, {commits[row.run_id] for row in mine}
        apart = "" if timed == {git} else f", at commit {_short(git)} where the times are of {_shorts(timed)}"
        told.append(f"{code(run_id)}{apart}")
    return f" Traced in run {join(told)}."


def _short(git: str | None) -> str:
    return "unknown" if git is None else code(str(git)[:12])


def _shorts(commits: set[str | None]) -> str:
    return join([_short(git) for git in sorted(commits, key=str)])


def inside_text() -> str:
    """What no trace can tell of splits that merge inside of the split kernel."""
    return (
        "Splits that merge in a cluster or by exchange do so inside of the split kernel: what that takes is in the"
        " split kernel's time, and no trace tells it apart."
    )


def _untraced(rows: Sequence[Any]) -> str:
    """Why nothing says which kernels the time goes to, and what there is to do."""
    if any(not math.isnan(row.traced_us) for row in rows):
        return (
            "All of what was traced is of another version or configuration than was timed, or has other splits, and"
            " is left out: `splitkv run STUDY --method kernels` traces what is there now."
        )
    return (
        "No record says which kernels the time of these split counts goes to: `splitkv run STUDY --method kernels`"
        " records that."
    )


def explained(comparison: Comparison) -> str:
    """Sentences on where the time of too few and of too many splits goes, for the caption of their figure."""
    curves = curves_of(comparison)
    rows = [row for curve in curves for _, row in marked(curve)]
    if not any(map(is_traced, rows)):
        return f" {_untraced(rows)} CTAs and the bytes of each stand in the tables below."
    smallest = 1 + comparison.smallest_effect
    told = []
    for word, place in (("fewest", 0), ("most", -1)):
        lost = [(curve.fixed[place], curve.best) for curve in curves if _slower(curve, place, smallest)]
        losses = [loss for row, best in lost if (loss := loss_of(row, best)) is not None and loss.total > 0]
        if losses:
            told.append(_explained(word, losses, len(lost), comparison))
    inside = any(row.merge in INSIDE for row in rows)
    return "".join(f" {text}" for text in told) + (f" {inside_text()}" if told and inside else "")


def _slower(curve: Curve, place: int, smallest: float) -> bool:
    return bool(curve.fixed[place].us > smallest * curve.best.us)


def _explained(word: str, losses: Sequence[Loss], of: int, comparison: Comparison) -> str:
    """Which part takes most of the time lost, on how many pairs, and the pair that loses the most."""
    parts = [(part, [loss for loss in losses if loss.main == part]) for part in (SPLIT, MERGE, GAPS)]
    names = {SPLIT: "the split kernel (of others the longest)", MERGE: "kernels that merge (of others all other)"}
    counts = [f"in {names.get(part, part)} on {len(mine)}" for part, mine in parts if mine]
    traced = "" if len(losses) == of else f", which traces show on {len(losses)}"
    text = (
        f"With the {word} splits {of} (implementation, case) pairs lose over {100 * comparison.smallest_effect:g} %"
        f" against their best count{traced}; most of that time goes {join(counts)}"
    )
    if word == "fewest":
        text += _idle(losses)
    worst = max(losses, key=lambda loss: loss.total)
    where = f"{code(worst.row.family)} on {code(worst.row.case)}"
    return f"{text}; the most on {where}, asked for {worst.row.asked_splits}: {_loss_text(worst)}."


def _idle(losses: Sequence[Loss]) -> str:
    """How many of those that lose leave SMs idle, from the start or behind the longest sequence."""
    known = [loss.row for loss in losses if not math.isnan(loss.row.work_items)]
    if not known:
        return ""
    idle = [row for row in known if row.work_items < row.sm_count]
    unlike = [row for row in known if row.work_items >= row.sm_count and not _even(row)]
    told = [f"fewer than the device has SMs on {len(idle)}"] if idle else []
    told += [f"for sequences of unlike length on {len(unlike)}"] if unlike else []
    return f" (CTAs, known on {len(known)}: {join(told)})" if told else ""
