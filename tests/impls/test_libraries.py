"""The adapters of the baselines, against stand-ins for the libraries: what they pass on, correct and state."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.inputs import make_inputs
from impls import flash_attn, libraries
from impls.contract import DecodeInputs, ImplUnavailable
from impls.flash_attn import FlashAttn2, FlashAttn3, splits_of_flash_attn_2
from impls.problem import DecodeProblem
from impls.torch_attention import TorchSdpa, TorchVarlen
from impls.varlen_plan import VarlenImpl
from tests.impls.cases import problem

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class Library:
    """Stands in for a varlen function: remembers its arguments, returns zeros and an LSE of +inf."""

    def __init__(self, extra: int) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.extra = extra

    def __call__(self, q: Tensor, *args: Any, **options: Any) -> tuple[Any, ...]:
        self.calls.append(((q, *args), options))
        lse = torch.full((q.shape[1], q.shape[0]), math.inf)
        return (torch.zeros_like(q), lse, *[None] * self.extra)


@pytest.fixture
def fa2(monkeypatch: pytest.MonkeyPatch) -> tuple[FlashAttn2, Library]:
    library = Library(extra=1)
    fake = SimpleNamespace(flash_attn_varlen_func=library, __version__="2.8.3")
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    monkeypatch.setattr(flash_attn, "sm_count", lambda device: 132)
    return FlashAttn2(), library


def install_fa3(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> FlashAttn3:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_varlen_func=function))
    monkeypatch.setattr(libraries, "packages_distributions", lambda: {"flash_attn_interface": ["flash-attn-3"]})
    monkeypatch.setattr(libraries, "version", lambda name: "3.0.0")
    return FlashAttn3()


def test_flash_attn_2_gets_one_query_token_a_sequence(fa2: tuple[FlashAttn2, Library]) -> None:
    impl, library = fa2
    inputs = make_inputs(problem(3, 5, heads=(8, 2), scale=0.25), 1, CPU)
    plan = impl.plan(inputs.problem, CPU)
    assert plan.new_output() is None
    assert plan.workspaces() == ()
    plan.run(inputs, None)
    (args, options), *_ = library.calls
    assert [arg is want for arg, want in zip(args[:3], (inputs.q, inputs.k, inputs.v), strict=True)] == [True] * 3
    assert args[3].tolist() == [0, 1, 2]
    assert args[3].dtype == torch.int32
    assert args[4] is inputs.cu_seqlens_k
    assert args[5:] == (1, 5)
    assert options == {"softmax_scale": 0.25, "return_attn_probs": True}


def test_infinity_is_corrected_for_sequences_without_keys_alone(fa2: tuple[FlashAttn2, Library]) -> None:
    impl, _ = fa2
    inputs = make_inputs(problem(3, 0, 5, 0, heads=(8, 2)), 1, CPU)
    out = impl.plan(inputs.problem, CPU).run(inputs, None)
    assert out.lse is not None
    assert out.lse.shape == (4, 8)
    assert (out.lse[[1, 3]] == -math.inf).all()
    assert (out.lse[[0, 2]] == math.inf).all()


def test_a_batch_of_none_launches_nothing(fa2: tuple[FlashAttn2, Library]) -> None:
    impl, library = fa2
    inputs = make_inputs(problem(heads=(8, 2)), 1, CPU)
    out = impl.plan(inputs.problem, CPU).run(inputs, None)
    assert out.lse is not None
    assert (out.out.shape, out.lse.shape) == ((0, 8, 64), (0, 8))
    assert library.calls == []


def test_flash_attn_2_states_what_ran_and_when_it_cannot_split(fa2: tuple[FlashAttn2, Library]) -> None:
    impl, _ = fa2
    config = impl.plan(problem(8192, heads=(32, 8), head_dim=128), CPU).config
    assert (config["function"], config["version"]) == ("flash_attn.flash_attn_varlen_func", "2.8.3")
    assert config["splits_max"] == 32
    config = impl.plan(problem(8192, heads=(32, 32), head_dim=128), CPU).config
    assert config["splits_max"] == 1
    assert "cannot split" in str(config["splits_note"])


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        (problem(4096, heads=(32, 32)), 8),  # 32 tiles: 256 of 264 CTAs
        (problem(*[4096] * 64, heads=(32, 8)), 1),  # 512 tiles fill two waves of 264
        (problem(8192, heads=(32, 8), head_dim=128), 32),  # 8 tiles, 64 blocks: 256 of 264 CTAs
        (problem(1024, heads=(32, 8), head_dim=128), 8),  # as many splits as blocks
        (problem(100, heads=(32, 8), head_dim=128), 1),  # one block
        (problem(0, heads=(32, 8)), 1),
    ],
)
def test_the_splits_of_flash_attn_2(shape: DecodeProblem, splits: int) -> None:
    assert splits_of_flash_attn_2(shape, sms=132) == splits


def test_flash_attn_3_is_asked_for_its_lse_and_its_own_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(extra=0)

    def asks(*args: Any, softmax_scale: float, num_splits: int, return_attn_probs: bool = False) -> Any:
        assert return_attn_probs
        return library(*args, softmax_scale=softmax_scale, num_splits=num_splits)

    impl = install_fa3(monkeypatch, asks)
    inputs = make_inputs(problem(3, 0, heads=(8, 2)), 1, CPU)
    plan = impl.plan(inputs.problem, CPU)
    out = plan.run(inputs, None)
    assert library.calls[0][1] == {"softmax_scale": 64**-0.5, "num_splits": 0}
    assert out.lse is not None
    assert (out.lse[1] == -math.inf).all()
    assert (plan.config["version"], plan.config["num_splits"]) == ("flash-attn-3 3.0.0", 0)
    assert plan.config["splits_note"]


def test_flash_attn_3_that_always_returns_its_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(extra=2)

    def older(*args: Any, softmax_scale: float, num_splits: int) -> Any:
        return library(*args, softmax_scale=softmax_scale, num_splits=num_splits)

    impl = install_fa3(monkeypatch, older)
    inputs = make_inputs(problem(3, heads=(8, 2)), 1, CPU)
    impl.plan(inputs.problem, CPU, {"num_splits": 4}).run(inputs, None)
    assert library.calls[0][1]["num_splits"] == 4


@pytest.mark.parametrize(("impl", "module"), [(FlashAttn2, "flash_attn"), (FlashAttn3, "flash_attn_interface")])
def test_a_missing_library_says_what_import_said(
    monkeypatch: pytest.MonkeyPatch, impl: type[VarlenImpl], module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImplUnavailable, match=f"import {module}: ModuleNotFoundError: "):
        impl()


def test_a_library_built_for_another_torch_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("undefined symbol: _ZN3c105ErrorE")

    monkeypatch.setattr(libraries, "import_module", broken)
    with pytest.raises(ImplUnavailable, match="import flash_attn: OSError: undefined symbol"):
        FlashAttn2()


@pytest.mark.parametrize(
    ("shape", "device", "rule"),
    [
        (problem(1), CPU, "device: expected cuda, got cpu"),
        (problem(1, dtype="float32"), CUDA, "dtype: expected float16 or bfloat16, got float32"),
        (problem(1, head_dim=264), CUDA, "head_dim: expected a multiple of 8 up to 256, got 264"),
        (problem(1, head_dim=68), CUDA, "head_dim: expected a multiple of 8 up to 256, got 68"),
    ],
)
def test_refusals_name_the_rule(shape: DecodeProblem, device: torch.device, rule: str) -> None:
    assert TorchVarlen().unsupported(shape, device) == rule


def test_what_a_build_lacks_is_asked_once_and_quoted(
    fa2: tuple[FlashAttn2, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    impl, _ = fa2
    asked: list[DecodeProblem] = []

    def lacking(inputs: DecodeInputs, *_: Any, **options: Any) -> None:
        raise RuntimeError("head dim 96 not built\nsecond line")

    monkeypatch.setattr(impl, "_function", lacking)
    assert impl.refusal_of_build(problem(1, head_dim=96), CPU) == "flash-attn-2: head dim 96 not built"

    def remembering(tiny: DecodeProblem, device: torch.device) -> str:
        asked.append(tiny)
        return "flash-attn-2: no"

    monkeypatch.setattr(impl, "refusal_of_build", remembering)
    assert impl.unsupported(problem(5, 70, head_dim=96), CUDA) == "flash-attn-2: no"
    assert impl.unsupported(problem(9, head_dim=96), CUDA) == "flash-attn-2: no"
    assert asked == [problem(1, head_dim=96)]


def test_a_fault_of_the_device_is_no_refusal(
    fa2: tuple[FlashAttn2, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    impl, _ = fa2

    def faulting(*_: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(impl, "_function", faulting)
    with pytest.raises(torch.OutOfMemoryError):
        impl.refusal_of_build(problem(1), CPU)


@pytest.mark.parametrize("permission", [True, False])
def test_torch_varlen_permits_grouped_heads_where_torch_asks(
    monkeypatch: pytest.MonkeyPatch, permission: bool
) -> None:
    import torch.nn.attention.varlen as varlen

    library = Library(extra=0)

    def with_option(*args: Any, scale: float, return_aux: Any, enable_gqa: bool = False) -> Any:
        return library(*args, scale=scale, enable_gqa=enable_gqa, lse=return_aux.lse)

    def without(*args: Any, scale: float, return_aux: Any) -> Any:
        return library(*args, scale=scale, lse=return_aux.lse)

    monkeypatch.setattr(varlen, "varlen_attn", with_option if permission else without)
    inputs = make_inputs(problem(3, 0, heads=(8, 2)), 1, CPU)
    out = TorchVarlen().plan(inputs.problem, CPU).run(inputs, None)
    assert out.lse is not None
    assert (out.lse[1] == -math.inf).all()
    expected = {"scale": 64**-0.5, "lse": True} | ({"enable_gqa": True} if permission else {})
    assert library.calls[0][1] == expected


def test_sdpa_has_no_lse_and_counts_its_calls(device: torch.device) -> None:
    inputs = make_inputs(problem(3, 0, 5), 1, device)
    plan = TorchSdpa().plan(inputs.problem, device)
    out = plan.run(inputs, None)
    assert out.lse is None
    assert plan.config["calls"] == 2
    assert torch.equal(out.out[1], torch.zeros_like(out.out[1]))
