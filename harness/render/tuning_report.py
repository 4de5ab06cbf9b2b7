"""The report of a study that was tuned but not run: what the own choices lose, and on which problems."""

from __future__ import annotations

from pathlib import Path

from harness.record import TUNING_FILE, RecordError, records_file
from harness.render.looks import save, style
from harness.render.markdown import CACHES, METHODS
from harness.render.plots_tuning import FIGURE, MAX_CASES, cases_drawn, draw_regret
from harness.render.template import Picture, fill
from harness.render.text import cases_text, code, environment_text, escape, join
from harness.render.tuning import Tuning, read_tuning, section_of
from harness.study import STUDY_FILE


def write_tuning_report(folder: Path) -> Path:
    """Write ``README.md`` and the figure of a folder's tuning; returns the path of the former.

    Raises:
        harness.record.RecordError: for a line that is no record, or a file without a case that was tuned on a GPU.
        harness.study.StudyError: for a ``study.toml`` that cannot be read.
    """
    tuning = read_tuning(folder)
    if tuning is None:
        raise RecordError(
            f"{folder / TUNING_FILE}: expected a case that was tuned on a GPU, since there is no {records_file()},"
            " got none"
        )
    anchors = {(row.case, row.impl): f"t{i}" for i, row in enumerate(tuning.found, start=1)}
    name = folder.resolve().name
    values = {
        "title": f"{escape(name)}: what the own choice of our kernels loses",
        "name": name,
        "tuned": section_of(tuning, anchors),
        "environment": "<br>\n".join(map(environment_text, tuning.runs.values())),
        "study_title": None if tuning.study is None else f"{escape(tuning.study.title)}.",
        "head": _quotation(folder / STUDY_FILE),
        "coverage": _coverage(tuning),
        "method": _method(tuning),
        "figure_of_regret": _figure(tuning, anchors, folder / "figures"),
    }
    return fill("tuning_report.md.j2", values, folder)


def _quotation(path: Path) -> str | None:
    """The comment at the head of a study, as a quotation; None where there is none."""
    if not path.is_file():
        return None
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(f"> {escape(line.lstrip('#'))}".rstrip())
    return "\n".join(lines) or None


def _coverage(tuning: Tuning) -> str:
    """How many of the study's cases were tuned, and which were not; empty without the study."""
    if tuning.study is None:
        return ""
    total = len(tuning.study.cases)
    alike: dict[tuple[str, ...], list[str]] = {}
    for impl, left in tuning.left().items():
        alike.setdefault(tuple(left), []).append(code(impl))
    sentences = []
    for names, impls in alike.items():
        who = "" if len(alike) == 1 else f" for {join(impls)}"
        if not names:
            sentences.append(f"All {total} cases of the study were tuned{who}.")
        else:
            others = f"{join([code(name) for name in names])} {'was' if len(names) == 1 else 'were'} not"
            sentences.append(f"{total - len(names)} of the study's {cases_text(total)} were tuned{who}; {others}.")
    return " ".join(sentences)


def _method(tuning: Tuning) -> list[str]:
    """What the methods and cache states of the runs mean, each once."""
    said = [
        words[str(run["env"].get(key))]
        for key, words in (("method", METHODS), ("cache", CACHES))
        for run in tuning.runs.values()
        if str(run["env"].get(key)) in words
    ]
    return list(dict.fromkeys(said))


def _figure(tuning: Tuning, anchors: dict[tuple[str, str], str], folder: Path) -> Picture | None:
    """Draw the regrets and save them; None, and no files, where no case has one."""
    png, svg = folder / f"{FIGURE}.png", folder / f"{FIGURE}.svg"
    cases = cases_drawn(tuning)
    if not cases:
        png.unlink(missing_ok=True)
        svg.unlink(missing_ok=True)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        save(draw_regret(tuning, cases, anchors), png, svg)
    ties, timed = sum(total.ties for total in tuning.overall), sum(total.cases for total in tuning.overall)
    caption = (
        f"{ties} of {timed} own choices tie with the best found. The case that loses most stands first; beside each"
        " stand its heads (query/KV), head dim, and bytes of K and V. Lines are intervals. The scale is that of the"
        " square root of what is lost, so that small losses differ. A mark of the SVG leads to its line below."
    )
    left = len({row.case for row in tuning.found if row.regret is not None}) - len(cases)
    if left:
        caption += f" The {cases_text(left)} that lose least are not drawn: {MAX_CASES} are."
    return Picture(FIGURE, "Regret of each case and implementation, with intervals, the largest first", caption)
