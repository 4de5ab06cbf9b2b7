"""The command line: ``splitkv``, or ``python -m harness``. The verbs, and nothing else.

No verb computes in this process: the loop has its worker for that. So nothing heavy is imported to answer
``--help``, and only ``render`` imports what it draws with.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from harness.families import FAMILY_NAMES
from harness.record import CHECKS_FILE, IMPOSTORS_FILE, REPEAT_FILE, SELFTEST_FILE, STATUSES, RecordError
from harness.runner import Outcome, RunError, check_study, run_study
from harness.selftest import EXPERIMENTS, run_selftest
from harness.study import (
    REPORTS,
    Case,
    Entry,
    Study,
    StudyError,
    expand_study,
    find_study,
    load_study,
    study_folder,
)
from harness.worker import METHODS, Setup, WorkerLost, WorkerPool
from harness.workloads import WorkloadError, parse_lengths
from impls.catalog import IMPLS, OURS
from impls.problem import DTYPE_BYTES, DecodeProblem, ProblemError

app = typer.Typer(
    help="Which split-KV decode kernel for this batch, and how far is it from the speed of memory?",
    epilog="STUDY is a TOML file, a folder that holds a study.toml, or the name of such a folder under reports/.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _console(*, stderr: bool = False) -> Console:
    # What other libraries say is printed as it is, brackets and all: it is no markup.
    made = Console(markup=False, highlight=False, stderr=stderr)
    if not made.is_terminal:
        made.width = 160  # a file has no width; rich would wrap it at 80 columns
    return made


console = _console()
progress = _console(stderr=True)

OUR_NAME = "ours"
"""Stands for both of our kernels after ``--require``."""

SMALL = Study(
    name="doctor",
    title="One small problem of each dtype",
    cases=tuple(
        Case(
            name=dtype,
            problem=DecodeProblem(kv_lens=(64, 33), heads_q=8, heads_kv=2, head_dim=64, dtype=dtype),
            seed=0,
        )
        for dtype in DTYPE_BYTES
    ),
    entries=tuple(Entry(impl=name, tuning={}) for name in IMPLS),
    path=Path("doctor.toml"),
)
"""What ``doctor`` tries; it is never written."""


INTERRUPTED = 130
"""The exit code that typer gives Ctrl-C, as shells do."""


class Device(StrEnum):
    """Where to compute."""

    cpu = "cpu"
    cuda = "cuda"


def _methods() -> str:
    return "; ".join(f"{', '.join(methods)} on {device}" for device, methods in METHODS.items())


StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="The study.", show_default=False)]
DeviceOption = Annotated[
    Device | None, typer.Option(help="Where to compute; the GPU if there is one.", show_default=False)
]


@app.command()
def doctor(device: DeviceOption = None) -> None:
    """Say what is here: the environment, and what each implementation does with one small problem of each dtype.

    Compiles and runs the kernels, so it may take a minute the first time.
    """
    with WorkerPool(Setup(device=device)) as pool:
        environment = pool.ready.env
    table = _table("environment", "here")
    for key, value in environment.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {item}" for name, item in value.items())
        table.add_row(key, "-" if value is None else str(value))
    console.print(table)
    outcomes = check_study(SMALL, device=environment["device"], families=FAMILY_NAMES[:1], console=progress)
    verdicts = _table("implementation", *(case.name for case in SMALL.cases))
    for entry in SMALL.entries:
        verdicts.add_row(_label(entry), *(_verdict(outcome) for outcome in outcomes if outcome.entry == entry))
    console.print()
    console.print(verdicts)
    console.print()
    _print_reasons(outcomes)


@app.command()
def check(
    study: StudyArgument,
    device: DeviceOption = None,
    families: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help=f"Families of inputs, of {', '.join(FAMILY_NAMES)}; the first also serves the other probes.",
            show_default="all",
        ),
    ] = ",".join(FAMILY_NAMES),
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cases checked side by side.", show_default="as many as fit the device, at most 6"
        ),
    ] = None,
) -> None:
    """Put every implementation on each case through all probes against the float64 reference, without timing.

    A number beside a verdict is the worst row's error as a share of its budget; a wrong result names the probe
    that caught it. Fails if any result is wrong, any implementation failed, or nothing ran.
    """
    loaded = load_study(study)
    asked = families.split(",")
    for name in asked:
        if name not in FAMILY_NAMES:
            raise StudyError(f"--families: expected some of {', '.join(FAMILY_NAMES)}, got {name!r}")
    path = loaded.folder / CHECKS_FILE
    outcomes = check_study(loaded, device=device, families=asked, records=path, jobs=jobs, console=progress)
    _print_check(loaded, outcomes)
    console.print(f"records are in {path}", soft_wrap=True)
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"wrong", "failed"} or "ok" not in statuses:
        raise typer.Exit(1)


@app.command()
def run(
    study: StudyArgument,
    device: DeviceOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"How to time: {_methods()}. Each but the first of a device has a record file of its own.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run; measure every case.")] = False,
    repeat: Annotated[
        bool,
        typer.Option(
            "--repeat", help=f"Run what is recorded once more, into {REPEAT_FILE}: what differs from run to run."
        ),
    ] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Fail unless this implementation is ok on some case; '{OUR_NAME}' means {' and '.join(OURS)}.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check and time every implementation on each case; an interrupted run is continued.

    A repeat must be of the same problems, seeds and method as the records; the report compares the two runs.
    Fails if nothing succeeded.
    """
    loaded = load_study(study)
    required = [name for item in require or () for name in (OURS if item == OUR_NAME else (item,))]
    in_study = list(dict.fromkeys(entry.impl for entry in loaded.entries))
    for name in required:
        if name not in in_study:
            raise StudyError(f"--require: expected {OUR_NAME} or one of {', '.join(in_study)}, got {name!r}")
    summary = run_study(loaded, device=device, method=method, fresh=fresh, repeat=repeat, console=progress)
    rows = sorted(summary.rows, key=lambda row: in_study.index(row["impl"]))
    console.print(_tally((row["impl"], row["status"], row["reason"]) for row in rows))
    console.print(f"{summary.run_id} is in {summary.records}", soft_wrap=True)
    missing = [name for name in required if not summary.ok_cases(name)]
    if missing:
        _say_error(f"required, but ok on no case: {', '.join(missing)}")
    if missing or not summary.succeeded:
        raise typer.Exit(1)


@app.command()
def render(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help="The studies.", show_default=False)],
    html: Annotated[
        bool, typer.Option("--html", help="Write report.html too: one page, figures inline, tables to sort.")
    ] = False,
) -> None:
    """Draw the report of a study from its records, or one comparison of several: README.md and figures.

    A study that was tuned and not run has a report of its tuning. Needs no GPU.
    """
    from harness.render import render_study

    folders = [
        Path(study)
        if any((Path(study) / name).is_file() for name in (SELFTEST_FILE, IMPOSTORS_FILE))
        else study_folder(find_study(study))
        for study in studies
    ]
    readme = render_study(folders, page=html)
    console.print(str(readme), soft_wrap=True)


@app.command()
def export(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help="The studies.", show_default=False)],
    to: Annotated[Path, typer.Option(metavar="FILE", help="A .csv or .parquet file.", show_default=False)],
) -> None:
    """Write the records of studies as one long table, a row a sample; harness.export documents its columns.

    A study's repeat is not in it: a median over the table is that of the report.
    """
    from harness.export import export as export_records

    rows = export_records([study_folder(find_study(study)) for study in studies], to)
    console.print(f"{rows} rows are in {to}", soft_wrap=True)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A record file: what was.", show_default=False)],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A record file: what is.", show_default=False)],
    allow: Annotated[float, typer.Option(metavar="PERCENT", min=0.0, help="The slowdown that passes, in %.")] = 3.0,
) -> None:
    """Compare two record files, of two commits, library versions or GPUs: a Markdown table. Needs no GPU.

    Fails on a significant slowdown beyond --allow, or if anything stopped being ok.
    """
    from harness.compare import compare_files, markdown

    result = compare_files(old, new, allow=allow / 100)
    typer.echo(markdown(result), nl=False)
    if result.failed:
        raise typer.Exit(1)


@app.command()
def selftest(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Whose cases to take.")] = "h200-decode",
    folder: Annotated[Path, typer.Option(help="Where the trials and their report go.")] = REPORTS / "timing",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(EXPERIMENTS)}; all by default.", show_default=False),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier trials.")] = False,
) -> None:
    """Measure the harness by itself on a GPU: equal kernels, kernels slowed by a known share, timers of others.

    An interrupted run is continued. Fails if an experiment did not come to its end.
    """
    if not run_selftest(
        load_study(study),
        folder,
        experiments=only or EXPERIMENTS,
        fresh=fresh,
        say=lambda text: progress.print(text, highlight=False),
    ):
        raise typer.Exit(1)


@app.command()
def tune(
    study: StudyArgument,
    impls: Annotated[str, typer.Option(metavar="NAME,...", help="Of our implementations.")] = ",".join(OURS),
    cases: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Cases of the study.", show_default="all")
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.0, help="Begin no case after this.", show_default="none"),
    ] = None,
    device: DeviceOption = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that compile.", show_default="by the cores, where there is a GPU"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run; try everything again.")] = False,
) -> None:
    """Try our kernels' configurations on each case, and compare the best with their own choice: the regret.

    Every configuration is checked before it is timed. A tuning that was interrupted is continued; what is there is
    not tried again. Fails if nothing could be compared.
    """
    from harness.tune import told, tune_study

    names = impls.split(",")
    for name in names:
        if name not in IMPLS:
            raise StudyError(f"--impls: expected some of {', '.join(IMPLS)}, got {name!r}")
    summary = tune_study(
        load_study(study),
        impls=names,
        cases=None if cases is None else cases.split(","),
        budget_s=math.inf if budget_s is None else budget_s,
        fresh=fresh,
        device=device,
        jobs=jobs,
        console=progress,
    )
    table = _table("case", "implementation", "")
    for row in summary.tuned:
        table.add_row(row.case, row.impl, told(row))
    console.print(table)
    if summary.left:
        console.print(f"no time for: {', '.join(summary.left)}; the same command goes on with them", soft_wrap=True)
    console.print(f"{summary.run_id} is in {summary.records}", soft_wrap=True)
    if not summary.succeeded:
        raise typer.Exit(1)


@app.command()
def recommend(
    kv_lens: Annotated[
        str,
        typer.Option(
            metavar="COUNTxLENGTH,...", help="Keys of each sequence, e.g. 1x131072,31x1024.", show_default=False
        ),
    ],
    heads: Annotated[
        str, typer.Option(metavar="HEADS_Q/HEADS_KV", help="Query heads and KV heads.", show_default=False)
    ],
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPE_BYTES)}.")] = "bfloat16",
    records: Annotated[str, typer.Option(metavar="STUDY", help="Whose records to ask.")] = "h200-decode",
) -> None:
    """Say what to run for a batch, with how many splits, what to expect, and on what evidence. Needs no GPU."""
    from harness.advice import show
    from harness.recommend import recommend as advise

    show(advise(_problem(kv_lens, heads, head_dim, dtype), study_folder(find_study(records))), console)


@app.command()
def expand(study: StudyArgument) -> None:
    """Print a study with nothing left to work out: plain lengths and heads, and their source."""
    typer.echo(expand_study(load_study(study)), nl=False)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and exit.

    Args:
        arguments: in place of the process's own.

    Raises:
        SystemExit: 0 for success, 1 for a result that fails the verb, 2 for a request that cannot be met; then
            one line says what was expected and what was got.
    """
    try:
        app(arguments)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            progress.print("interrupted; the same command, without --fresh, goes on from what is recorded")
        raise
    except OSError as error:
        # A path that cannot be used is the usual one, and is named first, as everywhere else.
        _say_error(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        raise SystemExit(2) from error
    except (StudyError, RecordError, RunError, WorkerLost, ImportError) as error:
        # How a worker says that it cannot begin; a reader is not told of workers.
        _say_error(str(error).removeprefix("start: RuntimeError: "))
        raise SystemExit(2) from error
    raise SystemExit(0)


def _problem(kv_lens: str, heads: str, head_dim: int, dtype: str) -> DecodeProblem:
    """A problem from the words of a command line."""
    found = re.fullmatch(r"(\d+)/(\d+)", heads, re.ASCII)
    if found is None:
        raise StudyError(f"--heads: expected query heads over KV heads as in 32/8, got {heads!r}")
    try:
        lens = parse_lengths(kv_lens)
        problem = DecodeProblem(
            kv_lens=lens, heads_q=int(found[1]), heads_kv=int(found[2]), head_dim=head_dim, dtype=dtype
        )
    except (WorkloadError, ProblemError) as error:
        raise StudyError(str(error)) from error
    if not problem.total_kv:
        raise StudyError(f"--kv-lens: expected at least one key, got {kv_lens!r}")
    return problem


def _say_error(text: str) -> None:
    progress.print(f"error: {text}", style="red", soft_wrap=True)


def _label(entry: Entry) -> str:
    return " ".join([entry.impl, *(f"{key}={value}" for key, value in entry.tuning.items())])


def _print_check(study: Study, outcomes: Sequence[Outcome]) -> None:
    """The verdicts, case by implementation, and below them how often which, and why."""
    matrix = _table("case", *(_label(entry) for entry in study.entries))
    for case in study.cases:
        of_case = (outcome for outcome in outcomes if outcome.case == case.name)
        matrix.add_row(case.name, *map(_verdict, of_case))
    console.print(matrix)
    console.print()
    _print_reasons(outcomes)


def _print_reasons(outcomes: Sequence[Outcome]) -> None:
    console.print(_tally((_label(outcome.entry), outcome.status, outcome.reason) for outcome in outcomes))


def _verdict(outcome: Outcome) -> str:
    found = outcome.check or {}
    family, worst = found.get("family"), found.get("worst_row")
    parts = (outcome.status, family and f"({family})", None if worst is None else f"{worst:.2f}")
    return " ".join(part for part in parts if part)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _tally(rows: Iterable[tuple[str, str, str | None]]) -> Table:
    """How often each implementation came to each status, and the reasons where it is not ``ok``."""
    counts: Counter[tuple[str, str, str | None]] = Counter(rows)
    order = list(dict.fromkeys(name for name, _, _ in counts))
    table = _table("implementation", "status", "cases", "reason")
    for (name, status, reason), count in sorted(
        counts.items(), key=lambda item: (order.index(item[0][0]), STATUSES.index(item[0][1]))
    ):
        table.add_row(name, status, str(count), reason)
    return table
