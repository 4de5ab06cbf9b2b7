"""Records: the one line of JSON that each run and each measurement leaves behind.

A record file is append-only JSON lines. Everything a report states is computed from these lines, so they
hold raw samples and what was asked, and never a ratio or a rate. The file survives a killed process: each
line is written whole and flushed to the disk, and a half-written last line is skipped by :func:`read` and
cut off by the next :func:`append`.

Schema 1 has four kinds of record:

* ``run``: the environment of one run;
* ``measurement``: one implementation, or the bound, on one case;
* ``check`` and ``trial``: one verdict of a check and one step of a tuning (or an experiment of the harness with
  itself, which has an ``experiment`` in place of a ``stage``), both on one case.

Two rows of role ``bound`` are not implementations: :data:`STREAM_READ`, the bound of one case, and
:data:`READ_CEILING`, the device's own limit, which belongs to a run and no case (``case``, ``problem`` and
``seed`` are null; its ``config["bytes"]`` is what one call reads).

Unknown keys are kept: a later version may say more, and its records must still be readable.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from impls.problem import DecodeProblem, ProblemError

SCHEMA = 1
KINDS = ("run", "measurement", "check", "trial")
STATUSES = ("ok", "wrong", "unsupported", "unavailable", "failed", "invalid")
ROLES = ("impl", "bound")

STREAM_READ = "stream-read"
"""``impl`` of the bound of a case: the same K and V bytes are read, and nothing else is done."""

READ_CEILING = "read-ceiling"
"""``impl`` of the one row a run that tells how fast the device reads memory at best."""

SELFTEST_FILE = "selftest.jsonl"
"""The trials in which the harness measures itself, in a folder of their own."""

TUNING_FILE = "tuning.jsonl"
"""The trials in which our implementations were tuned on a study's cases, beside the records of its runs."""

STAGES = ("screen", "final")
"""Of a tuning: every configuration alone, in a few samples; and the best of them in shared rounds."""

CHECKS_FILE = "checks.jsonl"
"""The checks of a study, beside the records of its runs."""

IMPOSTORS_FILE = "impostors.jsonl"
"""Wrong kernels that the check was tried on, in a folder of their own."""

FINDINGS_FILE = "findings.jsonl"
"""Name of the file, in a study's folder, with the smallest problem of each wrong answer of its check."""

REPEAT_FILE = "repeat.jsonl"
"""A second run of a study, beside its records: what differs from run to run."""

RANDOM_FILE = "random.jsonl"
"""Random problems that implementations were tried on, beside the impostors."""

Record: TypeAlias = dict[str, Any]


class RecordError(ValueError):
    """A record that breaks the schema; the message names the file and line where there is one, and the key."""


class _NotAnObject(RecordError):
    """A line that is no JSON object at all; as the last line of a file, one that a killed process left."""


class RecordWarning(UserWarning):
    """A record file that was cut short by a killed process."""


def new_run_id() -> str:
    """A run id that sorts by start time (UTC) and does not collide, e.g. ``20261130T101500Z-3fa2``."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def records_file(method: str | None = None) -> str:
    """The name of a study's record file, by how its runs were timed.

    Times of different methods are never compared, so each method has a file of its own; None means the
    method that a device has by default.
    """
    return "records.jsonl" if method is None else f"records-{method}.jsonl"


def run_record(
    run_id: str, study_name: str, env: Mapping[str, Any], *, smallest_effect: float | None = None
) -> Record:
    """The record of one run's environment; it comes before the run's other records.

    Args:
        run_id: from :func:`new_run_id`.
        study_name: the study that is run.
        env: what identifies device and software; JSON values, may be nested.
        smallest_effect: the difference of two times, as a share, that the study calls the smallest that
            matters; None leaves it to the reader.

    Raises:
        RecordError: naming the key, what was expected and what was got.
    """
    stated = {} if smallest_effect is None else {"smallest_effect": smallest_effect}
    return validate(
        {"kind": "run", "schema": SCHEMA, "run_id": run_id, "study": study_name, **stated, "env": dict(env)}
    )


def measurement_record(
    *,
    run_id: str,
    case: str | None,
    impl: str,
    role: str = "impl",
    status: str,
    reason: str | None = None,
    problem: DecodeProblem | None,
    seed: int | None,
    config: Mapping[str, Any] | None = None,
    compile_ms: float | None = None,
    plan_us: float | None = None,
    check: Mapping[str, Any] | None = None,
    timing: Mapping[str, Any] | None = None,
) -> Record:
    """The record of one implementation on one case.

    Args:
        run_id: the run it belongs to.
        case: the case's name; None for :data:`READ_CEILING` alone, and so are ``problem`` and ``seed``.
        impl: implementation id, or :data:`STREAM_READ`, :data:`READ_CEILING`.
        role: ``impl`` or ``bound``.
        status: one of :data:`STATUSES`.
        reason: why the status is not ``ok``; required then.
        problem: what was computed.
        seed: of its inputs.
        config: what the plan came to (JSON values). ``config["asked"]`` is the tuning as the study asked
            for it, where it asked for any: it tells two entries of one implementation apart.
        compile_ms: the first plan's time, in ms.
        plan_us: a later plan's time, for other lengths of the same batch size, in µs.
        check: ``rel_l2``, ``worst_row`` (error as a fraction of the row's budget), ``lse_err`` and
            ``finite``; required of an implementation that is ``ok``, ``wrong`` or ``invalid``.
        timing: ``method``, ``cache``, ``working_set_bytes``, ``calls_per_sample``, ``kernels`` and
            ``samples``, each ``{"round", "us", "throttled"}`` with µs per call or None where it was not
            finite; required for ``ok`` and ``invalid``, forbidden otherwise.

    Raises:
        RecordError: naming the key, what was expected and what was got.
    """
    return _made(
        "measurement",
        run_id=run_id,
        case=case,
        impl=impl,
        role=role,
        status=status,
        reason=reason,
        problem=problem,
        seed=seed,
        config=config or {},
        compile_ms=compile_ms,
        plan_us=plan_us,
        check=check,
        timing=timing,
    )


def check_record(
    *,
    run_id: str,
    case: str,
    impl: str,
    status: str,
    reason: str | None = None,
    problem: DecodeProblem,
    seed: int,
    config: Mapping[str, Any] | None = None,
    check: Mapping[str, Any] | None = None,
) -> Record:
    """The record of one implementation, or impostor, put through the check on one case; nothing is timed.

    Args:
        run_id: the run it belongs to.
        case: the case's name.
        impl: implementation id, or the name of an impostor.
        status: one of :data:`STATUSES`.
        reason: why the status is not ``ok``; required then.
        problem: what was computed.
        seed: of its inputs.
        config: what the plan came to.
        check: the numbers of a measurement's ``check``, and what the check found besides: ``family``, the
            probe that caught a fault, and ``probes``, the result of each.

    Raises:
        RecordError: naming the key, what was expected and what was got.
    """
    return _made(
        "check",
        run_id=run_id,
        case=case,
        impl=impl,
        status=status,
        reason=reason,
        problem=problem,
        seed=seed,
        config=config or {},
        check=check,
    )


def trial_record(
    *,
    run_id: str,
    case: str,
    impl: str,
    stage: str,
    status: str,
    reason: str | None = None,
    problem: DecodeProblem,
    seed: int,
    tuning: Mapping[str, Any],
    same_as: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    check: Mapping[str, Any] | None = None,
    timing: Mapping[str, Any] | None = None,
) -> Record:
    """The record of one configuration of an implementation, tried on one case by a tuning.

    Args:
        run_id: the run it belongs to, which has the device and the versions of the libraries.
        case: the case's name.
        impl: implementation id.
        stage: one of :data:`STAGES`.
        status: one of :data:`STATUSES`; ``unsupported`` is a configuration that was refused before it was compiled.
        reason: why the status is not ``ok``; required then.
        problem: what was computed: every field of its shape.
        seed: of its inputs.
        tuning: the configuration; empty for the implementation's own choice.
        same_as: a configuration tried before that comes to the same plan; then this one has no check and no timing.
        config: what the plan came to.
        check: as of a measurement.
        timing: as of a measurement; there for ``ok`` (without ``same_as``) and ``invalid`` alone.

    Raises:
        RecordError: naming the key, what was expected and what was got.
    """
    return _made(
        "trial",
        run_id=run_id,
        case=case,
        impl=impl,
        stage=stage,
        status=status,
        reason=reason,
        problem=problem,
        seed=seed,
        tuning=tuning,
        same_as=same_as,
        config=config or {},
        check=check,
        timing=timing,
    )


def _made(kind: str, **fields: object) -> Record:
    """A record with keys in that order, and with copies of what it is given; validated."""
    return validate({"kind": kind, "schema": SCHEMA, **{key: _plain(value) for key, value in fields.items()}})


def _plain(value: object) -> object:
    if isinstance(value, DecodeProblem):
        return value.to_dict()
    return dict(value) if isinstance(value, Mapping) else value


def series_label(record: Mapping[str, Any]) -> str:
    """What a series is called: the implementation's id, and what was asked of it, e.g. ``triton num_splits=8``."""
    asked = record["config"].get("asked") or {}
    return " ".join([record["impl"], *(f"{key}={value}" for key, value in sorted(asked.items()))])


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of an object as text, those of objects in it under dotted names; a dash for null."""
    for key, item in values.items():
        if isinstance(item, Mapping):
            yield from flatten(item, f"{prefix}{key}.")
        else:
            yield prefix + key, "–" if item is None else str(item)


def append(path: str | Path, *records: Mapping[str, Any]) -> None:
    """Add records to a file, which is made where it is missing, and wait until they are on the disk.

    Raises:
        RecordError: for a record that breaks the schema or is not strict JSON; the file is left as it was.
    """
    lines = b"".join(map(_to_line, records))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _mend_tail(file.fileno(), path)
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def largest_share(check: Mapping[str, Any]) -> float:
    """The largest share of a budget in a record's ``check``; infinite where the output is not, or there is none."""
    values = [check[key] for key in ("worst_row", "worst_element", "worst_lse") if check[key] is not None]
    return float(max(values)) if check["finite"] and values else math.inf


def read(path: str | Path) -> list[Record]:
    """All records of a file, validated, in the order in which they were written.

    A half-written last line is skipped with a :class:`RecordWarning`.

    Raises:
        FileNotFoundError: where there is no such file.
        RecordError: for any other line that is not a record, naming file, line and key.
    """
    return [record for _, record in read_numbered(path)]


def read_numbered(path: str | Path) -> list[tuple[int, Record]]:
    """The records of a file as :func:`read` gives them, each with the number of its line, from 1.

    Raises:
        FileNotFoundError: where there is no such file.
        RecordError: as for :func:`read`.
    """
    path = Path(path)
    data = path.read_bytes()
    records = []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if not line.strip():
            continue
        try:
            records.append((number, _check_schema(_parse(line))))
        except RecordError as error:
            if isinstance(error, _NotAnObject) and not line.endswith(b"\n"):
                warnings.warn(f"{path}:{number}: skipped a half-written last line", RecordWarning, stacklevel=3)
                continue
            raise RecordError(f"{path}:{number}: {error}") from error
    return records


def replace_cases(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Put re-recorded cases in the place of their old rows, all or nothing.

    Every case that ``records`` names loses its old rows of the same kind; the rows of all other cases
    stay. A run without any case left is dropped with its environment and its read ceiling.

    Args:
        path: the record file; made where it is missing.
        records: the new rows, with the ``run`` records they belong to.

    Raises:
        RecordError: for a record that breaks the schema; the file is left as it was.
    """
    path = Path(path)
    new = [validate(dict(record)) for record in records]
    replaced = {(r["kind"], r["case"]) for r in new if r.get("case") is not None}
    renewed = {(r["kind"], r["run_id"]) for r in new if r.get("case") is None}

    def stays(record: Record) -> bool:
        if record.get("case") is None:
            return (record["kind"], record["run_id"]) not in renewed
        return (record["kind"], record["case"]) not in replaced

    merged = [r for r in (read(path) if path.exists() else []) if stays(r)] + new
    live = {r["run_id"] for r in merged if r.get("case") is not None}
    lines = b"".join(_to_line(r) for r in merged if r["run_id"] in live)

    path.parent.mkdir(parents=True, exist_ok=True)
    # A plain file beside the other, and not one of tempfile's, which only its owner could read.
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with half.open("wb") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def validate(record: Record) -> Record:
    """Return ``record`` if it keeps to schema 1.

    Raises:
        RecordError: naming the key, what was expected and what was got.
    """
    _check_json("", record)
    return _check_schema(record)


def _check_schema(record: Record) -> Record:
    _key(record, "kind", lambda v: v in KINDS, f"one of {', '.join(KINDS)}")
    _key(record, "schema", lambda v: v == SCHEMA and _is_int(v), f"{SCHEMA}")
    _key(record, "run_id", _is_name, "a non-empty string")
    if record["kind"] == "run":
        _key(record, "study", _is_name, "a non-empty string")
        _key(record, "env", _is_object, "an object")
        return record
    if record["kind"] == "measurement":
        _check_measurement(record)
        return record
    for key in ("case", "impl"):
        _key(record, key, _is_name, "a non-empty string")
    if record["kind"] == "check":
        _check_status(record)
        _check_problem(record)
        _check_numbers(record)
    elif "stage" in record:
        _check_trial(record)
    return record


def _check_trial(record: Record) -> None:
    _key(record, "stage", lambda v: v in STAGES, f"one of {', '.join(STAGES)}")
    _check_status(record)
    _check_problem(record)
    _check_numbers(record)
    for key in ("tuning", "config"):
        _key(record, key, _is_object, "an object")
    _key(record, "same_as", lambda v: v is None or _is_object(v), "an object or null")
    alone = record["same_as"] is None
    if alone and record["status"] in ("ok", "invalid"):
        # What is timed was checked before.
        _key(record, "check", _is_object, f"an object, for status {record['status']}")
        _key(record, "timing", _is_object, f"an object, for status {record['status']}")
        _check_timing(record["timing"])
    else:
        why = f"status {record['status']}" if alone else "what is the same as another"
        _key(record, "timing", lambda v: v is None, f"null, for {why}")


def _check_measurement(record: Record) -> None:
    _key(record, "impl", _is_name, "a non-empty string")
    _key(record, "role", lambda v: v in ROLES, f"one of {', '.join(ROLES)}")
    _check_status(record)
    status, is_impl = record["status"], record["role"] == "impl"
    if record["impl"] == READ_CEILING:
        for key in ("case", "problem", "seed"):
            _key(record, key, lambda v: v is None, f"null, for {READ_CEILING}")
    else:
        _key(record, "case", _is_name, "a non-empty string")
        _check_problem(record)
    _key(record, "config", _is_object, "an object")
    for key in ("compile_ms", "plan_us"):
        _key(record, key, _is_time_or_none, "a number >= 0 or null")
    _check_numbers(record)
    if is_impl and status in ("ok", "wrong", "invalid"):
        _key(record, "check", _is_object, f"an object, for status {status}")
    if status in ("ok", "invalid"):
        _key(record, "timing", _is_object, f"an object, for status {status}")
        _check_timing(record["timing"])
    else:
        _key(record, "timing", lambda v: v is None, f"null, for status {status}")


def _check_status(record: Record) -> None:
    _key(record, "status", lambda v: v in STATUSES, f"one of {', '.join(STATUSES)}")
    if record["status"] == "ok":
        _key(record, "reason", lambda v: v is None, "null, for status ok")
    else:
        _key(record, "reason", _is_name, f"a non-empty string, for status {record['status']}")


def _check_problem(record: Record) -> None:
    _key(record, "seed", _is_int, "an integer")
    _key(record, "problem", _is_object, "an object")
    try:
        DecodeProblem.from_dict(record["problem"])
    except ProblemError as error:
        raise RecordError(f"problem: {error}") from error


def _check_numbers(record: Record) -> None:
    _key(record, "check", lambda v: v is None or _is_object(v), "an object or null")
    if record["check"] is not None:
        for key in ("rel_l2", "worst_row", "lse_err"):
            _key(record["check"], key, _is_number_or_none, "a number or null", "check.")
        _key(record["check"], "finite", _is_bool, "true or false", "check.")


def _check_timing(timing: Mapping[str, Any]) -> None:
    prefix = "timing."
    _key(timing, "method", _is_name, "a non-empty string", prefix)
    _key(timing, "cache", _is_name, "a non-empty string", prefix)
    _key(timing, "working_set_bytes", _is_count_or_none, "an integer >= 0 or null", prefix)
    _key(timing, "calls_per_sample", lambda v: _is_int(v) and v >= 1, "an integer >= 1", prefix)
    _key(timing, "kernels", _is_count_or_none, "an integer >= 0 or null", prefix)
    _key(timing, "samples", lambda v: isinstance(v, list), "an array", prefix)
    for i, sample in enumerate(timing["samples"]):
        prefix = f"timing.samples[{i}]"
        if not _is_object(sample):
            raise RecordError(f"{prefix}: expected an object, got {sample!r}")
        _key(sample, "round", lambda v: _is_int(v) and v >= 0, "an integer >= 0", prefix + ".")
        _key(sample, "us", _is_number_or_none, "a number or null", prefix + ".")
        _key(sample, "throttled", lambda v: v is None or _is_bool(v), "true, false or null", prefix + ".")


def _key(
    record: Mapping[str, Any], key: str, accepts: Callable[[Any], bool], expected: str, prefix: str = ""
) -> None:
    if key not in record:
        raise RecordError(f"{prefix}{key}: expected {expected}, got nothing")
    if not accepts(record[key]):
        raise RecordError(f"{prefix}{key}: expected {expected}, got {record[key]!r}")


def _check_json(where: str, value: object) -> None:
    """Refuse what strict JSON cannot say, by the path of the key; ``json.dumps`` alone would not name it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: expected a finite number (null where there is none), got {value}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordError(f"{where or 'record'}: expected keys that are strings, got {key!r}")
            _check_json(f"{where}.{key}" if where else key, item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for i, item in enumerate(value):
            _check_json(f"{where}[{i}]", item)
    elif not (value is None or isinstance(value, str | int | float)):
        raise RecordError(f"{where}: expected a JSON value, got {type(value).__name__}")


def _to_line(record: Mapping[str, Any]) -> bytes:
    checked = validate(dict(record))
    return (json.dumps(checked, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def _parse(line: bytes) -> Record:
    def refuse(constant: str) -> None:
        raise RecordError(f"expected strict JSON, got {constant}")

    try:
        record = json.loads(line, parse_constant=refuse)
    except RecordError:
        raise
    except ValueError as error:
        raise _NotAnObject(f"expected one JSON object, got {line[:60]!r}: {error}") from error
    if not _is_object(record):
        raise _NotAnObject(f"expected one JSON object, got {line[:60]!r}")
    parsed: Record = record
    return parsed


def _mend_tail(fd: int, path: Path) -> None:
    """End the file with a newline: complete a last line that is whole, cut off one that is not."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return
    start = path.read_bytes().rfind(b"\n") + 1
    try:
        _parse(os.pread(fd, size - start, start))
    except _NotAnObject:
        warnings.warn(f"{path}: cut off a half-written last line", RecordWarning, stacklevel=3)
        os.ftruncate(fd, start)
    else:
        os.write(fd, b"\n")


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number_or_none(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_time_or_none(value: Any) -> bool:
    return value is None or (_is_number_or_none(value) and value >= 0)


def _is_count_or_none(value: Any) -> bool:
    return value is None or (_is_int(value) and value >= 0)
