"""Studies: a TOML file that says which cases and which implementations to compare.

::

    title = "Decode attention on one GPU"
    dtype = "bfloat16"                          # of every case that states none; default bfloat16
    seed = 0                                    # likewise; default 0
    smallest_effect = 0.01                      # a difference of times below this share is a tie; default 1 %
    impls = ["tilelang-splitkv", {impl = "triton-splitkv", num_splits = 8}]     # default: the whole catalog

    [[case]]
    name = "skew"
    kv_lens = "1x131072,31x1024"                # or a list, a distribution, a trace: see harness.workloads
    heads_q = 32
    heads_kv = 8
    head_dim = 128

    [[case]]
    name = "chat"
    kv_lens = {distribution = "longtail", batch = 64, low = 512, high = 32768, alpha = 1.1}
    model = "Qwen2.5-7B"                        # in place of the three numbers
    tp = 2
    source = "made to look like a chat server"  # said in the report; optional

Standard library only, like everything that reads or renders a study.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.workloads import WorkloadError, make_lengths, model_heads
from impls.catalog import IMPLS, check_name
from impls.problem import DecodeProblem, ProblemError

if TYPE_CHECKING:
    from impls.contract import Scalar

REPORTS = Path("reports")
"""The folder, under the current one, in which a study may be named by its folder's name alone."""

OWN_REPORTS = Path(__file__).resolve().parents[1] / REPORTS
"""The same folder of the project's checkout, for a command that is given elsewhere."""

STUDY_FILE = "study.toml"

SMALLEST_EFFECT = 0.01
"""What a study takes for the smallest difference that matters unless it states another."""

_STUDY_KEYS = ("title", "dtype", "seed", "smallest_effect", "impls", "case")
_CASE_KEYS = (
    "name", "kv_lens", "heads_q", "heads_kv", "head_dim", "model", "tp", "dtype", "scale", "seed", "source",
)  # fmt: skip
_HEAD_KEYS = ("heads_q", "heads_kv", "head_dim")


class StudyError(ValueError):
    """A study that cannot be used; the message names the file, the case and the key at fault."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem of a study.

    Args:
        name: unique within the study; letters, digits, ``_``, ``-`` and ``.``.
        problem: what is to be computed.
        seed: of the case's random inputs.
        source: where its lengths and heads came from, in words; None where they were written out as numbers.
    """

    name: str
    problem: DecodeProblem
    seed: int
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One implementation as a study asks for it.

    Args:
        impl: its id in the catalog.
        tuning: overrides of its own choices, e.g. ``{"num_splits": 8}``; may be empty.
    """

    impl: str
    tuning: Mapping[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Which cases, which implementations.

    Args:
        name: the folder's name for a file called ``study.toml``, else the file's name without its suffix.
        title: one line for the report.
        cases: at least one, names unique.
        entries: at least one, no two alike.
        path: the TOML file.
        smallest_effect: the difference of two times, as a share of the smaller, below which they count as
            equal.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    entries: tuple[Entry, ...]
    path: Path
    smallest_effect: float = SMALLEST_EFFECT

    @property
    def folder(self) -> Path:
        """Where the study's records, figures and report go: :func:`study_folder` of its file."""
        return study_folder(self.path)


def find_study(where: str | Path) -> Path:
    """The TOML file that a STUDY argument means.

    Args:
        where: a TOML file, a folder that holds a ``study.toml``, or the name of such a folder under
            ``reports/``, here or else in the project's own checkout.

    Raises:
        StudyError: if there is none, listing the studies under ``reports/``.
    """
    by_name = [folder / where / STUDY_FILE for folder in (REPORTS, OWN_REPORTS)]
    for candidate in (Path(where), Path(where) / STUDY_FILE, *by_name):
        if candidate.is_file():
            return candidate
    folder = REPORTS if REPORTS.is_dir() else OWN_REPORTS
    known = ", ".join(sorted(path.parent.name for path in folder.glob(f"*/{STUDY_FILE}"))) or "none here"
    raise StudyError(
        f"study: expected a TOML file, a folder with a {STUDY_FILE}, or the name of one under {folder}/ "
        f"({known}), got {str(where)!r}"
    )


def study_folder(path: Path) -> Path:
    """Where the records, figures and report of the study in this file go.

    The folder of a file called ``study.toml``; for any other file ``reports/<its stem>`` under the current
    folder.
    """
    return path.parent if path.name == STUDY_FILE else REPORTS / path.stem


def load_study(where: str | Path) -> Study:
    """Read and check a study, with every length and head count worked out.

    Args:
        where: as for :func:`find_study`.

    Raises:
        StudyError: naming the file, the case and the key at fault, what was expected and what was got.
    """
    path = find_study(where)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StudyError(f"{path}: expected a TOML file, got {error}") from error
    name = path.resolve().parent.name if path.name == STUDY_FILE else path.stem
    try:
        _check_keys(data, _STUDY_KEYS, "a study")
        title = data.get("title", name)
        if not isinstance(title, str):
            raise StudyError(f"title: expected a string, got {title!r}")
        effect = data.get("smallest_effect", SMALLEST_EFFECT)
        if isinstance(effect, bool) or not isinstance(effect, int | float) or not 0 <= effect < 1:
            raise StudyError(f"smallest_effect: expected a share from 0 to 1, got {effect!r}")
        entries = _read_entries(data.get("impls", list(IMPLS)))
        tables = data.get("case", [])
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            raise StudyError(f"case: expected at least one [[case]] table, got {tables!r}")
        defaults = {"dtype": data.get("dtype", "bfloat16"), "seed": data.get("seed", 0)}
        cases: list[Case] = []
        for i, table in enumerate(tables):
            try:
                cases.append(_read_case(defaults | table, path.parent))
                if cases[-1].name in (case.name for case in cases[:-1]):
                    raise StudyError("name: expected one not used by a case above, got it a second time")
            except (StudyError, WorkloadError, ProblemError) as error:
                raise StudyError(f"case {table.get('name', f'number {i + 1}')!r}: {error}") from error
    except StudyError as error:
        raise StudyError(f"{path}: {error}") from error
    return Study(
        name=name, title=title, cases=tuple(cases), entries=entries, path=path, smallest_effect=float(effect)
    )


def expand_study(study: Study) -> str:
    """The study as TOML with nothing left to work out: plain lengths and heads, their source named.

    What is committed is this text, never the trace or the model table behind it. Loading it gives the same
    cases and entries again.
    """
    lines = [f"title = {_toml(study.title)}"]
    if study.smallest_effect != SMALLEST_EFFECT:
        lines.append(f"smallest_effect = {_toml(study.smallest_effect)}")
    if study.entries != _read_entries(list(IMPLS)):
        lines += ["impls = [", *(f"    {_toml_entry(entry)}," for entry in study.entries), "]"]
    for case in study.cases:
        problem = case.problem.to_dict()
        lens = ", ".join(map(str, problem.pop("kv_lens")))
        lines += ["", "[[case]]", f"name = {_toml(case.name)}"]
        if case.source is not None:
            lines.append(f"source = {_toml(case.source)}")
        if len(lens) < 90:
            lines.append(f"kv_lens = [{lens}]")
        else:
            lines += ["kv_lens = [", textwrap.indent(textwrap.fill(lens, width=100), "    ") + ",", "]"]
        lines += [f"{key} = {_toml(value)}" for key, value in problem.items()]
        lines.append(f"seed = {case.seed}")
    return "\n".join(lines) + "\n"


def _read_entries(values: object) -> tuple[Entry, ...]:
    if not isinstance(values, list) or not values:
        raise StudyError(f"impls: expected a list of implementations, at least one, got {values!r}")
    entries: list[Entry] = []
    for i, value in enumerate(values):
        where = f"impls[{i}]"
        table = {"impl": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("impl"), str):
            raise StudyError(
                f'{where}: expected an implementation\'s name or a table {{impl = "NAME", ...}}, got {value!r}'
            )
        tuning = {key: item for key, item in table.items() if key != "impl"}
        for key, item in tuning.items():
            if not isinstance(item, (str, int, float)) or (isinstance(item, float) and not math.isfinite(item)):
                raise StudyError(f"{where}: {key}: expected a string, a number or a boolean, got {item!r}")
        try:
            entry = Entry(impl=check_name(table["impl"]), tuning=tuning)
        except KeyError as error:
            raise StudyError(f"{where}: {error.args[0]}") from error
        if entry in entries:
            raise StudyError(f"{where}: expected one not listed above, got {value!r} a second time")
        entries.append(entry)
    return tuple(entries)


def _read_case(table: Mapping[str, Any], folder: Path) -> Case:
    _check_keys(table, _CASE_KEYS, "a case")
    for key in ("name", "kv_lens"):
        if key not in table:
            raise StudyError(f"{key}: expected one, got nothing")
    name, seed, source = table["name"], table["seed"], table.get("source")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise StudyError(f"name: expected letters, digits, '_', '-' and '.', got {name!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise StudyError(f"seed: expected an integer >= 0, got {seed!r}")
    if source is not None and not isinstance(source, str):
        raise StudyError(f"source: expected a string, got {source!r}")
    kv_lens, lens_source = make_lengths(table["kv_lens"], seed=seed, folder=folder)
    heads, heads_source = _read_heads(table)
    problem = DecodeProblem(kv_lens=kv_lens, **heads, dtype=table["dtype"], scale=table.get("scale"))
    sources = [part for part in (source, lens_source, heads_source) if part]
    return Case(name=name, problem=problem, seed=seed, source="; ".join(sources) or None)


def _read_heads(table: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The three head numbers of a case, and their source in words where it is a model."""
    if "model" not in table:
        for key in _HEAD_KEYS:
            if key not in table:
                raise StudyError(f"{key}: expected {', '.join(_HEAD_KEYS)} or a model, got nothing")
        if "tp" in table:
            raise StudyError("tp: expected only beside a model, got it beside head numbers")
        return {key: table[key] for key in _HEAD_KEYS}, None
    for key in _HEAD_KEYS:
        if key in table:
            raise StudyError(f"{key}: expected either a model or {', '.join(_HEAD_KEYS)}, got both")
    model, tp = table["model"], table.get("tp", 1)
    heads = dict(zip(_HEAD_KEYS, model_heads(model, tp), strict=True))
    return heads, f"heads of {model}" + (f" on one of {tp} GPUs" if tp > 1 else "")


def _check_keys(table: Mapping[str, object], known: tuple[str, ...], what: str) -> None:
    for key in table:
        if key not in known:
            raise StudyError(f"{key}: expected the keys of {what} ({', '.join(known)}), got an unknown one")


def _toml(value: Scalar) -> str:
    """A TOML value. JSON's strings, numbers and booleans are TOML's too, but for one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_entry(entry: Entry) -> str:
    if not entry.tuning:
        return _toml(entry.impl)
    pairs = {"impl": entry.impl, **entry.tuning}
    # A key is quoted: a bare one may not hold every character that a quoted one may.
    return "{" + ", ".join(f"{_toml(key)} = {_toml(value)}" for key, value in pairs.items()) + "}"
