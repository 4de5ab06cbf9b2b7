"""Where a case's lengths and heads come from: a grammar, seeded distributions, serving traces, model names.

Everything here is a pure function of its arguments (a trace also of its file), standard library only. The
distributions use nothing of :mod:`random` but ``Random(seed).random()``, whose sequence Python promises to
keep for a given integer seed; so a study's lengths are the same on every machine and in every version.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

MAX_SEQUENCES = 1 << 20
"""The most sequences that one case may ask for; a larger count is a typing error, not a batch."""


class WorkloadError(ValueError):
    """Lengths or heads that cannot be made; the message names the key, what was expected and what was got."""


@dataclass(frozen=True)
class Parameter:
    """What one key of a ``kv_lens`` table must hold: in words, and as a test."""

    expected: str
    fits: Callable[[Any], bool]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


_BATCH = Parameter(f"an integer from 1 to {MAX_SEQUENCES}", lambda v: _is_int(v) and 1 <= v <= MAX_SEQUENCES)
_SEED = Parameter("an integer >= 0", lambda v: _is_int(v) and v >= 0)
_LENGTH = Parameter("a length in tokens, an integer >= 0", lambda v: _is_int(v) and v >= 0)
_LENGTH_NOT_0 = Parameter("a length in tokens, an integer >= 1", lambda v: _is_int(v) and v >= 1)
_SHARE = Parameter("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1)
_NOT_NEGATIVE = Parameter("a number >= 0", lambda v: _is_number(v) and v >= 0)
_POSITIVE = Parameter("a number > 0", lambda v: _is_number(v) and v > 0)
_TEXT = Parameter("a string", lambda v: isinstance(v, str))


def _check_table(table: Mapping[str, object], wanted: Mapping[str, Parameter], what: str) -> None:
    """Refuse unknown, missing and ill-valued keys of a ``kv_lens`` table, by name."""
    for key in table:
        if key not in wanted:
            raise WorkloadError(f"kv_lens.{key}: expected the keys of {what}: {', '.join(wanted)}; got {key!r}")
    for key, parameter in wanted.items():
        if key not in table:
            raise WorkloadError(f"kv_lens.{key}: expected {parameter.expected}, got nothing")
        if not parameter.fits(table[key]):
            raise WorkloadError(f"kv_lens.{key}: expected {parameter.expected}, got {table[key]!r}")


# ---------------------------------------------------------------------------------------------------------
# The length grammar


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths from ``"1x131072,31x1024"``: comma-separated ``COUNTxLENGTH`` or plain ``LENGTH``.

    Args:
        text: at least one item; blanks around items are allowed.

    Returns:
        One length a sequence, in tokens, in the order written.

    Raises:
        WorkloadError: naming the item that does not fit.
    """
    runs = []
    for item in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)", item, re.ASCII)
        count = int(match[1] or 1) if match else 0
        if match is None or count < 1:
            raise WorkloadError(
                f'kv_lens: expected COUNTxLENGTH or LENGTH, separated by commas, as in "1x131072,31x1024", '
                f"got {item!r} in {text!r}"
            )
        runs.append((count, int(match[2])))
    if (total := sum(count for count, _ in runs)) > MAX_SEQUENCES:
        raise WorkloadError(f"kv_lens: expected at most {MAX_SEQUENCES} sequences, got {total} in {text!r}")
    return tuple(length for count, length in runs for _ in range(count))


# ---------------------------------------------------------------------------------------------------------
# Seeded distributions


def _constant(u: Random, batch: int, *, length: int) -> Iterable[int]:
    """Every sequence has ``length`` keys."""
    return [length] * batch


def _uniform(u: Random, batch: int, *, low: int, high: int) -> Iterable[int]:
    """Every integer from ``low`` to ``high``, both included, is equally likely."""
    return (low + int(u.random() * (high - low + 1)) for _ in range(batch))


def _longtail(u: Random, batch: int, *, low: int, high: int, alpha: float) -> Iterable[int]:
    """A Pareto law of shape ``alpha``, truncated to ``low .. high``: many short sequences, a few long ones.

    Inverse of the truncated distribution function, ``low * (1 - u * (1 - (low / high) ** alpha)) ** (-1 / alpha)``.
    """
    cut = 1 - (low / high) ** alpha
    return (min(high, int(low * (1 - u.random() * cut) ** (-1 / alpha))) for _ in range(batch))


def _bimodal(u: Random, batch: int, *, low: int, high: int, share_high: float) -> Iterable[int]:
    """Short and long requests mixed: around ``high`` with probability ``share_high``, else around ``low``.

    "Around" is uniform within a tenth of the mode to either side.
    """
    for _ in range(batch):
        mode = high if u.random() < share_high else low
        yield round(mode * (0.9 + 0.2 * u.random()))


def _skew(u: Random, batch: int, *, low: int, high: int) -> Iterable[int]:
    """One sequence of ``high`` keys, at a drawn place among ``batch - 1`` sequences of ``low`` keys."""
    place = int(u.random() * batch)
    return (high if i == place else low for i in range(batch))


DISTRIBUTIONS: Mapping[str, tuple[Callable[..., Iterable[int]], Mapping[str, Parameter]]] = {
    "constant": (_constant, {"length": _LENGTH}),
    "uniform": (_uniform, {"low": _LENGTH, "high": _LENGTH}),
    "longtail": (_longtail, {"low": _LENGTH_NOT_0, "high": _LENGTH_NOT_0, "alpha": _POSITIVE}),
    "bimodal": (_bimodal, {"low": _LENGTH, "high": _LENGTH, "share_high": _SHARE}),
    "skew": (_skew, {"low": _LENGTH, "high": _LENGTH}),
}
"""Name -> the function that draws, and its parameters besides ``batch`` and ``seed``; all are required."""


def draw_lengths(name: object, parameters: Mapping[str, Any]) -> tuple[int, ...]:
    """Lengths drawn from one of :data:`DISTRIBUTIONS`, the same for the same arguments everywhere.

    Args:
        name: ``constant``, ``uniform``, ``longtail``, ``bimodal`` or ``skew``.
        parameters: ``batch`` (sequences to draw), ``seed``, and those that :data:`DISTRIBUTIONS` lists for
            ``name``; lengths in tokens.

    Returns:
        ``batch`` lengths in tokens.

    Raises:
        WorkloadError: naming the parameter that is unknown, missing or out of range.
    """
    if not isinstance(name, str) or name not in DISTRIBUTIONS:
        raise WorkloadError(f"kv_lens.distribution: expected one of {', '.join(DISTRIBUTIONS)}, got {name!r}")
    draw, own = DISTRIBUTIONS[name]
    _check_table(parameters, {"batch": _BATCH, **own, "seed": _SEED}, f"a {name} distribution")
    low, high = parameters.get("low", 0), parameters.get("high", math.inf)
    if low > high:
        raise WorkloadError(f"kv_lens.low: expected at most high = {high}, got {low}")
    shape = {key: parameters[key] for key in own}
    return tuple(draw(Random(parameters["seed"]), parameters["batch"], **shape))


# ---------------------------------------------------------------------------------------------------------
# Serving traces

TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns of a trace, those of the Azure LLM inference traces (github.com/Azure/AzurePublicDataset)."""

_TRACE: Mapping[str, Parameter] = {"trace": _TEXT, "at_s": _NOT_NEGATIVE, "ms_per_token": _POSITIVE}


def trace_snapshot(path: Path, *, at_s: float, ms_per_token: float) -> tuple[int, ...]:
    """The batch that a server following a request trace decodes at one moment.

    Time counts from the first row. A request that arrives at ``a`` (its prompt taken as read at once) and
    generates ``g`` tokens is in flight at ``t`` if ``a <= t < a + g * ms_per_token / 1000``, and then holds
    ``ContextTokens + floor((t - a) * 1000 / ms_per_token)`` keys.

    Args:
        path: CSV with the columns :data:`TRACE_COLUMNS`; ``TIMESTAMP`` is ISO 8601 with up to nine decimals.
        at_s: the moment, in seconds after the first row, at least 0.
        ms_per_token: decode time of one token, in milliseconds, above 0.

    Returns:
        Lengths in tokens, in the order of the trace.

    Raises:
        WorkloadError: naming the parameter or the line of the file at fault, or when nothing is in flight.
    """
    _check_table({"trace": path.name, "at_s": at_s, "ms_per_token": ms_per_token}, _TRACE, "a trace")
    # Exact arithmetic: a request on the edge must not depend on how a sum of seconds happens to round.
    # str() gives the decimal number that was written, not the binary one next to it.
    at_ns = Fraction(str(at_s)) * 10**9
    token_ns = Fraction(str(ms_per_token)) * 10**6
    lens = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if missing := [column for column in TRACE_COLUMNS if column not in (rows.fieldnames or ())]:
                raise WorkloadError(
                    f"kv_lens.trace: {path}: expected the columns {', '.join(TRACE_COLUMNS)}, "
                    f"got no {', '.join(missing)}"
                )
            start: int | None = None
            for row in rows:
                arrival, context, generated = _trace_row(row, f"kv_lens.trace: {path}, line {rows.line_num}")
                start = arrival if start is None else start
                age_ns = at_ns - (arrival - start)
                if 0 <= age_ns < generated * token_ns:
                    lens.append(context + math.floor(age_ns / token_ns))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"kv_lens.trace: expected a readable CSV file, got {path} ({error})") from error
    if not lens:
        raise WorkloadError(f"kv_lens.at_s: expected a moment with requests in flight, got {at_s} s of {path}")
    return tuple(lens)


def _trace_row(row: Mapping[str, str | None], where: str) -> tuple[int, int, int]:
    """Arrival in nanoseconds, context tokens and generated tokens of one row."""
    text, *counts = (row[column] or "" for column in TRACE_COLUMNS)
    whole, _, decimals = text.partition(".")
    try:
        # datetime ends at microseconds; the traces have seven decimals.
        seconds = (datetime.fromisoformat(whole) - datetime(1970, 1, 1)) // timedelta(seconds=1)
        arrival = seconds * 10**9 + int(decimals.ljust(9, "0")[:9])
    except (ValueError, TypeError) as error:
        raise WorkloadError(
            f"{where}: TIMESTAMP: expected a time as in 2023-11-16 18:17:03.9799600, got {text!r}"
        ) from error
    for column, count in zip(TRACE_COLUMNS[1:], counts, strict=True):
        if not re.fullmatch(r"\d+", count, re.ASCII):
            raise WorkloadError(f"{where}: {column}: expected an integer >= 0, got {count!r}")
    return arrival, int(counts[0]), int(counts[1])


# ---------------------------------------------------------------------------------------------------------
# One table for every form of kv_lens


def make_lengths(value: object, *, seed: int, folder: Path) -> tuple[tuple[int, ...], str | None]:
    """Lengths from any form that a study file may give them in.

    Args:
        value: a list of integers; a string of the length grammar; a table
            ``{distribution = "longtail", batch = 64, low = 512, high = 32768, alpha = 1.1}`` with an optional
            ``seed``; or a table ``{trace = "conv.csv", at_s = 600, ms_per_token = 40}``.
        seed: of a distribution that states none.
        folder: what a relative trace path is relative to.

    Returns:
        The lengths in tokens, and where they came from in words; None where they were written out. The
        entries of a list are not looked at: that is the problem's business.

    Raises:
        WorkloadError: naming the key at fault.
    """
    if isinstance(value, list):
        return tuple(value), None
    if isinstance(value, str):
        return parse_lengths(value), None
    if not isinstance(value, dict) or ("distribution" in value) == ("trace" in value):
        raise WorkloadError(
            'kv_lens: expected a list of lengths, a string as "1x131072,31x1024", or a table with either '
            f'"distribution" or "trace", got {value!r}'
        )
    if "trace" in value:
        _check_table(value, _TRACE, "a trace")
        path = folder / value["trace"]
        lens = trace_snapshot(path, at_s=value["at_s"], ms_per_token=value["ms_per_token"])
        return lens, f"{path.name} at {value['at_s']} s, {value['ms_per_token']} ms per token"
    parameters: dict[str, Any] = {"seed": seed} | value
    name = parameters.pop("distribution")
    lens = draw_lengths(name, parameters)
    return lens, f"{name} distribution, {', '.join(f'{key} {item}' for key, item in parameters.items())}"


# ---------------------------------------------------------------------------------------------------------
# Models


@dataclass(frozen=True)
class ModelHeads:
    """The attention heads of one model.

    Args:
        heads_q: query heads.
        heads_kv: key/value heads.
        head_dim: elements per head.
        source: the publication that states them.
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    source: str


_LLAMA_3 = "The Llama 3 Herd of Models, arXiv:2407.21783, table 3"
_QWEN_25 = "Qwen2.5 Technical Report, arXiv:2412.15115, table 1"
_GEMMA_2 = "Gemma 2, arXiv:2408.00118, table 1"

MODELS: Mapping[str, ModelHeads] = {
    "Llama-2-7B": ModelHeads(32, 32, 128, "Llama 2, arXiv:2307.09288; meta-llama/Llama-2-7b-hf, config.json"),
    "Llama-3.1-8B": ModelHeads(32, 8, 128, _LLAMA_3),
    "Llama-3.1-70B": ModelHeads(64, 8, 128, _LLAMA_3),
    "Llama-3.1-405B": ModelHeads(128, 8, 128, _LLAMA_3),
    "Llama-3.2-1B": ModelHeads(32, 8, 64, "meta-llama/Llama-3.2-1B, config.json"),
    "Llama-3.2-3B": ModelHeads(24, 8, 128, "meta-llama/Llama-3.2-3B, config.json"),
    "Qwen2.5-0.5B": ModelHeads(14, 2, 64, _QWEN_25),
    "Qwen2.5-7B": ModelHeads(28, 4, 128, _QWEN_25),
    "Qwen2.5-72B": ModelHeads(64, 8, 128, _QWEN_25),
    "Mistral-7B": ModelHeads(32, 8, 128, "Mistral 7B, arXiv:2310.06825, table 1"),
    "Gemma-2-9B": ModelHeads(16, 8, 256, _GEMMA_2),
    "Gemma-2-27B": ModelHeads(32, 16, 128, _GEMMA_2),
    "Phi-3-mini": ModelHeads(32, 32, 96, "Phi-3, arXiv:2404.14219; microsoft/Phi-3-mini-4k-instruct, config.json"),
}
"""Model name -> its heads. Heads only: a model's own score scale or soft cap is not part of the problem."""


def model_heads(name: object, tp: object = 1) -> tuple[int, int, int]:
    """The heads that one GPU of a tensor-parallel group holds.

    Query heads are divided over the group. KV heads are divided too, and replicated once there are more GPUs
    than KV heads, as serving engines do.

    Args:
        name: a key of :data:`MODELS`.
        tp: GPUs of the tensor-parallel group.

    Returns:
        ``(heads_q, heads_kv, head_dim)`` of one GPU.

    Raises:
        WorkloadError: for an unknown model or a degree that does not divide its heads, listing what would do.
    """
    if not isinstance(name, str) or name not in MODELS:
        raise WorkloadError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    model = MODELS[name]
    degrees = [
        n
        for n in range(1, model.heads_q + 1)
        if model.heads_q % n == 0 and (model.heads_kv % n == 0 or n % model.heads_kv == 0)
    ]
    if not isinstance(tp, int) or isinstance(tp, bool) or tp not in degrees:
        raise WorkloadError(
            f"tp: expected a degree that divides the heads of {name} ({model.heads_q} query, {model.heads_kv} KV), "
            f"one of {', '.join(map(str, degrees))}, got {tp!r}"
        )
    return model.heads_q // tp, max(1, model.heads_kv // tp), model.head_dim
