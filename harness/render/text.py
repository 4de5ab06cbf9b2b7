"""Numbers and names as a report writes them; everything here gives Markdown, or plain text for a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ABSENT = "–"
"""What stands in a cell where there is nothing to say."""


def escape(text: str) -> str:
    """``text`` on one line, with what Markdown or a table would read as markup taken literally."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(text.split()))


def code(name: str) -> str:
    """``name`` as a code span that a table can hold."""
    return f"`{name.replace('|', chr(92) + '|')}`"


def join(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def linked(text: str, anchor: str | None) -> str:
    """``text`` as a link to a measurement's line in the report's own table; plain where there is none."""
    return f"[{text}](#{anchor})" if anchor and text != ABSENT else text


def versions(env: Mapping[str, Any], libraries: Sequence[str]) -> list[str]:
    """``driver 580.1``, ``torch 2.11``, ...: the libraries that a run's environment names, and its commit."""
    parts = [f"{key} {env[key]}" for key in libraries if env.get(key)]
    if env.get("git"):
        parts.append(f"commit {str(env['git'])[:12]}{' with local changes' if env.get('dirty') else ''}")
    return parts


def environment_text(run: Mapping[str, Any], ceiling: float | None = None) -> str:
    """A run's device, what of the device's memory is known, its libraries, its commit, and its id.

    Args:
        run: its record.
        ceiling: the most that its device's memory was read at, in GB/s; None where that is not known.
    """
    env = run["env"]
    parts = [str(env.get("gpu") or env.get("cpu") or env.get("device") or "unknown device")]
    if env.get("sm_count"):
        parts.append(f"{env['sm_count']} SMs")
    if ceiling is not None:
        parts.append(f"memory read at {ceiling:,.0f} GB/s at best")
    parts += versions(env, ("driver", "torch", "triton", "tilelang"))
    return escape(", ".join(parts)) + f" (run `{run['run_id']}`)."


def host_text(env: Mapping[str, Any]) -> str:
    """The CPU of a run's machine and how many logical cores it has; empty where its environment names none."""
    if not env.get("cpu"):
        return ""
    return escape(str(env["cpu"])) + (f", {env['cpu_count']} logical cores" if env.get("cpu_count") else "")


def hosts_sentence(runs: Iterable[Mapping[str, Any]]) -> str:
    """What the host times of runs were taken on, each machine once; empty where no run names its CPU."""
    hosts = [host for host in dict.fromkeys(host_text(run["env"]) for run in runs) if host]
    return f"Host: {join(hosts)}." if hosts else ""


def cases_text(n: int) -> str:
    """``1 case``, ``2 cases``."""
    return f"{n} case" + ("s" if n != 1 else "")


def bytes_text(n_bytes: float) -> str:
    """A size in B, KB (1e3), MB or GB, to three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n_bytes >= size:
            return f"{float(f'{n_bytes / size:.3g}'):g} {unit}"
    return f"{n_bytes:g} B"


def us_text(us: float | None) -> str:
    """A time in µs, without the unit."""
    if us is None or math.isnan(us):
        return ABSENT
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def us_interval_text(low: float, high: float) -> str:
    """The ends of an interval in µs, without the unit: a digit more than a time has."""
    return " … ".join(f"{us:.3f}" if us < 10 else f"{us:.2f}" if us < 1000 else f"{us:,.1f}" for us in (low, high))


def number_text(value: float | None, digits: int) -> str:
    """``value`` to that many significant digits, in full rather than with an exponent."""
    if value is None or math.isnan(value):
        return ABSENT
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}" if value != int(value) or places == 0 else f"{value:,.0f}"


def percent_text(ratio: float) -> str:
    """By how many % a ratio differs from 1, without the unit; never ``-0.0``."""
    return f"{100 * (ratio - 1):z.1f}"


def small_text(value: float) -> str:
    """An error, with an exponent."""
    return ABSENT if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"


def interval_text(value: float, low: float, high: float, places: int = 3) -> str:
    """``value [low, high]``."""
    return ABSENT if math.isnan(value) else f"{value:.{places}f} [{low:.{places}f}, {high:.{places}f}]"


def lengths_text(batch: int, total_kv: int, max_kv: int) -> str:
    """A batch in words: ``64 × 4,096`` where all lengths are one, else how many sequences and the longest."""
    if total_kv == batch * max_kv:
        return f"{batch:,} × {max_kv:,}"
    return f"{batch:,} sequences, {total_kv:,} in all, longest {max_kv:,}"
