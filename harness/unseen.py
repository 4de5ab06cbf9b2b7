"""Problems that nobody saw when the rules were made: 60 random ones, drawn from a commit's hash.

``python -m harness.unseen --commit SHA > reports/h200-unseen/study.toml``, with the commit in which the rules of
our kernels were last changed: the problems follow from it, and could not be known before. The same commit gives the
same study everywhere: of :mod:`random` only ``Random(seed).random()`` is used, whose sequence Python promises.

:data:`RULE` is the distribution, and stands at the head of the study. Standard library only.
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from harness.study import Case, Entry, Study, expand_study
from harness.workloads import draw_lengths
from impls.catalog import OURS
from impls.problem import DecodeProblem

T = TypeVar("T")

ENTRIES = (*OURS, "flash-attn-2", "flash-attn-3")
"""Ours, and those that read packed K and V of any length with one build for all of :data:`HEADS`."""

PROBLEMS = 60

KINDS = ("uniform", "ragged", "skewed", "longtail")
"""In turn, so that there are as many of each."""

HEADS = ((32, 8), (64, 8), (28, 4), (16, 8), (8, 1), (16, 2), (40, 10), (32, 32))
HEAD_DIMS = (64, 128, 256)
DTYPES = ("float16", "bfloat16")

BATCH = (1, 256)
KEYS = (128, 131_072)
SKEW_KEYS = (16_384, 131_072)
"""Of the one long sequence of a skewed batch; the others have up to an eighth of :data:`SKEW_KEYS`'s lower end."""

ALPHAS = (0.8, 1.6)
KV_BYTES = (2 << 20, 2 << 30)

RULE = f"""
Drawn after the rules were fixed: the seed is the commit's hash. For each problem, in this order: the kind in turn
({", ".join(KINDS)}); heads_q/heads_kv from {", ".join(f"{q}/{kv}" for q, kv in HEADS)}; head_dim from
{", ".join(map(str, HEAD_DIMS))}; dtype from {", ".join(DTYPES)}; batch log-uniform from {BATCH[0]} (2 unless
uniform) to {BATCH[1]}; lengths: uniform, all the same, log-uniform from {KEYS[0]} to {KEYS[1]}; ragged, each
log-uniform from a shortest to a longest that are themselves so drawn; skewed, one of log-uniform {SKEW_KEYS[0]} to
{SKEW_KEYS[1]} at a random place among others of log-uniform {KEYS[0]} to {SKEW_KEYS[0] // 8}; longtail, a truncated
Pareto law between two such lengths with alpha uniform from {ALPHAS[0]} to {ALPHAS[1]}. A problem whose K and V are
not between {KV_BYTES[0] >> 20} MiB and {KV_BYTES[1] >> 30} GiB is drawn again, whole.
""".strip()


def draw(commit: str) -> Study:
    """The study of a commit.

    Args:
        commit: its full hash, 40 hexadecimal digits.

    Raises:
        ValueError: for anything else.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"commit: expected a full hash, 40 lower-case hexadecimal digits, got {commit!r}")
    u = Random(int(commit, 16))
    cases = []
    for number in range(PROBLEMS):
        kind = KINDS[number % len(KINDS)]
        while not KV_BYTES[0] <= (problem := _draw_problem(u, kind)).kv_bytes <= KV_BYTES[1]:
            pass
        name = f"{number:02}_{kind}_b{problem.batch}"
        cases.append(Case(name=name, problem=problem, seed=number, source=f"drawn: {kind}"))
    return Study(
        name="h200-unseen",
        title=f"{PROBLEMS} problems drawn from commit {commit}",
        cases=tuple(cases),
        entries=tuple(Entry(impl=impl, tuning={}) for impl in ENTRIES),
        path=Path("reports/h200-unseen/study.toml"),
    )


def to_toml(study: Study) -> str:
    """The study as TOML, the rule above it as comments."""
    rule = textwrap.fill(" ".join(RULE.split()), width=110)
    return textwrap.indent(rule, "# ") + "\n" + expand_study(study)


def commit_of(text: str) -> str:
    """The commit that a study was drawn from, by its title.

    Raises:
        ValueError: for a text without one.
    """
    found = re.search(r"drawn from commit ([0-9a-f]{40})", text)
    if found is None:
        raise ValueError("title: expected 'drawn from commit' and a hash, got neither")
    return found[1]


def _draw_problem(u: Random, kind: str) -> DecodeProblem:
    heads_q, heads_kv = _choice(u, HEADS)
    head_dim, dtype = _choice(u, HEAD_DIMS), _choice(u, DTYPES)
    batch = _log_uniform(u, BATCH[0] if kind == "uniform" else 2, BATCH[1])
    lens: Sequence[int]
    if kind == "uniform":
        lens = [_log_uniform(u, *KEYS)] * batch
    elif kind == "ragged":
        low, high = _two_lengths(u)
        lens = [_log_uniform(u, low, high) for _ in range(batch)]
    elif kind == "skewed":
        place, long = int(u.random() * batch), _log_uniform(u, *SKEW_KEYS)
        lens = [long if b == place else _log_uniform(u, KEYS[0], SKEW_KEYS[0] // 8) for b in range(batch)]
    else:
        low, high = _two_lengths(u)
        alpha = round(ALPHAS[0] + u.random() * (ALPHAS[1] - ALPHAS[0]), 3)
        seed = int(u.random() * 2**31)
        lens = draw_lengths("longtail", {"batch": batch, "low": low, "high": high, "alpha": alpha, "seed": seed})
    return DecodeProblem(kv_lens=tuple(lens), heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, dtype=dtype)


def _two_lengths(u: Random) -> tuple[int, int]:
    first, second = _log_uniform(u, *KEYS), _log_uniform(u, *KEYS)
    return min(first, second), max(first, second)


def _log_uniform(u: Random, low: int, high: int) -> int:
    return round(math.exp(math.log(low) + u.random() * math.log(high / low)))


def _choice(u: Random, values: Sequence[T]) -> T:
    return values[int(u.random() * len(values))]


def main() -> None:
    """Print the study of a commit."""
    parser = argparse.ArgumentParser(prog="python -m harness.unseen", description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", required=True, help="full hash of the commit that fixed the rules")
    print(to_toml(draw(parser.parse_args().commit)), end="")


if __name__ == "__main__":
    main()
