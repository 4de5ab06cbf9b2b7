"""Launches past Triton's JIT: which arguments take a kernel that is known, and that on a GPU they may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.check import check_plan
from harness.inputs import make_inputs
from impls import triton_splitkv
from impls.contract import DecodeInputs
from impls.reference import reference
from impls.triton_launch import Launch
from impls.triton_splitkv import TritonSplitKV
from tests.impls.cases import problem
from tests.impls.test_triton import ask_compiler

triton = triton_splitkv.triton


def test_no_launch_reaches_a_kernel_that_the_jit_would_not_take() -> None:
    """Of 2000 layouts, judged by the specialisation of Triton's own binder."""
    went = ask_compiler("launches")
    assert went["wrong"] == 0
    assert went["direct"] > went["jit"] > went["specialisations"] > 100


# --- with stand-ins ---------------------------------------------------------------------------------------


@dataclass
class FakeTensor:
    """What a launch sees of a tensor."""

    address: int = 4096
    dtype: torch.dtype = torch.float16
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.address


class FakeCompiled(triton.compiler.CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that says so when it is launched."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.log.append(("direct", grid, args))


@dataclass
class FakeKernel:
    """A function under ``@triton.jit``, which returns ``result`` or else a compiled kernel."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    result: object = "compiled"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def run(*args: object, **named: object) -> object:
            self.log.append(("jit", grid, args, named))
            return FakeCompiled(self.log) if self.result == "compiled" else self.result

        return run

    def launch(self) -> Launch:
        return Launch(self, 7, (8, 0.5), {"HEAD_DIM": 64, "PDL": True}, {"num_warps": 4, "launch_pdl": True})

    def ways(self) -> list[str]:
        return [entry[0] for entry in self.log]


def fakes(*tensors: FakeTensor) -> tuple[Tensor, ...]:
    return tensors  # type: ignore[return-value]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, to be changed."""
    device = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    return device


def test_the_second_launch_goes_past_the_jit(current: list[int]) -> None:
    kernel = FakeKernel()
    launch = kernel.launch()
    first, second = (fakes(FakeTensor(at), FakeTensor(at + 512)) for at in (4096, 8192))
    launch(first, (1024, 128))
    launch(second, (1024, 128))
    named = {"HEAD_DIM": 64, "PDL": True, "num_warps": 4, "launch_pdl": True}
    assert kernel.log == [
        ("jit", (7, 1, 1), (*first, 1024, 128, 8, 0.5), named),
        ("direct", (7, 1, 1), (*second, 1024, 128, 8, 0.5, 64, True)),
    ]


@pytest.mark.parametrize(
    ("tensor", "stride", "device"),
    [
        (FakeTensor(4098), 128, 0),
        (FakeTensor(dtype=torch.float32), 128, 0),
        (FakeTensor(), 1, 0),
        (FakeTensor(), 136, 0),
        (FakeTensor(), 2**31, 0),
        (FakeTensor(), 128, 1),
    ],
    ids=["address", "dtype", "one", "no-multiple-of-16", "int64", "device"],
)
def test_another_layout_or_device_asks_the_jit(
    current: list[int], tensor: FakeTensor, stride: int, device: int
) -> None:
    kernel = FakeKernel()
    launch = kernel.launch()
    for _ in range(2):
        current[0] = 0
        launch(fakes(FakeTensor(), FakeTensor()), (128,))
        current[0] = device
        launch(fakes(FakeTensor(), tensor), (stride,))
    assert kernel.ways() == ["jit", "jit", "direct", "direct"]


def test_what_is_no_compiled_kernel_is_not_kept(current: list[int]) -> None:
    kernel = FakeKernel(result=None)
    launch = kernel.launch()
    for _ in range(3):
        launch(fakes(FakeTensor()))
    assert kernel.ways() == ["jit"] * 3


def test_tensors_on_a_cpu_are_left_to_the_interpreter() -> None:
    """Without a question to CUDA, which may not be there; and infinities are no warning, here an error."""
    kernel = FakeKernel()
    launch = kernel.launch()
    for _ in range(2):
        launch(fakes(FakeTensor(is_cuda=False)))
    assert kernel.ways() == ["jit"] * 2

    def subtract(*_: object, **__: object) -> None:
        assert np.isnan(np.float32(np.inf) - np.float32(np.inf))

    launch._jit = subtract
    launch(fakes(FakeTensor(is_cuda=False)))


# --- on a GPU ---------------------------------------------------------------------------------------------


def shifted(x: Tensor) -> Tensor:
    """The values, 2 bytes past a 16-byte boundary."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def spread(x: Tensor, gap: int) -> Tensor:
    """The values, with ``gap`` NaNs after each head."""
    return torch.cat([x, x.new_full((*x.shape[:-1], gap), torch.nan)], -1)[..., : x.shape[-1]]


def layouts(inputs: DecodeInputs) -> list[DecodeInputs]:
    """The same values at other addresses and with other strides, which Triton compiles for or not."""
    q, k, v = inputs.q, inputs.k, inputs.v
    return [
        inputs,
        replace(inputs, k=k.clone()),
        *(replace(inputs, **{name: shifted(getattr(inputs, name))}) for name in ("q", "k", "v")),
        *(replace(inputs, k=spread(k, gap), v=spread(v, 2 * gap)) for gap in (8, 64)),
        replace(inputs, q=spread(q, 3), k=shifted(k)),
    ]


def break_the_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("expected a launch past the JIT")

    for kernel in (triton_splitkv.split_kernel, triton_splitkv.combine_kernel):
        monkeypatch.setattr(kernel, "run", run)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 3])
def test_one_plan_is_right_in_any_layout(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, num_splits: int
) -> None:
    """Each layout by the JIT, then each again: past the JIT, and with nothing compiled."""
    inputs = make_inputs(problem(700, 0, 33, heads=(8, 2), head_dim=128), 5, device)
    plan = TritonSplitKV().plan(inputs.problem, device, {"num_splits": num_splits})
    ref = reference(inputs)
    for again in (False, True):
        for same in layouts(inputs):
            result = check_plan(plan, same, ref)
            assert result.ok, result.reason
        if not again:
            compiled = triton_splitkv.compiled_variants()
            break_the_jit(monkeypatch)
    assert triton_splitkv.compiled_variants() == compiled > 0


@pytest.mark.gpu
def test_launches_past_the_jit_are_on_the_current_stream(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Behind work that has yet to write the inputs: on another stream, NaN would be read."""
    inputs = make_inputs(problem(700, 33, heads=(8, 2), head_dim=128), 5, device)
    plan = TritonSplitKV().plan(inputs.problem, device, {"num_splits": 3})
    expected = plan.run(inputs, plan.new_output())
    out = plan.new_output()
    v = inputs.v.clone()
    inputs.v.fill_(torch.nan)
    torch.cuda.synchronize(device)
    break_the_jit(monkeypatch)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        inputs.v.copy_(v)
        plan.run(inputs, out)
    stream.synchronize()
    assert torch.equal(out.out, expected.out)


@pytest.mark.gpu
def test_launch_hooks_see_launches_past_the_jit(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Triton's profiler counts launches by these hooks."""
    inputs = make_inputs(problem(700, heads=(8, 2), head_dim=128), 5, device)
    plan = TritonSplitKV().plan(inputs.problem, device, {"num_splits": 3, "merge": "combine"})
    plan.run(inputs, plan.new_output())
    break_the_jit(monkeypatch)
    seen: list[str] = []

    def enter(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(enter)
    try:
        plan.run(inputs, plan.new_output())
    finally:
        hooks.remove(enter)
    assert seen == ["split_kernel", "combine_kernel"]
