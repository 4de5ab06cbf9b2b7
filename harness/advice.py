"""What ``splitkv recommend`` prints: the answer, what to expect, and the evidence behind both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from harness import stats
from harness.recommend import Advice, Expectation, Seen, distance, skew, verdict_on
from harness.tuning import tuning_text
from impls.catalog import OURS
from impls.problem import DecodeProblem

LENGTHS_SHOWN = 6
"""Different lengths whose splits are listed; the longest, where there are more."""


def show(advice: Advice, console: Console) -> None:
    """Print an advice."""
    console.print(batch_text(advice.problem))
    console.print(f"records of {advice.device}, {advice.sm_count} SMs")
    console.print()
    for name, text in _answer(advice):
        console.print(f"{name:9} {text}", soft_wrap=True)
    console.print()
    console.print(_evidence(advice))
    console.print()
    console.print(_ranking(advice))


def batch_text(problem: DecodeProblem) -> str:
    """The batch in words, so that lengths and counts that were swapped are seen."""
    counts = sorted(Counter(problem.kv_lens).items(), key=lambda item: -item[0])
    shown = [f"{n} of {length:,}" for length, n in counts[:LENGTHS_SHOWN]]
    more = f" and {len(counts) - LENGTHS_SHOWN} other lengths" if len(counts) > LENGTHS_SHOWN else ""
    lens = ", ".join(shown) + more
    return (
        f"{problem.batch} sequence{'s' if problem.batch != 1 else ''} ({lens} keys), {problem.heads_q}/"
        f"{problem.heads_kv} heads, head_dim {problem.head_dim}, {problem.dtype}: "
        f"{problem.kv_bytes / 1e6:,.4g} MB of K and V, longest over mean {skew(problem):.3g}"
    )


def _answer(advice: Advice) -> Iterable[tuple[str, str]]:
    first = advice.ranking[0]
    yield "run", _with_splits(advice, first.impl)
    for impl in advice.ties:
        yield "or", f"{_with_splits(advice, impl)}; the records do not say which is faster"
    yield "expect", _expected(first)
    yield (
        "because",
        f"reading K and V alone takes {advice.bound_us:.4g} µs, and it "
        + ("reaches" if first.miss is None else "should reach")
        + f" {100 * first.share:.3g} % of that speed",
    )
    if first.miss is None:
        yield "how sure", f"this batch was recorded, as {first.cases[0].name}"
    else:
        yield (
            "how sure",
            f"each of the {len(first.cases)} nearest cases, predicted from all others by this rule, is missed by "
            f"{100 * first.miss:.2g} % at most; such an interval holds {advice.coverage[0]} of the "
            f"{advice.coverage[1]} recorded times",
        )
    if advice.far:
        yield "BUT", f"this is an extrapolation, and may be off by more: {'; '.join(advice.far)}"


def _expected(made: Expectation) -> str:
    return f"{made.us:.4g} µs ({made.low:.4g} to {made.high:.4g})"


def _with_splits(advice: Advice, impl: str) -> str:
    counts = advice.splits.get(impl)
    if counts is None:
        return f"{impl} with its own choice of splits"
    items = list(counts.items())
    if len(set(counts.values())) == 1:
        splits = f"{items[0][1]} each"
    else:
        splits = ", ".join(f"{n} of {length:,} keys" for length, n in items[:LENGTHS_SHOWN])
        if len(items) > LENGTHS_SHOWN:
            splits += f", {min(counts.values())} at least"
    told = f"{impl}, num_splits auto: {splits}; {advice.ctas[impl]:,} CTAs ({advice.tiles[impl]})"
    better = [row for row in advice.tuning.get(impl, ()) if row.regret is not None]
    if better:
        worst = max(better, key=lambda row: row.regret.median if row.regret else 0.0)
        assert worst.regret is not None
        faster = f"{tuning_text(worst.best or {})} was {100 * (worst.regret.median - 1):.1f} % faster"
        told += f"; tuned on {worst.case}, {faster if worst.best else 'nothing tried was faster'}"
    return told


def _evidence(advice: Advice) -> Table:
    """The recorded cases that the first place rests on, nearest first."""
    first = advice.ranking[0]
    table = _table(
        "nearest case", "doublings away", "MB", "batch", "skew", f"{first.impl}, % of the bound", "fastest"
    )
    for case in first.cases:
        row = case.rows[first.impl]
        table.add_row(
            case.name,
            f"{distance(advice.problem, case.problem):.2f}",
            f"{case.problem.kv_bytes / 1e6:.4g}",
            str(case.problem.batch),
            f"{skew(case.problem):.3g}",
            f"{row['share']:.1f} [{row['share_low']:.1f}, {row['share_high']:.1f}]",
            _fastest(case),
        )
    return table


def _fastest(case: Seen) -> str:
    best = min(case.rows, key=lambda impl: case.rows[impl]["us"])
    ties = [impl for impl in case.rows if impl != best and verdict_on(case, best, impl) == stats.TIE]
    return f"{best} (tie with {', '.join(ties)})" if ties else best


def _ranking(advice: Advice) -> Table:
    """Every implementation, and what the first place's nearest cases say of it."""
    first = advice.ranking[0]
    table = _table("implementation", "µs expected", "from", "to", "% of the bound", f"{first.impl} beside it")
    for made in advice.ranking:
        told = Counter(v for case in first.cases if (v := verdict_on(case, first.impl, made.impl)) is not None)
        words = ", ".join(
            f"{word} on {told[word]}" for word in (stats.FASTER, stats.TIE, stats.SLOWER) if told[word]
        )
        table.add_row(
            made.impl,
            f"{made.us:.4g}",
            f"{made.low:.4g}",
            f"{made.high:.4g}",
            f"{100 * made.share:.3g}",
            "" if made is first else words or "never in the same rounds",
            style="bold" if made.impl in (first.impl, *advice.ties) and made.impl in OURS else None,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if place in (0, len(columns) - 1) else "right")
    return table
