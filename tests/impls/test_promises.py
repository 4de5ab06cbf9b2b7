"""What a right output does not show: that splitting changes nothing, what is stored, copied, and said."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.check import budget
from harness.inputs import LAYOUTS, make_inputs
from impls import tilelang_splitkv
from impls.catalog import OURS
from impls.contract import DecodeOutput, InputError
from impls.flashinfer import FlashInfer
from impls.reference import reference
from impls.varlen_plan import VarlenImpl
from tests.impls.cases import problem
from tests.impls.test_conformance import AVAILABLE, COMPILED, DEVICE, LOADED, fitting
from tests.impls.test_tilelang import lower


def run(name: str, inputs: Any, num_splits: int) -> DecodeOutput:
    plan = LOADED[name].plan(inputs.problem, DEVICE, {"num_splits": num_splits})
    return plan.run(inputs, plan.new_output())


@pytest.mark.parametrize("name", OURS)
def test_every_split_count_agrees_with_the_kernel_that_does_not_split(name: str) -> None:
    """One split is one kernel and no workspace; any other count may differ from it by rounding alone."""
    inputs = make_inputs(problem(1, 5, 65, 129), 7, DEVICE)
    allowed = budget(reference(inputs), inputs.problem)
    whole = run(name, inputs, 1)
    assert whole.lse is not None
    for num_splits in (3, 8):
        split = run(name, inputs, num_splits)
        assert split.lse is not None
        apart = (split.out.double() - whole.out.double()).norm(dim=-1)
        assert (apart <= 2 * allowed.row).all(), f"{num_splits} splits: {(apart / allowed.row).max():.3g} budgets"
        torch.testing.assert_close(split.lse, whole.lse, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OURS)
def test_partials_are_float32_and_as_large_as_predicted(name: str, dtype: str) -> None:
    """300 keys in 4 splits, 2 keys in 2, and a sequence that is not split and has no slot."""
    shape = problem(300, 1, 2, dtype=dtype)
    for merge in ("auto", "combine"):
        plan = LOADED[name].plan(shape, DEVICE, {"num_splits": 4, "merge": merge})
        assert plan.config["workspace_bytes"] == sum(workspace.nbytes for workspace in plan.workspaces())
    assert [workspace.dtype for workspace in plan.workspaces()] == [torch.float32, torch.float32]
    assert [tuple(workspace.shape) for workspace in plan.workspaces()] == [(6, 4, 64), (6, 4)]


@pytest.mark.parametrize("name", AVAILABLE)
def test_config_names_the_function_the_library_and_its_version(name: str) -> None:
    config = LOADED[name].plan(fitting(name, problem(70)), DEVICE).config
    for key in ("function", "library", "version"):
        assert isinstance(config[key], str), f"{key}: expected a string, got {config[key]!r}"
        assert config[key]
    if name in OURS:
        assert {"num_warps", "threads"} & set(config)


class Copies(TorchDispatchMode):
    """Collects the calls that make a tensor of new memory at least as large as K."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], nbytes: int) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._nbytes = nbytes
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known and tensor.nbytes >= self._nbytes:
                    self.found.append(str(func))
        return result


def spy(inputs: Any) -> Copies:
    return Copies((inputs.q, inputs.k, inputs.v), inputs.k.nbytes)


COPY_NOTHING = [
    # Triton's interpreter hands its kernels copies of all tensors; on a GPU there is none.
    *COMPILED,
    *(name for name in AVAILABLE if isinstance(LOADED[name], (VarlenImpl, FlashInfer))),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", COPY_NOTHING)
def test_keys_and_values_are_never_copied(name: str, layout: str) -> None:
    """A layout that a kernel cannot read is refused, not packed where a timing would pay for it or hide it."""
    inputs = make_inputs(fitting(name, problem(700, 90, heads=(8, 2))), 5, DEVICE, layout=layout)
    plan = LOADED[name].plan(inputs.problem, DEVICE)
    out = plan.new_output()
    try:
        plan.run(inputs, out)
    except InputError:
        assert layout != "packed"
        return
    with spy(inputs) as copies:
        plan.run(inputs, out)
    assert copies.found == []


def test_a_copy_would_be_seen() -> None:
    inputs = make_inputs(problem(70, heads=(8, 2)), 5, DEVICE, layout="interleaved")
    with spy(inputs) as copies:
        inputs.k.contiguous()
    assert copies.found == ["aten.clone.default"]


def test_offsets_of_queries_outputs_and_partials_are_64_bits_wide() -> None:
    """A batch of 2**31 output elements is only 4 GiB; K and V go through TMA, which takes row numbers."""
    source = lower(tilelang_splitkv, "sm_90a")
    row = 32 * 128
    for name, index in (("Q", "sequence"), ("Output", "sequence"), ("Partial", "slot")):
        lines = [line for line in source.splitlines() if re.search(rf"\({name} \+ ", line)]
        assert lines
        for line in lines:
            assert f"((int64_t){index}) * (int64_t){row}" in line, line
