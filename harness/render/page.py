"""A report as one self-contained page: its Markdown, its figures inline, its tables sortable and filterable.

The page says what the report says, from the same text. Tables are DataTables', whose offline bundle comes with
itables; a mark of a figure shows its measurement when the pointer rests on it and leads to its line.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from markdown_it import MarkdownIt
from markdown_it.token import Token

from harness.render.frame import Comparison, each
from harness.render.template import environment
from harness.render.text import interval_text, us_text

SEARCHED_FROM = 8
"""Rows from which on a table has a search box."""

_SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9}

PAGE_FILE = "report.html"
"""The page, beside the report; it is built where it is wanted and never committed."""


def write_page(readme: Path, comparison: Comparison | None = None) -> Path:
    """Write the page of a rendered report beside it and return its path.

    Args:
        readme: the report's Markdown, with its figures beside it.
        comparison: what the report is made of, for what a mark shows under the pointer; None for a report of
            something else.

    Raises:
        ImportError: without itables, naming the extra that brings it.
    """
    script, style = _bundle()
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(readme.read_text(encoding="utf-8"))
    hover = {} if comparison is None else hover_texts(comparison)
    headings = _adapt(tokens, readme.parent, hover)
    values = {
        "title": _plain(next(t for t in tokens if t.type == "inline")),
        "headings": headings,
        "body": parser.renderer.render(tokens, parser.options, {}),
        "bundle": b64encode(script).decode("ascii"),
        "bundle_style": style.decode("utf-8"),
        "searched_from": SEARCHED_FROM,
    }
    target = readme.with_name(PAGE_FILE)
    target.write_text(environment().get_template("page.html.j2").render(values) + "\n", encoding="utf-8")
    return target


def hover_texts(comparison: Comparison) -> dict[str, str]:
    """Anchor -> what a mark of that measurement says under the pointer."""
    told = {}
    for row in each(comparison.rows):
        if row.anchor is None:
            continue
        lines = [f"{row.label}, {row.case}"]
        if not math.isnan(row.us):
            lines.append(f"{us_text(row.us)} µs [{us_text(row.us_low)}, {us_text(row.us_high)}]")
        if not math.isnan(row.share):
            lines.append(f"{interval_text(row.share, row.share_low, row.share_high, places=1)} % of the bound")
        if not math.isnan(row.slowdown):
            lines.append(f"{interval_text(row.slowdown, row.slowdown_low, row.slowdown_high)} × the fastest")
        if not math.isnan(row.rel_l2):
            lines.append(f"relative L2 error {row.rel_l2:.1e}, worst row {row.worst_row:.2f} of its budget")
        told[row.anchor] = "\n".join(lines if row.status == "ok" else [*lines, f"{row.status}: {row.reason}"])
    return told


def _bundle() -> tuple[bytes, bytes]:
    """DataTables as a module whose default export it is, and its style."""
    try:
        folder = files("itables") / "html"
    except ModuleNotFoundError as error:
        raise ImportError("a page needs itables: pip install '.[html]'") from error
    return (folder / "dt_bundle.js").read_bytes(), (folder / "dt_bundle.css").read_bytes()


def _adapt(tokens: list[Token], folder: Path, hover: Mapping[str, str]) -> list[tuple[str, str]]:
    """Put figures and tables into the form of a page, in place; returns (id, text) of each section."""
    headings = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            text = _plain(tokens[i + 1])
            name = "section-" + re.sub(r"\W+", "-", text.lower())
            token.attrSet("id", name)
            headings.append((name, text))
        elif token.type == "table_open":
            token.attrSet("class", "display compact")
        elif token.type == "td_open" and "right" in str(token.attrGet("style")):
            token.attrSet("data-order", sort_key(_plain(tokens[i + 1])))
        elif token.type == "inline":
            children = token.children or []
            if [child.type for child in children] == ["link_open", "image", "link_close"]:
                tokens[i - 1].hidden = tokens[i + 1].hidden = True
                tokens[i] = _figure(children, folder, hover)
    return headings


def _figure(children: Sequence[Token], folder: Path, hover: Mapping[str, str]) -> Token:
    path, alt = str(children[0].attrGet("href")), children[1].content
    svg = inline_svg((folder / path).read_text(encoding="utf-8"), Path(path).stem, alt, hover)
    return Token("html_block", "", 0, content=f'<figure id="figure-{Path(path).stem}">{svg}</figure>\n')


def inline_svg(svg: str, name: str, alt: str, hover: Mapping[str, str]) -> str:
    """A figure's SVG as part of a page.

    Args:
        svg: as matplotlib wrote it, with links into the report beside it.
        name: of the figure; every id begins with it, for ids of two figures must differ in one page.
        alt: what it shows, in words.
        hover: anchor -> what the mark that links there says under the pointer.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\1{name}-", svg)

    def mark(found: re.Match[str]) -> str:
        anchor = found[1]
        title = f"<title>{escape(hover[anchor])}</title>" if anchor in hover else ""
        return f'<a xlink:href="#{anchor}">{title}'

    # Without matplotlib's target="_blank": the line is in this very page.
    svg = re.sub(r'<a xlink:href="[^"#]*#(\w+)"[^>]*>', mark, svg)
    return re.sub(r"<svg ", f'<svg role="img" aria-label={quoteattr(alt)} ', svg, count=1)


def _plain(inline: Token) -> str:
    """The text of a cell or heading, without notes in ``<sup>``."""
    return "".join(_texts(inline.children or []))


def _texts(children: Iterable[Token]) -> Iterable[str]:
    note = False
    for child in children:
        if child.type == "html_inline":
            note = child.content == "<sup>" or (note and child.content != "</sup>")
        elif not note:
            yield child.content


def sort_key(text: str) -> str:
    """The number by which a cell of numbers is sorted: its first, in bytes where it is a size; or nothing."""
    found = re.search(r"(-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ([KMG]?B)\b)?", text)
    if found is None:
        return ""
    number = found[1].replace(",", "")
    return f"{float(number) * _SIZES[found[2]]:g}" if found[2] else number
