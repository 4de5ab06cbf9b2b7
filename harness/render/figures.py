"""Every figure of a report: what draws it, and one function that draws and saves them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from harness.render import plots_detail, plots_speed
from harness.render.frame import Comparison
from harness.render.helper import Helper
from harness.render.looks import cases_shown, save, style

FIGURES: Mapping[str, Callable[[Comparison], Figure | None]] = {
    "share": plots_speed.share,
    "slowdown": plots_speed.slowdown,
    "latency": plots_speed.latency,
    "splits": plots_detail.splits,
    "parts": plots_detail.parts,
    "batch": plots_speed.batch,
    "error": plots_detail.error,
    "skew": plots_speed.skew,
    "support": plots_detail.support,
}
"""Name of the files -> what draws the figure, or None where there is nothing to draw; in a report's order."""

BY_CASE = ("share", "slowdown", "support")
"""Figures with a line of its own for each case."""


@dataclass(frozen=True)
class Drawn:
    """A saved figure: its name, the paths of its two forms, and the cases that it leaves out."""

    name: str
    png: Path
    svg: Path
    left_out: int


def draw_all(comparison: Comparison, folder: Path, helper: Helper) -> dict[str, Drawn]:
    """Draw every figure that the comparison has data for, and save each as PNG and SVG.

    Args:
        comparison: what to draw.
        folder: where. Files of figures that are not drawn are removed.
        helper: what has begun on :data:`FIGURES`, with the same comparison and folder.

    Returns:
        Name -> the saved figure, in the order of a report.
    """
    found: dict[str, Drawn | None] = {}
    while (name := helper.next()) is not None:
        found[name] = draw(comparison, name, folder)
    found |= helper.finish()
    # What the helper gave up on is drawn here.
    drawn = {name: found[name] if name in found else draw(comparison, name, folder) for name in FIGURES}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def draw(comparison: Comparison, name: str, folder: Path) -> Drawn | None:
    """Draw one figure and save it as PNG and SVG; None, and no files, where there is nothing to draw."""
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with style():
        figure = FIGURES[name](comparison)
        if figure is None:
            png.unlink(missing_ok=True)
            svg.unlink(missing_ok=True)
            return None
        save(figure, png, svg)
    left_out = len(comparison.cases) - len(cases_shown(comparison))
    return Drawn(name, png, svg, left_out if name in BY_CASE else 0)
