"""The figure of a tuning: what each kernel's own choice loses on each case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from harness.render import looks
from harness.render.text import bytes_text
from harness.render.tuning import Tuning, problem_of
from impls.problem import DecodeProblem

FIGURE = "regret"
"""The name of its files."""

MAX_CASES = 80
"""The most cases that it shows."""

TICKS = (1.0, 1.01, 1.03, 1.08, 1.15, 1.3, 1.5, 1.75, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Where the axis may have lines; those too near to the one before are left out."""

TICKS_APART = 0.06
"""How near two lines may be, as a share of the axis."""


def cases_drawn(tuning: Tuning) -> list[str]:
    """The cases with a regret, the one that loses most first; the first :data:`MAX_CASES` of them."""
    most: dict[str, float] = {}
    for row in tuning.found:
        if row.regret is not None:
            most[row.case] = max(row.regret.median, most.get(row.case, 0.0))
    return sorted(most, key=lambda case: -most[case])[:MAX_CASES]


def draw_regret(tuning: Tuning, cases: Sequence[str], anchors: Mapping[tuple[str, str], str]) -> Figure:
    """A line a case, a mark with its interval for each implementation.

    Args:
        tuning: what was found.
        cases: those to draw, from the top.
        anchors: (case, implementation) -> the line of the report that a mark links to.
    """
    figure, ax = looks.make_figure(height=1.3 + 0.19 * len(cases))
    rows = [row for row in tuning.found if row.case in cases and row.regret is not None]
    series = sorted({row.impl for row in rows})
    styles = looks.styles_of(series)
    for i in range(0, len(cases), 2):
        ax.axhspan(i - 0.5, i + 0.5, color="#F5F6F8", zorder=0, linewidth=0)
    ends = [1.0]
    for j, impl in enumerate(series):
        colour, marker = styles[impl]
        mine = [row for row in rows if row.impl == impl]
        regrets = [row.regret for row in mine if row.regret is not None]
        aside = 0.8 * ((j + 0.5) / len(series) - 0.5)
        y = [cases.index(row.case) + aside for row in mine]
        ax.hlines(y, [r.low for r in regrets], [r.high for r in regrets], color=colour, linewidth=1.1, zorder=2)
        at = [r.median for r in regrets]
        marks = ax.scatter(at, y, s=24, marker=marker, color=colour, linewidths=0.4, edgecolors="white", zorder=3)
        marks.set_urls([looks.url_of(anchors[row.case, impl]) for row in mine])
        ends += [end for r in regrets for end in (r.low, r.high)]
    ax.set_xscale("function", functions=(_stretched, _shrunk))
    left, right = _stretched([min(ends), max(max(ends), TICKS[1])])
    aside = 0.015 * (right - left)  # for a mark at an end to be there as a whole
    ax.set_xlim(*_shrunk([left - aside, right + aside]))
    ticks = _ticks(left, right)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_ylim(len(cases) - 0.5, -0.5)
    first = {row.case: problem_of(row) for row in reversed(rows)}
    ax.set_yticks(range(len(cases)), [_label(case, first[case]) for case in cases], fontsize=7.5)
    ax.grid(False, axis="y")
    ax.grid(True, axis="x", color="#D0D0D0")
    ax.set_xlabel("regret: time of the own choice over that of the best configuration found")
    handles = [
        Line2D([], [], color=styles[s][0], marker=styles[s][1], linestyle="none", markersize=6.5, label=s)
        for s in series
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)), columnspacing=1.6)
    return figure


def _label(case: str, problem: DecodeProblem) -> str:
    heads = f"{problem.heads_q}/{problem.heads_kv}"
    return f"{case}  {heads}, {problem.head_dim}  ({bytes_text(problem.kv_bytes)})"


def _ticks(left: float, right: float) -> list[float]:
    """Those of :data:`TICKS` on an axis between two places that are far enough from the one before."""
    kept: list[float] = []
    last = -np.inf
    for tick, place in zip(TICKS, _stretched(TICKS), strict=True):
        if place <= right and place - last >= TICKS_APART * (right - left):
            kept.append(tick)
            last = place
    return kept


def _stretched(regrets: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Where regrets lie on the axis: the square root of what is lost, and below 0 for what is won."""
    lost: npt.NDArray[np.float64] = np.asarray(regrets, dtype=np.float64) - 1
    places: npt.NDArray[np.float64] = np.sign(lost) * np.sqrt(np.abs(lost))
    return places


def _shrunk(places: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The regrets at places on the axis."""
    roots: npt.NDArray[np.float64] = np.asarray(places, dtype=np.float64)
    regrets: npt.NDArray[np.float64] = 1 + np.sign(roots) * np.square(roots)
    return regrets
