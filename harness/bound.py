"""The bound: a Triton kernel that reads a problem's K and V and does nothing else.

No kernel can be faster than reading its input, so this is what every implementation's time is held
against. How fast it reads depends on the size of the problem: a few MB are over before all SMs are under
way, and one GB is limited by DRAM alone. So it is not one kernel but a sweep, :data:`CONFIGS`, and the
bound of a case is the fastest of it on that case's bytes, timed like any implementation.

The loads are kept by folding all words into one value per lane with exclusive or, and storing the lanes
that equal a value chosen at launch. That never has to happen, and the compiler cannot know.

It is timed on CUDA alone; on a CPU Triton's interpreter runs it, for its tests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from impls.contract import DecodeInputs, DecodeOutput, Scalar
from impls.problem import DecodeProblem

# Triton decides between compiler and interpreter when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import triton
import triton.language as tl

WORD_BYTES = 4
"""The kernel reads 32-bit words, whatever the dtype."""


@dataclass(frozen=True)
class Config:
    """One way to read.

    Args:
        vectors: 16-byte loads that each thread has in flight from each of K and V.
        warps: warps of a program.
        programs_per_sm: programs of the grid per SM, each striding through the tensors; 0 starts one
            program for each stretch instead.
        evict_first: whether lines are marked as not worth keeping in the L2.
    """

    vectors: int
    warps: int
    programs_per_sm: int
    evict_first: bool

    @property
    def block(self) -> int:
        """Words of one tensor that the threads of a program fetch with one 16-byte load each."""
        return self.warps * 32 * (16 // WORD_BYTES)

    @property
    def stretch(self) -> int:
        """Words of one tensor that a program has in flight at once."""
        return self.vectors * self.block


CONFIGS = (
    # One program a stretch: nothing to loop over, best where all stretches run at once.
    Config(vectors=1, warps=4, programs_per_sm=0, evict_first=False),
    Config(vectors=2, warps=4, programs_per_sm=0, evict_first=False),
    Config(vectors=4, warps=4, programs_per_sm=0, evict_first=False),
    Config(vectors=8, warps=4, programs_per_sm=0, evict_first=False),
    Config(vectors=2, warps=4, programs_per_sm=0, evict_first=True),
    Config(vectors=4, warps=4, programs_per_sm=0, evict_first=True),
    Config(vectors=1, warps=8, programs_per_sm=0, evict_first=False),
    Config(vectors=2, warps=8, programs_per_sm=0, evict_first=False),
    Config(vectors=4, warps=8, programs_per_sm=0, evict_first=True),
    # Persistent programs: no start-up cost per stretch, best where there is much to read.
    Config(vectors=2, warps=4, programs_per_sm=8, evict_first=True),
    Config(vectors=4, warps=4, programs_per_sm=4, evict_first=True),
    Config(vectors=4, warps=4, programs_per_sm=8, evict_first=False),
    Config(vectors=4, warps=8, programs_per_sm=2, evict_first=True),
    Config(vectors=4, warps=8, programs_per_sm=4, evict_first=True),
    Config(vectors=8, warps=4, programs_per_sm=4, evict_first=True),
    Config(vectors=8, warps=8, programs_per_sm=2, evict_first=True),
    Config(vectors=2, warps=16, programs_per_sm=2, evict_first=True),
    Config(vectors=4, warps=16, programs_per_sm=1, evict_first=True),
)
"""The sweep."""


@triton.jit(do_not_specialize=["words", "never"])
def _stream_read(
    k_ptr, v_ptr, sink_ptr, words, never, STRETCH: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    offs = tl.arange(0, STRETCH)
    acc = tl.zeros([STRETCH], tl.int32)

    # Whole stretches: no masks, so that each load is one of 16 bytes. Both tiles are asked for before either
    # is used, so that all their loads are in flight at once.
    stretches = words // STRETCH
    for stretch in range(pid, stretches, programs):
        first = tl.cast(stretch, tl.int64) * STRETCH
        k = tl.load(k_ptr + first + offs, eviction_policy=EVICT)
        v = tl.load(v_ptr + first + offs, eviction_policy=EVICT)
        acc ^= k ^ v
    tl.store(sink_ptr + offs, acc, mask=acc == never)

    # What is left, less than a stretch, block by block.
    offs = tl.arange(0, BLOCK)
    for block in range(stretches * (STRETCH // BLOCK) + pid, tl.cdiv(words, BLOCK), programs):
        rest = tl.cast(block, tl.int64) * BLOCK + offs
        k = tl.load(k_ptr + rest, mask=rest < words, other=0)
        v = tl.load(v_ptr + rest, mask=rest < words, other=0)
        tl.store(sink_ptr + offs, k ^ v, mask=(k ^ v) == never)


class StreamReadPlan:
    """Reads the K and V of inputs; there is no output."""

    def __init__(self, problem: DecodeProblem, device: torch.device, config: Config) -> None:
        words = problem.kv_bytes // 2 // WORD_BYTES
        stretches = -(-words // config.stretch)
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = min(config.programs_per_sm * sm_count, stretches) or stretches
        self._words = words
        self._config = config
        self._sink = torch.zeros(config.stretch, dtype=torch.int32, device=device)

    @property
    def config(self) -> Mapping[str, Scalar]:
        """The sweep's winner as numbers, and the grid."""
        return {
            **asdict(self._config),
            "programs": self._programs,
            "library": "triton",
            "version": triton.__version__,
        }

    def new_output(self) -> None:
        """There is none."""

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """There are none."""
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Launch; returns q itself as a stand-in for an output."""
        config = self._config
        _stream_read[(self._programs,)](
            inputs.k.view(torch.int32),
            inputs.v.view(torch.int32),
            self._sink,
            self._words,
            0x5EED,
            STRETCH=config.stretch,
            BLOCK=config.block,
            EVICT="evict_first" if config.evict_first else "",
            num_warps=config.warps,
        )
        return DecodeOutput(out=inputs.q, lse=None)


class StreamRead:
    """The bound in the shape of an implementation, with a sweep to choose from."""

    name = "stream-read"

    ceiling_problem = DecodeProblem(kv_lens=(2**20,), heads_q=8, heads_kv=8, head_dim=128)
    """What the device's read ceiling is measured on: 4 GiB of K and V."""

    def sweep(self) -> tuple[Mapping[str, Scalar], ...]:
        """The tunings that :meth:`plan` takes."""
        return tuple(asdict(config) for config in CONFIGS)

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """Refuse a problem that has nothing to read, or rows that are no whole words."""
        if problem.kv_bytes == 0:
            return "kv_lens: expected at least one key, got none: there is nothing to read"
        if (row := problem.heads_kv * problem.head_dim * problem.element_bytes) % WORD_BYTES:
            return f"K and V: expected rows of a multiple of {WORD_BYTES} bytes, got {row}"
        return None

    def plan(self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar]) -> StreamReadPlan:
        """A plan for one configuration of the sweep."""
        return StreamReadPlan(problem, device, Config(**tuning))  # type: ignore[arg-type]
