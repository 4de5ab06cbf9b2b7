"""A kernel whose slowness is known: it reads like the bound, after every program has spun for a while.

All its programs run at once, so the spin is in its time exactly once, whatever the size of the problem. The
harness is tried on it: what differences does it find?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch

# Triton by way of the bound, which decides before the import whether its kernels are interpreted.
from harness.bound import Config, StreamRead, StreamReadPlan, _stream_read, tl, triton
from impls.contract import DecodeInputs, DecodeOutput, Scalar
from impls.problem import DecodeProblem

ONE_WAVE = Config(vectors=4, warps=8, programs_per_sm=2, evict_first=True)
"""Two programs an SM, which fit it together."""


@triton.jit
def _clock():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["words", "never", "cycles"])
def _spin_and_read(
    k_ptr, v_ptr, sink_ptr, words, never, cycles, STRETCH: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr
):
    start = _clock()
    now = start
    while now - start < cycles:
        now = _clock()
    _stream_read(k_ptr, v_ptr, sink_ptr, words, never, STRETCH, BLOCK, EVICT)


class SpinningRead(StreamReadPlan):
    """Reads K and V after a spin; there is no output.

    Args:
        problem: whose K and V are read.
        device: a CUDA device.
        cycles: of the SM's clock that each program spins.
    """

    def __init__(self, problem: DecodeProblem, device: torch.device, cycles: int) -> None:
        super().__init__(problem, device, ONE_WAVE)
        self._cycles = cycles

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Launch; returns q itself as a stand-in for an output."""
        _spin_and_read[(self._programs,)](
            inputs.k.view(torch.int32),
            inputs.v.view(torch.int32),
            self._sink,
            self._words,
            0x5EED,
            self._cycles,
            STRETCH=ONE_WAVE.stretch,
            BLOCK=ONE_WAVE.block,
            EVICT="evict_first",
            num_warps=ONE_WAVE.warps,
        )
        return DecodeOutput(out=inputs.q, lse=None)


class OneWaveRead(StreamRead):
    """The bound in this one configuration, which needs no search: close enough to the best for large problems."""

    def sweep(self) -> tuple[Mapping[str, Scalar], ...]:
        """One."""
        return (asdict(ONE_WAVE),)


def cycles_per_us(device: torch.device) -> float:
    """Cycles of the SM's clock in a microsecond, measured with a spin of torch's own."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        torch.cuda._sleep(10_000_000)
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return 20_000_000 / (elapsed_ms * 1e3)
