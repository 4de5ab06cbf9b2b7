"""The bound: it reads every word of K and V, in wide loads, and its times are those of the memory."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import bound
from harness.bound import CONFIGS, Config, StreamRead
from harness.cuda_timers import GraphTimer
from harness.inputs import input_sets
from impls.problem import DecodeProblem

ROOT = Path(__file__).parents[2]

NEVER = 0x5EED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_sweep_has_ten_configurations_or_more_and_each_once() -> None:
    assert len(set(CONFIGS)) == len(CONFIGS) >= 10
    assert [Config(**tuning) for tuning in StreamRead().sweep()] == list(CONFIGS)  # type: ignore[arg-type]


def test_the_read_ceiling_is_measured_over_four_gigabytes() -> None:
    assert StreamRead.ceiling_problem.kv_bytes >= 4e9


@pytest.mark.parametrize(
    ("kv_lens", "head_dim", "rule"),
    [
        ((0, 0), 64, "at least one key"),
        ((), 64, "at least one key"),
        ((3,), 1, "multiple of 4 bytes"),
        ((3,), 2, None),
    ],
)
def test_what_it_cannot_read_is_refused(kv_lens: tuple[int, ...], head_dim: int, rule: str | None) -> None:
    problem = DecodeProblem(kv_lens=kv_lens, heads_q=1, heads_kv=1, head_dim=head_dim)
    reason = StreamRead().unsupported(problem, torch.device("cpu"))
    assert (reason is None) if rule is None else (reason is not None and rule in reason)


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("words", [1, 127, 128, 129, 1024, 1025, 1500])
def test_every_word_of_both_tensors_is_read(words: int, programs: int) -> None:
    """A word that equals the sought value, among zeros, shows in the sink: so it was read, and read once."""
    for place in {0, words // 2, words - 1}:
        for which in range(2):
            kv = torch.zeros(2, words, dtype=torch.int32, device=DEVICE)
            kv[which, place] = NEVER
            sink = torch.zeros(256, dtype=torch.int32, device=DEVICE)
            bound._stream_read[(programs,)](
                kv[0], kv[1], sink, words, NEVER, STRETCH=256, BLOCK=128, EVICT="", num_warps=1
            )
            assert sink.count_nonzero() == 1, f"word {place} of tensor {which}"
            assert sink.max() == NEVER


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from harness.bound import CONFIGS, _stream_read

names = _stream_read.arg_names
types = dict.fromkeys(names, "i32") | dict.fromkeys(names[:3], "*i32")
for config in CONFIGS:
    hint = "evict_first" if config.evict_first else ""
    constants = {"STRETCH": config.stretch, "BLOCK": config.block, "EVICT": hint}
    source = ASTSource(
        fn=_stream_read,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config.warps})
    wide = sum("ld.global" in line and ".v4.b32" in line for line in kernel.asm["ptx"].splitlines())
    print(f"vectors {config.vectors} wide {wide} cubin {len(kernel.asm['cubin'])}")
"""


def test_each_configuration_compiles_for_sm_90_with_all_its_loads_wide() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"vectors (\d+) wide (\d+) cubin (\d+)", done.stdout)
    assert len(lines) == len(CONFIGS)
    for vectors, wide, cubin in lines:
        assert int(wide) == 2 * int(vectors)
        assert int(cubin) > 0


@pytest.mark.gpu
@pytest.mark.alone
def test_no_configuration_reads_faster_than_the_ceiling() -> None:
    device = torch.device("cuda", 0)
    timer, stream = GraphTimer(device), StreamRead()

    def gbps(problem: DecodeProblem) -> float:
        sets = input_sets(problem, 0, device, timer.sets(problem))
        best = 0.0
        for tuning in stream.sweep():
            lap = timer.lap(stream.plan(problem, device, tuning), sets, rotations=1)
            us = statistics.median(lap.sample() for _ in range(5))
            best = max(best, problem.kv_bytes / us / 1e3)
        return best

    ceiling = gbps(stream.ceiling_problem)
    assert ceiling > 100
    assert gbps(DecodeProblem(kv_lens=(8192,), heads_q=32, heads_kv=8, head_dim=128)) < 1.03 * ceiling
