"""Launches of Triton kernels that go past the JIT once it has said which compiled kernel fits.

Each ``kernel[grid](...)`` binds its arguments, finds out what to specialise on and looks the compiled kernel up:
about 30 µs of host time, longer than a small batch keeps an H200 busy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Launch:
    """One kernel on one grid, with the arguments that stay; called with those that change, it launches.

    On an NVIDIA GPU, Triton compiles a kernel for the dtypes of its tensors, for whether 16 divides each address,
    and for which integers are 1, are divisible by 16 or need 64 bits. A compiled kernel is kept here under a key
    at least as fine: the device, each tensor's dtype and the low 4 bits of its address, and the numbers
    themselves. Arguments of a known key go to that compiled kernel; all others go through the JIT, which returns
    the kernel that took them.

    ``compiled[grid](...)`` is Triton's own launch of a compiled kernel, public since its tutorial on a fused
    softmax: on the current stream, with the attributes that were compiled for (warps, programmatic dependent
    launch) and whatever launch hooks are set. Settings that only the JIT reads, such as Triton's debug mode,
    count when a key is new.

    Tensors on the CPU are for the interpreter, which compiles nothing: always the ordinary call.

    Args:
        kernel: a function under ``@triton.jit``, with parameters in this order: tensors, numbers that change,
            numbers that stay, constants.
        programs: of the grid, on its first axis.
        scalars: the numbers that stay.
        constants: the ``tl.constexpr`` parameters.
        options: of the compiler and the launch, such as ``num_warps``.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        scalars: tuple[int | float, ...],
        constants: Mapping[str, object],
        options: Mapping[str, object],
    ) -> None:
        self._grid = (programs, 1, 1)
        self._jit = kernel[self._grid]
        self._scalars = scalars
        self._named = {**constants, **options}
        # A compiled kernel takes all parameters by position; what stands for a constant is passed over.
        self._rest = (*scalars, *constants.values())
        self._direct: dict[tuple[object, ...], Callable[..., object]] = {}

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple[int, ...] = ()) -> None:
        """Launch on the current stream of the current device."""
        if not tensors[0].is_cuda:
            # A GPU computes with NaN and infinities without a word; numpy has two kinds of them.
            with np.errstate(invalid="ignore"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
                self._jit(*tensors, *numbers, *self._scalars, **self._named)
            return
        key = (torch.cuda.current_device(), numbers, *[(t.data_ptr() % 16, t.dtype) for t in tensors])
        direct = self._direct.get(key)
        if direct is not None:
            direct(*tensors, *numbers, *self._rest)
            return
        compiled = self._jit(*tensors, *numbers, *self._scalars, **self._named)
        from triton.compiler import CompiledKernel  # not above: who imports Triton first chooses the interpreter

        if isinstance(compiled, CompiledKernel):
            self._direct[key] = compiled[self._grid]
