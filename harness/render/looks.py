"""How every figure looks: colours, markers, axes, legends, and how one is saved.

Everything is drawn on a plain :class:`~matplotlib.figure.Figure`, without pyplot's state or a display, and
saved without dates, software tags or random ids: the same records give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import font_manager
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from harness.render.frame import NO_RECORD, Comparison, each, impl_of
from harness.render.text import bytes_text

STYLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # Okabe and Ito's colours; their yellow is too pale for a mark on white.
        "tilelang-splitkv": ("#0072B2", "o"),
        "triton-splitkv": ("#D55E00", "s"),
        "flash-attn-2": ("#009E73", "^"),
        "flash-attn-3": ("#E69F00", "D"),
        "torch-varlen": ("#CC79A7", "v"),
        "torch-sdpa": ("#56B4E9", "P"),
        # Farthest from those, and from one another, in what the three kinds of colour-blindness leave.
        "flash-attn-2-paged": ("#602000", "<"),
        "flash-attn-3-paged": ("#8000E0", ">"),
        "flashinfer": ("#002080", "X"),
        "tilelang-equal-splits": ("#A8A840", "h"),
    }
)
"""Implementation id -> (colour, marker), the same in every figure of every report, whatever the catalog lists.

The marker carries the same meaning for a reader who sees no colour."""

SPARE: Sequence[tuple[str, str]] = (("#602060", "*"), ("#5F6B6D", "p"), ("#9E3D3D", "d"))
"""What implementations look like that have no look of their own yet."""

BOUND_COLOUR = "#333333"
ALARM_COLOUR = "#B00020"
TIE_COLOUR = "#D5D5D5"
QUIET_COLOUR = "#666666"

WORD_COLOURS: Mapping[str, str] = {
    "ok": "#D4E6D9",
    "wrong": "#E8A198",
    "failed": "#F2C9A1",
    "invalid": "#F5E3A6",
    "unsupported": "#DADDE3",
    "unavailable": "#EEEFF2",
    NO_RECORD: "#FFFFFF",
}

MAX_CASES = 40
"""The most cases that a figure with a line of its own for each of them shows; tables show all."""

MARK_SIZE = 40.0
"""Of a mark, in square points."""

DPI = 160
WIDTH = 9.0
"""Of every figure, in inches."""

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "axes.titlesize": 9.5,
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


@contextmanager
def style() -> Iterator[None]:
    """What is drawn inside looks the same on any host, whatever fonts and matplotlibrc that has."""
    _own_fonts()
    with mpl_style.context(["default", RC]):
        yield


@cache
def _own_fonts() -> None:
    """Put the fonts that come with matplotlib before those of the host: another version has other glyph numbers."""
    fonts = font_manager.fontManager
    for file in sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").glob("DejaVuSans*.ttf")):
        fonts.addfont(file)
        fonts.ttflist.insert(0, fonts.ttflist.pop())


def save(figure: Figure, png: Path, svg: Path) -> None:
    """Save a figure in both forms, with nothing in them that differs from one time to the next."""
    # The layout is worked out once for both forms, which makes them alike. Nothing need be drawn for that, and
    # savefig would draw twice while there is an engine, even one that does nothing.
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine(None)
    figure.savefig(png, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})


def make_figure(height: float) -> tuple[Figure, Axes]:
    """A figure of one pair of axes, ``height`` inches tall."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def panels(n: int, *, columns: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of ``n`` pairs of axes in rows of ``columns``, each row ``height`` inches tall."""
    columns = min(n, columns)
    rows = -(-n // columns)
    figure = Figure(figsize=(WIDTH, 0.7 + height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes[n:]:
        ax.remove()
    return figure, axes[:n]


def cases_shown(comparison: Comparison) -> list[str]:
    """The cases of figures with a line a case: all, or :data:`MAX_CASES` evenly spaced ones by KV bytes."""
    n = len(comparison.cases)
    if n <= MAX_CASES:
        return list(comparison.cases)
    return [comparison.cases[i] for i in np.linspace(0, n - 1, MAX_CASES).round().astype(int)]


def styles_of(series: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Label -> (colour, marker): an implementation's own, or for an unknown one the next spare look."""
    strangers = sorted({impl_of(label) for label in series} - set(STYLES))
    spare = {impl: SPARE[i % len(SPARE)] for i, impl in enumerate(strangers)}
    return {label: STYLES.get(impl_of(label)) or spare[impl_of(label)] for label in series}


def url_of(anchor: str | None) -> str | None:
    """Where a mark of a figure links to: its line in the report's table, seen from ``figures/``."""
    return f"../README.md#{anchor}" if anchor else None


def link(marks: Collection, rows: pd.DataFrame) -> None:
    """Link each mark of a collection to the measurement of the row it stands for, in the same order."""
    marks.set_urls([url_of(anchor) for anchor in rows["anchor"]])


def offsets(labels: pd.Series[Any], series: Sequence[str], *, width: float) -> pd.Series[float]:
    """How far to move each mark so that those of one case stand side by side over ``width`` in all."""
    place = {label: width * ((i + 0.5) / len(series) - 0.5) for i, label in enumerate(series)}
    return labels.map(place).astype(float)


def scatter(
    comparison: Comparison, rows: pd.DataFrame, *, x: str, y: str, ax: Axes, size: float = MARK_SIZE
) -> None:
    """A mark a row, of ``size`` square points, in its implementation's look and linked to its measurement."""
    if rows.empty:
        return
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
        s=size,
        linewidth=0.5,
        edgecolor="white",
        legend=False,
        ax=ax,
        zorder=3,
    )
    link(ax.collections[-1], rows)


def legend(
    figure: Figure,
    comparison: Comparison,
    series: Sequence[str],
    others: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    missing: bool = True,
) -> None:
    """One legend above the axes: ``series``, ``others`` and, if ``missing``, what has no mark at all and why."""
    styles = styles_of(comparison.series)
    handles = [
        Line2D([], [], color=styles[s][0], marker=styles[s][1], linestyle="none", label=named(comparison, s))
        for s in series
    ]
    for handle in handles:
        handle.set_markersize(6.5)
    others = others or {}
    handles += [Line2D([], [], label=label, **{"linewidth": 1.6} | dict(style)) for label, style in others.items()]
    for label in comparison.shown if missing else ():
        if label not in series:
            words = comparison.impls.loc[comparison.impls["label"] == label, "status"].unique()
            handles.append(
                Line2D([], [], linestyle="none", label=f"{named(comparison, label)}: {', '.join(words)}")
            )
    made = figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)), columnspacing=1.6)
    for text in made.get_texts()[len(series) + len(others) :]:
        text.set_color("#777777")


def with_any(comparison: Comparison, column: str) -> list[str]:
    """The series of a figure that have a value in ``column`` on some case."""
    known = comparison.impls.loc[comparison.impls[column].notna(), "label"]
    return [label for label in comparison.shown if label in set(known)]


def case_labels(comparison: Comparison, cases: Sequence[str]) -> list[str]:
    """Case, size, and the device where there are several."""
    several = len(comparison.devices) > 1
    first = {row.case: row for row in each(comparison.impls.drop_duplicates("case"))}
    return [
        f"{case}  ({bytes_text(first[case].kv_bytes)})" + (f"\n{first[case].device}" if several else "")
        for case in cases
    ]


def named(comparison: Comparison, label: str) -> str:
    """A series as a figure names it: marked where the deeper check did not find it right on some case."""
    return label + "†" * (label in comparison.faulty)


def series_ticks(comparison: Comparison, series: Sequence[str]) -> list[str]:
    """Names of series on lines short enough for a column of a matrix."""
    return [re.sub(r"-(?=[a-z])", "-\n", named(comparison, label)).replace(" ", "\n") for label in series]


def word_size(columns: int, most: float) -> float:
    """A font size in which the longest word of a status fits a column of a matrix, ``most`` where there is room."""
    return min(most, 66 / columns)


def log_ticks(axis: Any, text: Callable[[float], str], values: pd.Series[Any]) -> None:
    """Ticks at round numbers, the fewer of a decade the more decades there are, written out in units."""
    n = decades(values)
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if n < 1 else (1.0, 2.0, 5.0) if n < 3.5 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def binary_ticks(axis: Any, values: pd.Series[Any]) -> None:
    """Ticks at powers of two, or of four where those would be too many; k is 1024."""
    axis.set_major_locator(LogLocator(base=2.0 if decades(values) < 2.8 else 4.0))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda n, _: binary_text(n)))


def binary_text(n: float) -> str:
    """A count beside a tick; k is 1024."""
    return f"{n:g}" if n < 1024 else f"{n / 1024:g}k"


def decades(values: pd.Series[Any]) -> float:
    """How many powers of ten a log axis spans."""
    return float(np.log10(values.max() / values.min()))


def error_tick(value: float) -> str:
    """An error beside a tick."""
    if value >= 1e-3:
        return f"{value:g}"
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"


def us_tick(us: float) -> str:
    """A time beside a tick, with its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us:g} µs"
