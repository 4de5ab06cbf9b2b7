"""Figures of detail: split counts, where a call's time goes, errors, and what is supported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from scipy.stats import norm

from harness.render import looks
from harness.render.findings import deep_mark
from harness.render.frame import Comparison
from harness.render.groups import Curve, by_case, curves_of, thinned
from harness.render.looks import ALARM_COLOUR, BOUND_COLOUR, WORD_COLOURS
from harness.render.plots_speed import draw_matrix
from harness.render.tables import NOT_TRACED

DEVICE_COLOURS: Mapping[str, str] = {
    "split (longest kernel)": "#35608D",
    "combine (other kernels)": "#D98880",
    "gaps between them": "#8C8C8C",
    "to the next call": "#D9D9D9",
    NOT_TRACED: "#B9CDE0",
}
HOST_COLOURS: Mapping[str, str] = {
    "plan": "#6C5B7B",
    "host launch": "#C8A2C8",
    "wait for the device": "#EADCEB",
}

SIGNIFICAND_BITS: Mapping[str, int] = {"bfloat16": 8, "float16": 11, "float32": 24}
"""dtype -> bits of the significand, the hidden one included."""

SIDE_BY_SIDE = 0.86
"""The share of a column of the error figure over which implementations stand side by side."""

ERROR_POINTS = 590.0
"""Points across the axes of the error figure, about: a mark must not reach into the place of another."""

FLOOR_DASHES = ((0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))


RING_POINTS = (12.0, 4.0)
"""Diameter of the ring around the first implementation's choice, and how much wider each next one is."""

STAR_POINTS = (11.0, 0.75)
"""Size of the star on the first implementation's best count, and what each next one is of the one before."""


def splits(comparison: Comparison) -> Figure | None:
    """Latency against the split count, a panel a case; the default's choice and the best count are marked."""
    of_case = by_case(curves_of(comparison))
    if not of_case:
        return None
    cases = {case: of_case[case] for case in thinned(list(of_case))}
    figure, axes = looks.panels(len(cases), columns=3, height=2.7)
    for ax, (case, curves) in zip(axes, cases.items(), strict=True):
        _draw_curves(comparison, ax, case, curves)
    for ax in axes[::3]:
        ax.set_ylabel("latency, median µs")
    families = {curve.family for curves in cases.values() for curve in curves}
    ring: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 10, "markerfacecolor": "none"}
    star: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 11, "color": "#1A1A1A"}
    others = {
        "the default's choice": ring | {"color": "#1A1A1A"},
        "default, count not reported": {"color": "#777777", "linestyle": (0, (1, 2))},
        "best fixed count": star,
        "the bound": {"color": BOUND_COLOUR},
    }
    series = [label for label in comparison.series if label in families]
    looks.legend(figure, comparison, series or sorted(families), others, missing=False)
    return figure


def _draw_curves(comparison: Comparison, ax: Axes, case: str, curves: Sequence[Curve]) -> None:
    styles = looks.styles_of([*comparison.series, *(curve.family for curve in curves)])
    values: list[float] = []
    for i, curve in enumerate(curves):
        colour, marker = styles[curve.family]
        counts = [row.asked_splits for row in curve.fixed]
        times = [row.us for row in curve.fixed]
        ax.plot(counts, times, color=colour, linewidth=1.2, zorder=2)
        made = ax.scatter(counts, times, color=colour, marker=marker, s=26, linewidth=0.4, edgecolor="white")
        made.set(zorder=3, urls=[looks.url_of(row.anchor) for row in curve.fixed])
        star = ax.scatter([curve.best.asked_splits], [curve.best.us], marker="*", zorder=4)
        # Of several in one place each shows: rings grow, and smaller stars lie on larger ones.
        star.set_sizes([(STAR_POINTS[0] * STAR_POINTS[1] ** i) ** 2])
        star.set(color=colour, edgecolor="#1A1A1A", linewidth=0.6, urls=[looks.url_of(curve.best.anchor)])
        values += times
        if curve.own is not None:
            values.append(curve.own.us)
            url = looks.url_of(curve.own.anchor)
            if np.isnan(curve.own.splits_max):
                line = ax.axhline(curve.own.us, color=colour, linestyle=(0, (1, 2)), linewidth=1.4, zorder=1)
                line.set_url(url)
            else:
                ring = ax.scatter([curve.own.splits_max], [curve.own.us], zorder=4, facecolors="none")
                ring.set(edgecolor=colour, linewidth=1.4, urls=[url])
                ring.set_sizes([(RING_POINTS[0] + i * RING_POINTS[1]) ** 2])
                if curve.own.splits_max not in counts:
                    ends = ([curve.own.splits_max, curve.best.asked_splits], [curve.own.us, curve.best.us])
                    ax.plot(*ends, color=colour, linestyle=(0, (1, 1.5)), linewidth=1.2, zorder=2)
    bound = comparison.bounds[comparison.bounds["case"] == case]["us"]
    if len(bound):
        values.append(float(bound.iloc[0]))
        ax.axhline(values[-1], color=BOUND_COLOUR, linewidth=1.6, zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(min(values) / 1.12, max(values) * 1.25)
    all_counts = sorted({row.asked_splits for curve in curves for row in curve.fixed})
    ax.set_xticks(all_counts, [str(n) for n in all_counts], fontsize=8)
    ax.xaxis.set_minor_locator(NullLocator())
    looks.log_ticks(ax.yaxis, lambda us: f"{us:g}", pd.Series([min(values), max(values)]))
    ax.set_xlabel("split count asked for")
    ax.set_title(looks.case_labels(comparison, [case])[0])


def parts(comparison: Comparison) -> Figure | None:
    """What a call consists of, for a small case, a middle one and a large one: on the device and on the host."""
    cases = parts_cases(comparison)
    if not cases:
        return None
    series = [label for label in comparison.shown if label in set(_with_parts(comparison)["label"])]
    any_traced = bool(comparison.impls.loc[comparison.impls["case"].isin(cases), "traced_us"].notna().any())
    height = 0.75 + 0.24 * len(series)
    figure, axes = looks.panels(2 * len(cases), columns=len(cases), height=height)
    for i, ax in enumerate(axes):
        case, on_host = cases[i % len(cases)], i >= len(cases)
        rows = comparison.impls[comparison.impls["case"] == case].set_index("label").reindex(series)
        urls = [looks.url_of(anchor) for anchor in rows["anchor"]]
        if on_host:
            _draw_bars(ax, host_parts(rows), HOST_COLOURS, urls)
        else:
            _draw_bars(ax, device_parts(rows), DEVICE_COLOURS, urls)
        _say_what_is_missing(ax, host_words(rows) if on_host else device_words(rows, any_traced=any_traced))
        names = [looks.named(comparison, label) for label in series] if i % len(cases) == 0 else []
        ax.set_yticks(range(len(names)), names)
        if not on_host:
            ax.set_title(looks.case_labels(comparison, [case])[0])
        ax.set_xlabel(f"µs on the {'host' if on_host else 'device'}")
    drawn = comparison.impls[comparison.impls["case"].isin(cases) & comparison.impls["label"].isin(series)]
    colours = {name: colour for name, colour in DEVICE_COLOURS.items() if any_traced or name == NOT_TRACED}
    if drawn["traced_us"].notna().all():
        del colours[NOT_TRACED]
    handles = [Patch(color=colour, label=name) for name, colour in (colours | dict(HOST_COLOURS)).items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)))
    return figure


def parts_cases(comparison: Comparison) -> list[str]:
    """The cases whose parts are drawn: the smallest, the middle one and the largest that have any."""
    with_parts = set(_with_parts(comparison)["case"])
    cases = [case for case in comparison.cases if case in with_parts]
    return list(dict.fromkeys((cases[0], cases[len(cases) // 2], cases[-1]))) if cases else []


def _with_parts(comparison: Comparison) -> pd.DataFrame:
    rows = comparison.impls
    if comparison.functional:
        return rows.iloc[:0]
    known = rows["host_total_us"].notna() | rows["traced_us"].notna()
    return rows[known & rows["label"].isin(comparison.shown)]


def device_parts(rows: pd.DataFrame) -> dict[str, pd.Series[float]]:
    """Part -> µs of each row, without waiting, so that they add up; what was not traced is one part."""
    untraced = rows["us"].where(rows["traced_us"].isna())
    values = [rows[f"{part}_net_us"] for part in ("main", "others", "gap", "between")]
    return dict(zip(DEVICE_COLOURS, (*values, untraced), strict=True))


def host_parts(rows: pd.DataFrame) -> dict[str, pd.Series[float]]:
    """Part -> µs of each row, from the plan to the end of the device's work."""
    wait = rows["host_total_us"] - rows["host_launch_us"]
    return dict(zip(HOST_COLOURS, (rows["plan_us"], rows["host_launch_us"], wait), strict=True))


def device_words(rows: pd.DataFrame, *, any_traced: bool) -> list[str]:
    """What each row's place on the device says beside its bar: nothing where it was traced.

    Args:
        rows: a row a bar.
        any_traced: whether anything in the figure was; where nothing was, the legend says so.
    """
    words = []
    for status, us, traced in zip(rows["status"], rows["us"], rows["traced_us"], strict=True):
        if not math.isnan(traced):
            words.append("")
        elif not math.isnan(us):
            words.append(NOT_TRACED if any_traced else "")
        else:
            words.append("no finite time" if status == "ok" else str(status))
    return words


def host_words(rows: pd.DataFrame) -> list[str]:
    """What each row's place on the host says where there is no bar."""
    known = rows["host_total_us"].notna() | rows["plan_us"].notna()
    return [
        "" if there else "not timed on the host" if status == "ok" else str(status)
        for there, status in zip(known, rows["status"], strict=True)
    ]


def _say_what_is_missing(ax: Axes, words: Sequence[str]) -> None:
    edge = 0.015 * ax.get_xlim()[1]
    for i, word in enumerate(words):
        ax.text(edge, i, word, va="center", fontsize=8, color="#444444")


def _draw_bars(
    ax: Axes, stacked: Mapping[str, pd.Series[float]], colours: Mapping[str, str], urls: Sequence[str | None]
) -> None:
    n = len(next(iter(stacked.values())))
    left = np.zeros(n)
    for name, values in stacked.items():
        width = values.astype(float).fillna(0).clip(lower=0).to_numpy()
        for bar, url in zip(
            ax.barh(range(n), width, left=left, color=colours[name], height=0.7), urls, strict=True
        ):
            bar.set_url(url)
        left += width
    ax.set_ylim(n - 0.5, -0.5)
    ax.grid(False, axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:,g}"))


def error(comparison: Comparison) -> Figure | None:
    """Relative L2 error, and the worst row's error over its budget, against the longest sequence."""
    rows = comparison.impls
    if not ((rows["rel_l2"] > 0) & (rows["worst_row"] > 0)).any():
        return None
    figure = Figure(figsize=(looks.WIDTH, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1)
    floors = _draw_error(comparison, above, "rel_l2")
    _draw_error(comparison, below, "worst_row")
    lines = {"the budget": {"color": ALARM_COLOUR}} | floors
    looks.legend(figure, comparison, looks.with_any(comparison, "rel_l2"), lines)
    return figure


def rounding_floor(dtype: str) -> float:
    """Relative L2 error of rounding normal variates to ``dtype``, which every output of that dtype has.

    A uniform error within half a step of the significand, ``step² / 12`` in mean square, weighed over the
    binades of a normal variate.
    """
    k = np.arange(-40, 6)
    mass = 2 * (norm.cdf(2.0 ** (k + 1)) - norm.cdf(2.0**k))
    return float(2.0 ** (1 - SIGNIFICAND_BITS[dtype]) * np.sqrt(np.sum(mass * 4.0**k) / 12))


def _draw_error(comparison: Comparison, ax: Axes, column: str) -> dict[str, dict[str, Any]]:
    """One error measure by length, on a log axis; returns the look of each line of a dtype's floor.

    Lengths are put together by the power of two that they do not exceed, for implementations to stand side by side.
    """
    series = looks.with_any(comparison, column)
    rows = comparison.impls
    rows = rows[(rows[column] > 0) & (rows["max_kv"] > 0) & rows["label"].isin(series)]
    octaves = [math.ceil(math.log2(n)) for n in rows["max_kv"]]
    place = {octave: i for i, octave in enumerate(sorted(set(octaves)))}
    x = pd.Series([place[octave] for octave in octaves], index=rows.index, dtype=float)
    rows = rows.assign(x=x + looks.offsets(rows["label"], series, width=SIDE_BY_SIDE))
    points = ERROR_POINTS * SIDE_BY_SIDE / (len(place) * len(series))
    looks.scatter(comparison, rows, x="x", y=column, ax=ax, size=min(looks.MARK_SIZE, points**2))
    wrong = rows[rows["status"] == "wrong"]
    ax.scatter(wrong["x"], wrong[column], s=150, facecolors="none", edgecolors=ALARM_COLOUR, linewidths=1.3)
    ax.set_yscale("log")
    ax.set_xlim(-0.5, len(place) - 0.5)
    ax.set_xticks(range(len(place)), [looks.binary_text(2**octave) for octave in place])
    ax.set_xticks([i + 0.5 for i in range(len(place) - 1)], minor=True)
    ax.tick_params(axis="x", which="both", length=0)
    ax.grid(False, axis="x")
    ax.grid(True, axis="x", which="minor")
    ax.set_xlabel("keys of the longest sequence, up to (k = 1024)")
    low, high = rows[column].min(), rows[column].max()
    lines: dict[str, dict[str, Any]] = {}
    if len(wrong):
        lines["wrong"] = {"color": ALARM_COLOUR, "marker": "o", "markersize": 10, "markerfacecolor": "none"}
        lines["wrong"] |= {"linestyle": "none"}
    if column == "worst_row":
        ax.axhline(1.0, color=ALARM_COLOUR, linewidth=1.2)
        ax.set_ylim(min(0.1, low / 1.5), max(2.0, high * 2))
        ax.set_ylabel("worst row's error, × its budget")
    else:
        dtypes = [dtype for dtype in sorted(set(rows["dtype"])) if dtype in SIGNIFICAND_BITS]
        for dtype, dashes in zip(dtypes, FLOOR_DASHES, strict=False):
            floor = rounding_floor(dtype)
            low = min(low, floor)
            style: dict[str, Any] = {"color": "#777777", "linestyle": dashes, "linewidth": 1.3}
            ax.axhline(floor, zorder=1, **style)
            lines[f"rounding the output to {dtype}"] = style
        # At least a decade, so that differences of a few per cent do not look like more.
        ax.set_ylim(low / 3.5, high * 3.5)
        ax.set_ylabel("relative L2 error against float64")
    looks.log_ticks(ax.yaxis, looks.error_tick, pd.Series(ax.get_ylim()))
    return lines


def support(comparison: Comparison) -> Figure | None:
    """What became of every implementation on every case, in words."""
    cases = looks.cases_shown(comparison)
    figure, ax = looks.make_figure(height=0.9 + (0.29 if len(comparison.devices) < 2 else 0.40) * len(cases))

    size = looks.word_size(len(comparison.shown), 8)

    def look(row: Any) -> tuple[Any, dict[str, Any]]:
        said = {"s": row.status + deep_mark(row), "fontsize": size, "color": "#1A1A1A"}
        return WORD_COLOURS[row.status], said

    draw_matrix(comparison, ax, cases, look)
    return figure
