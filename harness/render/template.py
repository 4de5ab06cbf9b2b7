"""What a template is filled with, and how: tables, pictures, and the file that comes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@dataclass(frozen=True)
class Table:
    """A Markdown table: header, alignment of each column (``l``, ``r`` or ``c``) and rows of cell texts."""

    header: Sequence[str]
    sides: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A figure as the report embeds it."""

    name: str
    alt: str
    caption: str


def environment() -> Environment:
    """Jinja, for the templates beside this file."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )


def fill(template: str, values: Mapping[str, Any], folder: Path) -> Path:
    """Write a ``README.md`` from a template into ``folder`` and return its path."""
    text = environment().get_template(template).render(values)
    path = folder / "README.md"
    path.write_text(re.sub(r"\n{3,}", "\n\n", text).strip() + "\n", encoding="utf-8")
    return path
