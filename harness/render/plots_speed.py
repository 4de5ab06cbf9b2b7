"""Figures of speed: share of the bound, ratios, latency against size, batch sweeps, uneven batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator
from seaborn import color_palette

from harness.render import looks
from harness.render.frame import Comparison, each
from harness.render.groups import Sweep, launch_floor, pairs_of, sweeps_of, thinned
from harness.render.looks import BOUND_COLOUR, QUIET_COLOUR, TIE_COLOUR, WORD_COLOURS
from harness.render.text import bytes_text
from impls.catalog import OURS

FLOOR_LINE: dict[str, Any] = {"color": "#888888", "linestyle": (0, (1, 2)), "linewidth": 1.4}
CEILING_LINE: dict[str, Any] = {"color": "#888888", "linestyle": (0, (4, 3)), "linewidth": 1.2}


def share(comparison: Comparison) -> Figure | None:
    """Achieved read bandwidth as % of the bound: a line a case, a mark an implementation."""
    if comparison.impls["share"].isna().all():
        return None
    cases = looks.cases_shown(comparison)
    figure, ax = looks.make_figure(height=1.5 + (0.40 if len(comparison.devices) < 2 else 0.48) * len(cases))
    draw_share(comparison, ax, cases)
    lines = {"the bound": {"color": BOUND_COLOUR}}
    looks.legend(figure, comparison, looks.with_any(comparison, "share"), lines)
    return figure


def draw_share(comparison: Comparison, ax: Axes, cases: Sequence[str]) -> Axes:
    """Draw :func:`share` of these cases into ``ax``."""
    series = looks.with_any(comparison, "share")
    place = {case: i for i, case in enumerate(cases)}
    rows = comparison.impls
    rows = rows[rows["share"].notna() & rows["case"].isin(cases) & rows["label"].isin(series)]
    rows = rows.assign(y=rows["case"].map(place) + looks.offsets(rows["label"], series, width=0.66))
    styles = looks.styles_of(comparison.series)
    for i in range(0, len(cases), 2):
        ax.axhspan(i - 0.5, i + 0.5, color="#F5F6F8", zorder=0, linewidth=0)
    ax.axvline(100, color=BOUND_COLOUR, linewidth=1.6, zorder=1)
    for label, mine in rows.groupby("label", sort=False):
        ax.hlines(mine["y"], mine["share_low"], mine["share_high"], color=styles[str(label)][0], linewidth=1.2)
    looks.scatter(comparison, _ours_last(rows), x="share", y="y", ax=ax)
    ax.set_xlim(0, max(104.0, 1.02 * float(rows["share_high"].max())))
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.set_yticks(range(len(cases)), looks.case_labels(comparison, cases))
    ax.grid(False, axis="y")
    ax.set_xlabel("achieved read bandwidth, % of the bound (the same K and V bytes, only read)")
    ax.set_ylabel("")
    for case, words in _gap_words(comparison, cases, series).items():
        look: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 7.5}
        ax.annotate(words, (1.01, place[case]), color=QUIET_COLOUR, **look)
    return ax


def _gap_words(comparison: Comparison, cases: Sequence[str], series: Sequence[str]) -> dict[str, str]:
    """What to say beside a case about implementations that have a mark elsewhere, but none on it."""
    rows = comparison.impls
    rows = rows[rows["share"].isna() & rows["case"].isin(cases) & rows["label"].isin(series)]
    words: dict[str, list[str]] = {}
    for case, label, status, us in zip(rows["case"], rows["label"], rows["status"], rows["us"], strict=True):
        why = status if status != "ok" else "no finite sample" if np.isnan(us) else "no bound"
        words.setdefault(case, []).append(f"{label}: {why}")
    return {case: "\n".join(said) for case, said in words.items()}


def slowdown(comparison: Comparison) -> Figure | None:
    """Latency over that of the case's fastest implementation: case x implementation."""
    shown = comparison.impls[comparison.impls["label"].isin(comparison.shown)]
    if comparison.functional or shown["slowdown"].isna().all():
        return None
    cases = looks.cases_shown(comparison)
    figure, ax = looks.make_figure(height=1.3 + (0.33 if len(comparison.devices) < 2 else 0.40) * len(cases))
    draw_slowdown(comparison, ax, cases)
    return figure


def draw_slowdown(comparison: Comparison, ax: Axes, cases: Sequence[str]) -> Axes:
    """Draw :func:`slowdown` of these cases into ``ax``."""
    colours = color_palette("blend:#F7FBFF,#9CC3DE,#3F7FB0,#173F66", as_cmap=True)
    norm = LogNorm(1.0, 4.0, clip=True)
    small = looks.word_size(len(comparison.shown), 7.5)

    def look(row: Any) -> tuple[Any, dict[str, Any]]:
        if np.isnan(row.slowdown):
            word = row.status if row.status != "ok" else "no time"
            return WORD_COLOURS["unavailable"], {"s": word, "fontsize": small, "color": QUIET_COLOUR}
        value = float(row.slowdown)
        ratio = f"{value:.2f}" if value < 9.995 else f"{value:.0f}"
        said: dict[str, Any] = {"s": ratio + "*" * (row.splits_note is not None), "color": "#1A1A1A"}
        if value == 1.0:
            said["fontweight"] = "bold"
        elif row.tied is True:
            return TIE_COLOUR, said
        if value > 2.1:
            said["color"] = "white"
        return colours(norm(value)), said

    draw_matrix(comparison, ax, cases, look)
    bar = ax.figure.colorbar(
        ScalarMappable(norm=LogNorm(1.0, 4.0), cmap=colours), ax=ax, extend="max", shrink=0.8, aspect=30
    )
    bar.set_label("× the time of the case's fastest")
    bar.outline.set_visible(False)
    bar.set_ticks([1, 1.5, 2, 3, 4], labels=["1", "1.5", "2", "3", "4"])
    bar.ax.yaxis.set_minor_locator(NullLocator())
    return ax


def draw_matrix(comparison: Comparison, ax: Axes, cases: Sequence[str], look: Any) -> Axes:
    """A cell for each case and series, linked to its measurement.

    Args:
        comparison: what to draw.
        ax: where.
        cases: the rows, in order.
        look: a row of the frame -> the cell's colour, and what :meth:`Axes.text` takes to write in it.
    """
    series = comparison.shown
    rows = comparison.impls
    for row in each(rows[rows["case"].isin(cases) & rows["label"].isin(series)]):
        i, j = cases.index(row.case), series.index(row.label)
        colour, text = look(row)
        url = looks.url_of(row.anchor)
        ax.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5, url=url))
        ax.text(j + 0.5, i + 0.5, ha="center", va="center", url=url, **text)
    ax.set_xlim(0, len(series))
    ax.set_ylim(len(cases), 0)
    ax.set_yticks(np.arange(len(cases)) + 0.5, looks.case_labels(comparison, cases), rotation=0)
    ax.set_xticks(np.arange(len(series)) + 0.5, looks.series_ticks(comparison, series), rotation=0)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax


def latency(comparison: Comparison) -> Figure | None:
    """Latency against KV bytes, log-log, a panel a device: the bound and the launch floor are lines."""
    rows = comparison.impls
    rows = rows[rows["us"].notna() & (rows["kv_bytes"] > 0)]
    devices = [device for device in comparison.devices if device in set(rows["device"])]
    if not devices:
        return None
    figure, axes = looks.panels(len(devices), columns=1, height=4.8)
    lines: dict[str, dict[str, Any]] = {}
    for ax, device in zip(axes, devices, strict=True):
        lines |= draw_latency(comparison, ax, device)
        if len(devices) > 1:
            ax.set_title(device)
    looks.legend(figure, comparison, looks.with_any(comparison, "us"), lines)
    return figure


def draw_latency(comparison: Comparison, ax: Axes, device: str) -> dict[str, dict[str, Any]]:
    """Draw :func:`latency` on one device into ``ax``; returns the look of each line that is there."""
    series = looks.with_any(comparison, "us")
    rows = comparison.impls[comparison.impls["device"] == device]
    rows = rows[rows["us"].notna() & (rows["kv_bytes"] > 0) & rows["label"].isin(series)]
    bounds = comparison.bounds[(comparison.bounds["kv_bytes"] > 0) & (comparison.bounds["device"] == device)]
    lines: dict[str, dict[str, Any]] = {}
    if len(bounds):
        lines["the bound"] = {"color": BOUND_COLOUR, "linewidth": 1.0}
        line = bounds.groupby("kv_bytes")["us"].median()
        ax.plot(line.index, line, zorder=1, **lines["the bound"])
        ceilings = [comparison.ceilings[run] for run in bounds["run_id"].unique() if run in comparison.ceilings]
        if ceilings:
            sizes = np.array([bounds["kv_bytes"].min(), bounds["kv_bytes"].max()])
            lines["read ceiling of the device"] = CEILING_LINE
            ax.plot(sizes, sizes / max(ceilings) / 1e3, zorder=1, **CEILING_LINE)
        if (floor := launch_floor(bounds)) is not None:
            lines["launch floor"] = FLOOR_LINE
            ax.axhline(floor, zorder=1, **FLOOR_LINE)
    width = 0.012 * looks.decades(rows["kv_bytes"])
    aside = 10**width  # as far as any mark is shifted, and a bit more
    places = (bounds["kv_bytes"] / aside, bounds["kv_bytes"] * aside)
    ax.hlines(bounds["us"], *places, color=BOUND_COLOUR, linewidth=1.6, zorder=2)
    rows = rows.assign(x=rows["kv_bytes"] * 10 ** looks.offsets(rows["label"], series, width=width))
    looks.scatter(comparison, _ours_last(rows), x="x", y="us", ax=ax)
    if comparison.functional:
        ax.set_title("a CPU run: the kernels run and are checked, no claim about speed", color=QUIET_COLOUR)
    ax.set_xscale("log")
    ax.set_yscale("log")
    looks.log_ticks(ax.xaxis, bytes_text, rows["kv_bytes"])
    looks.log_ticks(ax.yaxis, looks.us_tick, rows["us"])
    ax.set_xlabel("bytes of K and V (marks of one case stand side by side)")
    ax.set_ylabel("latency, median")
    return lines


def _ours_last(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows in the order in which they are drawn for ours to lie on top, the first implementation last."""
    ours = rows["impl"].isin(OURS)
    return pd.concat([rows[~ours], rows[ours].iloc[::-1]])


def batch(comparison: Comparison) -> Figure | None:
    """Share of the bound against the batch size, a panel for each length that a study holds at several."""
    sweeps = thinned(sweeps_of(comparison))
    if not sweeps:
        return None
    figure, axes = looks.panels(len(sweeps), columns=2, height=3.0, sharey=True)
    for ax, sweep in zip(axes, sweeps, strict=True):
        _draw_sweep(comparison, ax, sweep)
    for ax in axes[::2]:
        ax.set_ylabel("% of the bound")
    lines = {"the bound": {"color": BOUND_COLOUR}}
    looks.legend(figure, comparison, looks.with_any(comparison, "share"), lines)
    return figure


def _draw_sweep(comparison: Comparison, ax: Axes, sweep: Sweep) -> None:
    styles = looks.styles_of(comparison.series)
    for label, mine in sweep.rows.groupby("label", sort=False):
        ax.plot(mine["batch"], mine["share"], color=styles[str(label)][0], linewidth=1.2, zorder=2)
    looks.scatter(comparison, sweep.rows, x="batch", y="share", ax=ax)
    ax.axhline(100, color=BOUND_COLOUR, linewidth=1.6, zorder=1)
    ax.set_ylim(0, 106)
    ax.set_xscale("log", base=2)
    looks.binary_ticks(ax.xaxis, sweep.rows["batch"])
    ax.set_xlabel("sequences in the batch")
    ax.set_ylabel("")
    ax.set_title(sweep.title)


def skew(comparison: Comparison) -> Figure | None:
    """Uneven batches beside uniform ones of about the same bytes, as % of the bound."""
    pairs = thinned(pairs_of(comparison))
    if not pairs:
        return None
    figure, ax = looks.make_figure(height=1.6 + 0.75 * len(pairs))
    series = looks.with_any(comparison, "share")
    styles = looks.styles_of(comparison.series)
    rows = comparison.impls[comparison.impls["share"].notna() & comparison.impls["label"].isin(series)]
    labels = []
    for i, pair in enumerate(pairs):
        if i % 2 == 0:
            ax.axhspan(i - 0.5, i + 0.5, color="#F5F6F8", zorder=0, linewidth=0)
        sides = [_side(rows, case, i, series) for case in (pair.even, pair.uneven)]
        both = sides[0].merge(sides[1], on="label", suffixes=("_even", "_uneven"))
        for row in each(both):
            x: npt.NDArray[np.float64] = np.array([row.share_even, row.share_uneven], dtype=np.float64)
            ax.plot(x, [row.y_even] * 2, color=styles[str(row.label)][0], linewidth=1.1, zorder=2)
        looks.scatter(comparison, sides[1], x="share", y="y", ax=ax)
        for row in each(sides[0]):
            colour, marker = styles[str(row.label)]
            made = ax.scatter(
                [row.share], [row.y], s=34, marker=marker, facecolors="white", edgecolors=colour, linewidths=1.2
            )
            made.set_zorder(3)
            made.set_urls([looks.url_of(row.anchor)])
        labels.append("\nbeside ".join(looks.case_labels(comparison, [pair.uneven, pair.even])))
    ax.axvline(100, color=BOUND_COLOUR, linewidth=1.6, zorder=1)
    ax.set_xlim(0, 104)
    ax.set_ylim(len(pairs) - 0.5, -0.5)
    ax.set_yticks(range(len(pairs)), labels)
    ax.grid(False, axis="y")
    ax.set_xlabel("% of the bound; hollow: the uniform batch, filled: the uneven one")
    ax.set_ylabel("")
    looks.legend(figure, comparison, series, {"the bound": {"color": BOUND_COLOUR}})
    return figure


def _side(rows: pd.DataFrame, case: str, i: int, series: Sequence[str]) -> pd.DataFrame:
    mine = rows[rows["case"] == case]
    return mine.assign(y=i + looks.offsets(mine["label"], series, width=0.7))[["label", "share", "y", "anchor"]]
