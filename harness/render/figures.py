"""The figures of a report: ``ax`` in, ``Axes`` out, and one function that draws and saves them all.

Everything is drawn on a plain :class:`~matplotlib.figure.Figure`, without pyplot's state or a display, and
saved without dates, software tags or random ids: the same records give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import seaborn as sns
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from harness.render.frame import NO_RECORD, WORDS, Comparison, impl_of
from impls.catalog import IMPLS

# Okabe and Ito's colours (their yellow is too pale for a mark on white), then darker ones for what a
# catalog may gain. Markers carry the same meaning for a reader who sees no colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7A5C2E", "#5D3A9B", "#7F7F00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
STYLES: Mapping[str, tuple[str, str]] = dict(zip(IMPLS, zip(_COLOURS, _MARKERS, strict=True), strict=False))
"""Implementation id -> (colour, marker), the same in every figure of every report."""

BOUND_COLOUR = "#333333"
ALARM_COLOUR = "#B00020"
WORD_COLOURS: Mapping[str, str] = {
    "ok": "#D4E6D9",
    "wrong": "#E8A198",
    "failed": "#F2C9A1",
    "invalid": "#F5E3A6",
    "unsupported": "#DADDE3",
    "unavailable": "#EEEFF2",
    NO_RECORD: "#FFFFFF",
}

TIE_COLOUR = "#D5D5D5"
PART_COLOURS: Mapping[str, str] = {
    "longest kernel": "#3F7FB0",
    "other kernels": "#E69F00",
    "gaps between them": "#999999",
    "to the next call": "#D9D9D9",
}

MAX_CASES = 40
"""The most cases that a figure with a line of its own for each of them shows; tables show all."""

DPI = 160
WIDTH = 9.0

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "axes.edgecolor": "#666666",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "svg.hashsalt": "splitkv-study",
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Drawn:
    """A saved figure: its name, the paths of its two forms, and the cases that it leaves out."""

    name: str
    png: Path
    svg: Path
    left_out: int


def draw_all(comparison: Comparison, folder: Path) -> dict[str, Drawn]:
    """Draw every figure that the comparison has data for, and save each as PNG and SVG.

    Args:
        comparison: what to draw.
        folder: where; made where it is missing. Files of figures that are not drawn are removed.

    Returns:
        Name -> the saved figure, in the order of a report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    shown = cases_shown(comparison)
    for name, make in FIGURES.items():
        png, svg = folder / f"{name}.png", folder / f"{name}.svg"
        # From matplotlib's own defaults: a reader's matplotlibrc must not change the bytes.
        with mpl_style.context(["default", RC]):
            figure = make(comparison)
            if figure is None:
                png.unlink(missing_ok=True)
                svg.unlink(missing_ok=True)
                continue
            save(figure, png, svg)
        by_case = name in ("share", "slowdown", "support")
        drawn[name] = Drawn(name, png, svg, len(comparison.cases) - len(shown) if by_case else 0)
    return drawn


def save(figure: Figure, png: Path, svg: Path) -> None:
    """Save a figure in both forms, with nothing in them that differs from one time to the next."""
    # The layout is worked out once for both forms, which makes them alike, and halves the time.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    figure.savefig(png, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})


def cases_shown(comparison: Comparison) -> list[str]:
    """The cases of figures with a line a case: all, or :data:`MAX_CASES` evenly spaced ones by KV bytes."""
    n = len(comparison.cases)
    if n <= MAX_CASES:
        return list(comparison.cases)
    return [comparison.cases[i] for i in np.linspace(0, n - 1, MAX_CASES).round().astype(int)]


def styles_of(series: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Label -> (colour, marker): an implementation's own, or for an unknown one the next that is free."""
    strangers = sorted({impl_of(label) for label in series} - set(STYLES))
    free = list(zip(_COLOURS, _MARKERS, strict=True))[len(STYLES) :] or list(zip(_COLOURS, _MARKERS, strict=True))
    spare = {impl: free[i % len(free)] for i, impl in enumerate(strangers)}
    return {label: STYLES.get(impl_of(label)) or spare[impl_of(label)] for label in series}


def draw_share(comparison: Comparison, ax: Axes) -> Axes:
    """Achieved read bandwidth as % of the bound: a line a case, a mark an implementation."""
    cases = cases_shown(comparison)
    series = _with_any(comparison, "share")
    place = {case: i for i, case in enumerate(cases)}
    rows = comparison.impls
    rows = rows[rows["share"].notna() & rows["case"].isin(cases)]
    rows = rows.assign(y=rows["case"].map(place) + _offsets(rows["label"], series, width=0.66))
    styles = styles_of(comparison.series)
    for i in range(0, len(cases), 2):
        ax.axhspan(i - 0.5, i + 0.5, color="#F5F6F8", zorder=0, linewidth=0)
    ax.axvline(100, color=BOUND_COLOUR, linewidth=1.6, zorder=1)
    for label, mine in rows.groupby("label", sort=False):
        ax.hlines(mine["y"], mine["share_low"], mine["share_high"], color=styles[str(label)][0], linewidth=1.2)
    _scatter(comparison, rows, x="share", y="y", ax=ax)
    ax.set_xlim(0, max(104.0, 1.02 * float(rows["share_high"].max())))
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.set_yticks(range(len(cases)), _case_labels(comparison, cases))
    ax.grid(False, axis="y")
    ax.set_xlabel("achieved read bandwidth, % of the bound (the same K and V bytes, only read)")
    ax.set_ylabel("")
    for case, words in _gap_words(comparison, cases, series).items():
        ax.annotate(
            words,
            (1.01, place[case]),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=7.5,
            color="#555555",
        )
    return ax


def draw_slowdown(comparison: Comparison, ax: Axes) -> Axes:
    """Latency over that of the case's fastest implementation: case x implementation."""
    cases = cases_shown(comparison)
    table = comparison.table("slowdown").loc[cases]
    values: npt.NDArray[np.float64] = table.to_numpy(dtype=np.float64)
    status = comparison.table("status").loc[cases].to_numpy()
    noted = comparison.table("splits_note").loc[cases].notna().to_numpy()
    tied = comparison.table("tied").loc[cases].eq(True).to_numpy()
    ax.set_facecolor(WORD_COLOURS["unavailable"])
    sns.heatmap(
        table.astype(float),
        ax=ax,
        cmap=sns.color_palette("blend:#F7FBFF,#9CC3DE,#3F7FB0,#173F66", as_cmap=True),
        norm=LogNorm(1.0, 4.0),
        linewidths=1.5,
        linecolor="white",
        xticklabels=False,
        yticklabels=False,
        cbar_kws={"label": "× the time of the case's fastest", "extend": "max", "shrink": 0.8, "aspect": 30},
    )
    bar = ax.collections[0].colorbar
    if bar is not None:
        bar.set_ticks([1, 1.5, 2, 3, 4], labels=["1", "1.5", "2", "3", "4"])
        bar.ax.yaxis.set_minor_locator(NullLocator())
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value):
            look: dict[str, Any] = {"s": status[i, j], "fontsize": 7.5, "color": "#666666"}
        else:
            ratio = f"{value:.2f}" if value < 9.995 else f"{value:.0f}"
            look = {"s": ratio + "*" * bool(noted[i, j]), "color": "white" if value > 2.1 else "#1A1A1A"}
            look["fontweight"] = "bold" if value == 1.0 else "normal"
            if tied[i, j] and value != 1.0:
                ax.add_patch(Rectangle((j, i), 1, 1, facecolor=TIE_COLOUR, edgecolor="white", linewidth=1.5))
                look["color"] = "#1A1A1A"
        ax.text(j + 0.5, i + 0.5, ha="center", va="center", **look)
    return _matrix_axes(ax, comparison, cases)


def draw_latency(comparison: Comparison, ax: Axes) -> Axes:
    """Latency against KV bytes, log-log, with the bound as a line and the read ceiling as another."""
    rows = comparison.impls
    rows = rows[rows["us"].notna() & (rows["kv_bytes"] > 0)]
    bounds = comparison.bounds[comparison.bounds["kv_bytes"] > 0]
    if len(bounds):
        line = bounds.groupby("kv_bytes")["us"].median()
        ax.plot(line.index, line, color=BOUND_COLOUR, linewidth=1.6, zorder=1)
    if comparison.ceilings and len(bounds):
        sizes = np.array([bounds["kv_bytes"].min(), bounds["kv_bytes"].max()])
        gbps = max(comparison.ceilings.values())
        ax.plot(sizes, sizes / gbps / 1e3, color="#888888", linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    rows = rows.assign(
        x=rows["kv_bytes"]
        * 10 ** _offsets(rows["label"], _with_any(comparison, "us"), width=0.03 * _decades(rows["kv_bytes"]))
    )
    _scatter(comparison, rows, x="x", y="us", ax=ax)
    if comparison.functional:
        ax.set_title(
            "a CPU run: the kernels run and are checked, no claim about speed", fontsize=9, color="#555555"
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    _log_ticks(ax.xaxis, bytes_text, rows["kv_bytes"])
    _log_ticks(ax.yaxis, _us_text, rows["us"])
    ax.set_xlabel("bytes of K and V (marks of one case stand side by side)")
    ax.set_ylabel("latency, median")
    return ax


def draw_error(comparison: Comparison, ax: Axes, column: str) -> Axes:
    """One error measure (``rel_l2`` or ``worst_row``) against the longest sequence, log-log."""
    rows = comparison.impls
    rows = rows[(rows[column] > 0) & (rows["max_kv"] > 0)]
    rows = rows.assign(
        x=rows["max_kv"]
        * 10 ** _offsets(rows["label"], _with_any(comparison, column), width=0.045 * _decades(rows["max_kv"]))
    )
    _scatter(comparison, rows, x="x", y=column, ax=ax)
    wrong = rows[rows["status"] == "wrong"]
    ax.scatter(wrong["x"], wrong[column], s=150, facecolors="none", edgecolors=ALARM_COLOUR, linewidths=1.3)
    for x, y in zip(wrong["x"], wrong[column], strict=True):
        look: dict[str, Any] = {"ha": "center", "fontsize": 8, "color": ALARM_COLOUR}
        ax.annotate("wrong", (x, y), (0, -15), textcoords="offset points", **look)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(LogLocator(base=2.0 if _decades(rows["max_kv"]) < 2.8 else 4.0))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}" if n < 1024 else f"{n / 1024:g}k"))
    ax.set_xlabel("keys of the longest sequence (k = 1024)")
    low, high = rows[column].min(), rows[column].max()
    if column == "worst_row":
        ax.axhline(1.0, color=ALARM_COLOUR, linewidth=1.2)
        ax.set_ylim(min(0.1, low / 1.5), max(2.0, high * 2))
        ax.set_ylabel("worst row's error, × its budget")
    else:
        # At least a decade, so that differences of a few per cent do not look like more.
        ax.set_ylim(low / 3.5, high * 3.5)
        ax.set_ylabel("relative L2 error against float64")
    _log_ticks(ax.yaxis, _number_text, pd.Series(ax.get_ylim()))
    return ax


def draw_support(comparison: Comparison, ax: Axes) -> Axes:
    """What became of every implementation on every case, in words."""
    cases = cases_shown(comparison)
    status = comparison.table("status").loc[cases]
    code = {word: i for i, word in enumerate(WORDS)}
    sns.heatmap(
        status.map(code.__getitem__).astype(int),
        ax=ax,
        annot=status.to_numpy(dtype=object),
        fmt="",
        annot_kws={"fontsize": 8, "color": "#1A1A1A"},
        cmap=ListedColormap([WORD_COLOURS[word] for word in WORDS]),
        vmin=-0.5,
        vmax=len(WORDS) - 0.5,
        cbar=False,
        linewidths=1.5,
        linecolor="white",
        xticklabels=False,
        yticklabels=False,
    )
    return _matrix_axes(ax, comparison, cases)


def draw_parts(comparison: Comparison, ax: Axes, case: str) -> Axes:
    """The parts of a call on the device, a bar an implementation, in µs."""
    rows = comparison.impls
    rows = rows[(rows["case"] == case) & rows["traced_us"].notna()]
    place = {label: i for i, label in enumerate(_with_any(comparison, "traced_us"))}
    left = np.zeros(len(rows))
    columns = ("main_us", "others_us", "gap_us", "between_us")
    for column, colour in zip(columns, PART_COLOURS.values(), strict=True):
        width = rows[column].clip(lower=0).to_numpy()
        ax.barh(rows["label"].map(place), width, left=left, color=colour, height=0.7)
        left += width
    ax.set_yticks(range(len(place)), list(place))
    ax.set_ylim(len(place) - 0.5, -0.5)
    ax.grid(False, axis="y")
    ax.set_title(_case_labels(comparison, [case])[0], fontsize=9.5)
    ax.set_xlabel("µs a call")
    return ax


def _parts(comparison: Comparison) -> Figure | None:
    rows = comparison.impls
    profiled = set(rows.loc[rows["traced_us"].notna(), "case"])
    cases = [case for case in comparison.cases if case in profiled]
    if not cases:
        return None
    chosen = list(dict.fromkeys((cases[0], cases[len(cases) // 2], cases[-1])))
    figure = Figure(figsize=(WIDTH, 1.6 + 0.3 * rows["label"].nunique()), layout="constrained")
    axes = figure.subplots(1, len(chosen), squeeze=False)[0]
    for ax, case in zip(axes, chosen, strict=True):
        draw_parts(comparison, ax, case)
    for ax in axes[1:]:
        ax.set_yticklabels([])
    handles = [Patch(color=colour, label=name) for name, colour in PART_COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _share(comparison: Comparison) -> Figure | None:
    if comparison.impls["share"].isna().all():
        return None
    rows = len(cases_shown(comparison))
    figure, ax = _figure(height=1.5 + 0.40 * rows)
    draw_share(comparison, ax)
    _legend(figure, comparison, _with_any(comparison, "share"), {"the bound": {"color": BOUND_COLOUR}})
    return figure


def _slowdown(comparison: Comparison) -> Figure | None:
    if comparison.functional or comparison.impls["slowdown"].isna().all():
        return None
    figure, ax = _figure(height=1.3 + 0.33 * len(cases_shown(comparison)))
    draw_slowdown(comparison, ax)
    return figure


def _latency(comparison: Comparison) -> Figure | None:
    rows = comparison.impls
    if not (rows["us"].notna() & (rows["kv_bytes"] > 0)).any():
        return None
    figure, ax = _figure(height=5.4)
    draw_latency(comparison, ax)
    lines: dict[str, dict[str, Any]] = {}
    if len(comparison.bounds):
        lines["the bound"] = {"color": BOUND_COLOUR}
        if comparison.ceilings:
            lines["read ceiling of the device"] = {"color": "#888888", "linestyle": (0, (4, 3))}
    _legend(figure, comparison, _with_any(comparison, "us"), lines)
    return figure


def _error(comparison: Comparison) -> Figure | None:
    rows = comparison.impls
    if not ((rows["rel_l2"] > 0) & (rows["worst_row"] > 0)).any():
        return None
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_error(comparison, left, "rel_l2")
    draw_error(comparison, right, "worst_row")
    _legend(figure, comparison, _with_any(comparison, "rel_l2"), {"the budget": {"color": ALARM_COLOUR}})
    return figure


def _support(comparison: Comparison) -> Figure | None:
    figure, ax = _figure(height=0.9 + 0.29 * len(cases_shown(comparison)))
    draw_support(comparison, ax)
    return figure


FIGURES: Mapping[str, Callable[[Comparison], Figure | None]] = {
    "share": _share,
    "slowdown": _slowdown,
    "latency": _latency,
    "parts": _parts,
    "error": _error,
    "support": _support,
}
"""Name of the files -> what draws the figure, or None where there is nothing to draw."""


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _offsets(labels: pd.Series[Any], series: Sequence[str], *, width: float) -> pd.Series[float]:
    """How far to move each mark so that those of one case stand side by side over ``width`` in all."""
    place = {label: width * ((i + 0.5) / len(series) - 0.5) for i, label in enumerate(series)}
    return labels.map(place).astype(float)


def _scatter(comparison: Comparison, rows: pd.DataFrame, *, x: str, y: str, ax: Axes) -> None:
    styles = styles_of(comparison.series)
    present = [label for label in comparison.series if label in set(rows["label"])]
    sns.scatterplot(
        rows,
        x=x,
        y=y,
        hue="label",
        style="label",
        hue_order=present,
        style_order=present,
        palette={label: styles[label][0] for label in present},
        markers={label: styles[label][1] for label in present},
        s=40,
        linewidth=0.5,
        edgecolor="white",
        legend=False,
        ax=ax,
        zorder=3,
    )


def _legend(
    figure: Figure, comparison: Comparison, series: Sequence[str], lines: Mapping[str, Mapping[str, Any]]
) -> None:
    """One legend above the axes: ``series``, then ``lines``, then what has no mark at all and why."""
    styles = styles_of(comparison.series)
    handles = [
        Line2D([], [], color=styles[s][0], marker=styles[s][1], linestyle="none", markersize=6.5, label=s)
        for s in series
    ]
    handles += [Line2D([], [], linewidth=1.6, label=label, **style) for label, style in lines.items()]
    for label in comparison.series:
        if label not in series:
            words = comparison.impls.loc[comparison.impls["label"] == label, "status"].unique()
            handles.append(Line2D([], [], linestyle="none", label=f"{label}: {', '.join(words)}"))
    legend = figure.legend(
        handles=handles, loc="outside upper center", ncols=min(4, len(handles)), columnspacing=1.6
    )
    for text in legend.get_texts()[len(series) + len(lines) :]:
        text.set_color("#777777")


def _with_any(comparison: Comparison, column: str) -> list[str]:
    known = comparison.impls.loc[comparison.impls[column].notna(), "label"]
    return [label for label in comparison.series if label in set(known)]


def _gap_words(comparison: Comparison, cases: Sequence[str], series: Sequence[str]) -> dict[str, str]:
    """What to say beside a case about implementations that have a mark elsewhere, but none on it."""
    rows = comparison.impls
    rows = rows[rows["share"].isna() & rows["case"].isin(cases) & rows["label"].isin(series)]
    words: dict[str, list[str]] = {}
    for case, label, status in zip(rows["case"], rows["label"], rows["status"], strict=True):
        words.setdefault(case, []).append(f"{label}: {'no bound' if status == 'ok' else status}")
    return {case: "\n".join(said) for case, said in words.items()}


def _case_labels(comparison: Comparison, cases: Sequence[str]) -> list[str]:
    size = comparison.impls.drop_duplicates("case").set_index("case")["kv_bytes"]
    return [f"{case}  ({bytes_text(size[case])})" for case in cases]


def _matrix_axes(ax: Axes, comparison: Comparison, cases: Sequence[str]) -> Axes:
    ax.set_yticks(np.arange(len(cases)) + 0.5, _case_labels(comparison, cases), rotation=0)
    ax.set_xticks(
        np.arange(len(comparison.series)) + 0.5,
        [s.replace("-", "-\n", 1).replace(" ", "\n") for s in comparison.series],
        rotation=0,
    )
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
    ax.set_xlabel("")
    ax.set_ylabel("")
    return ax


def _log_ticks(axis: Any, text: Callable[[float], str], values: pd.Series[Any]) -> None:
    """Ticks at round numbers, the fewer of a decade the more decades there are, written out in units."""
    decades = _decades(values)
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 1 else (1.0, 2.0, 5.0) if decades < 3.5 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _decades(values: pd.Series[Any]) -> float:
    """How many powers of ten a log axis spans."""
    return float(np.log10(values.max() / values.min()))


def bytes_text(n_bytes: float) -> str:
    """A size in B, KB (1e3), MB or GB, to three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n_bytes >= size:
            return f"{float(f'{n_bytes / size:.3g}'):g} {unit}"
    return f"{n_bytes:g} B"


def _number_text(value: float) -> str:
    if value >= 1e-3:
        return f"{value:g}"
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"


def _us_text(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us:g} µs"
