"""Reports: Markdown and figures from records alone, without a GPU or torch, byte for byte the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.record import IMPOSTORS_FILE, SELFTEST_FILE, TUNING_FILE, RecordError, records_file
from harness.render.helper import helping

if TYPE_CHECKING:
    from harness.render.frame import Comparison


def render_study(folders: Sequence[Path], *, page: bool = False) -> Path:
    """Write the report of one study, of several as one comparison, or of the harness's measurements of itself.

    Args:
        folders: study folders that hold a ``records.jsonl``, or one that holds a ``tuning.jsonl`` alone, a
            ``selftest.jsonl`` or an ``impostors.jsonl``. One folder's report goes into that folder; that of
            several into a folder beside the first, named after all of them.
        page: whether to write it as one self-contained page too, ``report.html``.

    Returns:
        The path of the report's ``README.md``; its figures lie beside it in ``figures/``, and so does the page.

    Raises:
        harness.record.RecordError: for a folder without records or measurements, a line that is not a record, or
            a folder among several that was tuned but not run.
        harness.study.StudyError: for a ``study.toml`` beside a tuning that cannot be read.
        ImportError: for a page without what draws it.
        ValueError: for no folder, or the same one twice.
    """
    readme, comparison = _write_report([Path(folder) for folder in folders])
    if page:
        from harness.render.page import write_page

        write_page(readme, comparison)
    return readme


def _write_report(folders: Sequence[Path]) -> tuple[Path, Comparison | None]:
    """The report, and the comparison that it is made of, where it is one."""
    if len(folders) == 1 and (folders[0] / SELFTEST_FILE).is_file():
        from harness.render.timing import write_timing_report

        return write_timing_report(folders[0]), None
    if len(folders) == 1 and (folders[0] / IMPOSTORS_FILE).is_file():
        from harness.render.checks import write_check_report

        return write_check_report(folders[0]), None
    for folder in folders:
        if (folder / TUNING_FILE).is_file() and not (folder / records_file()).is_file():
            if len(folders) > 1:
                raise RecordError(
                    f"{folder}: expected the {records_file()} of a run, to compare with others, got a {TUNING_FILE}"
                    " alone; render that folder by itself"
                )
            from harness.render.tuning_report import write_tuning_report

            return write_tuning_report(folder), None

    with helping(folders) as helper:
        # pandas, matplotlib and seaborn take a second to import: only a render pays for them.
        from harness.render.checks import deep_check
        from harness.render.figures import FIGURES, draw_all
        from harness.render.frame import load
        from harness.render.markdown import context, write_report
        from harness.render.plots_tuning import FIGURE
        from harness.render.repeats import read_repeat
        from harness.render.tuning import tuning_section

        comparison = load(folders)
        target = folders[0] if len(folders) == 1 else folders[0].parent / "+".join(comparison.folders)
        figures = target / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        for old in figures.glob(f"{FIGURE}.*"):  # of a report from before the study was run
            old.unlink()
        helper.begin(comparison, figures, FIGURES)
        repeat = read_repeat(comparison, target)
        said = context(comparison, target, repeat) | {"deep": deep_check(target)}
        said["tuned"] = tuning_section(target, comparison.plans_chosen())
        drawn = draw_all(comparison, figures, helper)
    return write_report(comparison, said, drawn, target), comparison
