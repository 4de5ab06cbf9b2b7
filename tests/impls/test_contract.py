"""The one validator of inputs, tuning keys, and the catalog."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from impls.catalog import IMPLS, OURS, check_name, load
from impls.contract import DecodeImpl, DecodeInputs, InputError, check_tuning, empty_output
from tests.impls.cases import problem

PROBLEM = problem(3, 0, 5, heads=(8, 2))


def tensors() -> dict[str, Any]:
    return {
        "q": torch.zeros(3, 8, 64, dtype=torch.float16),
        "k": torch.zeros(8, 2, 64, dtype=torch.float16),
        "v": torch.zeros(8, 2, 64, dtype=torch.float16),
        "cu_seqlens_k": torch.tensor([0, 3, 3, 8], dtype=torch.int32),
    }


def seqlens(*values: int) -> Callable[[Tensor], Tensor]:
    return lambda _: torch.tensor(values, dtype=torch.int32)


def test_good_inputs_are_taken() -> None:
    inputs = DecodeInputs(PROBLEM, **tensors())
    assert inputs.device == torch.device("cpu")


def test_strided_keys_are_taken() -> None:
    fused = torch.zeros(8, 4, 64, dtype=torch.float16)
    inputs = DecodeInputs(PROBLEM, **tensors() | {"k": fused[:, :2], "v": fused[:, 2:]})
    assert inputs.k.stride() == (256, 64, 1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x.float(), "q: expected dtype torch.float16, got torch.float32"),
        ("k", lambda x: x.bfloat16(), "k: expected dtype torch.float16, got torch.bfloat16"),
        ("q", lambda x: x[0], "q: expected rank 3, got rank 2"),
        ("v", lambda x: x[None], "v: expected rank 3, got rank 4"),
        ("q", lambda x: x[:2], "q: expected shape (3, 8, 64), got (2, 8, 64)"),
        ("q", lambda x: x[:, :7], "q: expected shape (3, 8, 64), got (3, 7, 64)"),
        ("v", lambda x: x[:, :1], "v: expected shape (8, 2, 64), got (8, 1, 64)"),
        ("k", lambda x: x[..., :32], "k: expected shape (8, 2, 64), got (8, 2, 32)"),
        ("k", lambda x: x.tolist(), "k: expected a torch.Tensor, got list"),
        ("v", lambda x: x.to("meta"), "v: expected device cpu (that of q), got meta"),
        (
            "k",
            lambda x: torch.zeros(8, 64, 2, dtype=x.dtype).transpose(1, 2),
            "k: expected last dimension contiguous (stride 1), got 2",
        ),
        ("cu_seqlens_k", lambda x: x.long(), "cu_seqlens_k: expected dtype torch.int32, got torch.int64"),
        ("cu_seqlens_k", lambda x: x.to("meta"), "cu_seqlens_k: expected device cpu (that of q), got meta"),
        ("cu_seqlens_k", lambda x: x[None], "cu_seqlens_k: expected rank 1, got rank 2"),
        ("cu_seqlens_k", seqlens(0, 3, 8), "cu_seqlens_k: expected 4 values (batch + 1), got 3"),
        ("cu_seqlens_k", seqlens(1, 3, 3, 8), "cu_seqlens_k[0]: expected 0, got 1"),
        ("cu_seqlens_k", seqlens(0, 3, 2, 8), "cu_seqlens_k[2]: expected >= 3, got 2 (decreasing)"),
        ("cu_seqlens_k", seqlens(0, 3, 3, 7), "cu_seqlens_k[3]: expected 8 (rows of k), got 7"),
        ("cu_seqlens_k", seqlens(0, 4, 4, 8), "cu_seqlens_k[1]: expected 3 (from problem.kv_lens), got 4"),
    ],
)
def test_bad_inputs_are_named(name: str, change: Callable[[Any], Any], message: str) -> None:
    given = tensors()
    given[name] = change(given[name])
    with pytest.raises(InputError) as caught:
        DecodeInputs(PROBLEM, **given)
    assert str(caught.value) == message


def test_keys_that_do_not_end_with_the_lengths_are_named() -> None:
    given = tensors()
    given["k"] = given["k"][:7]
    with pytest.raises(InputError, match=r"^k: expected shape \(8, 2, 64\), got \(7, 2, 64\)$"):
        DecodeInputs(PROBLEM, **given)


def test_tuning_is_laid_over_the_defaults() -> None:
    assert check_tuning({"b": 3}, {"a": 1, "b": 2}) == {"a": 1, "b": 3}
    assert check_tuning(None, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"a": 1, "b": 2}, "tuning: expected keys among a, b, got 'c'"),
        ({}, "tuning: expected keys among none, got 'c'"),
    ],
)
def test_unknown_tuning_lists_the_known(known: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tuning({"c": 1}, known)


def test_an_empty_output_has_the_contracts_shapes() -> None:
    output = empty_output(PROBLEM, torch.device("cpu"))
    assert output.lse is not None
    assert (output.out.shape, output.out.dtype) == ((3, 8, 64), torch.float16)
    assert (output.lse.shape, output.lse.dtype) == ((3, 8), torch.float32)


def test_an_unknown_implementation_lists_the_known() -> None:
    with pytest.raises(KeyError) as caught:
        check_name("flash-attn-9")
    assert all(name in str(caught.value) for name in (*IMPLS, "flash-attn-9"))


def test_every_key_is_its_implementations_name() -> None:
    assert set(OURS) <= set(IMPLS)
    for name in (*OURS, "torch-sdpa"):
        impl = load(name)
        assert isinstance(impl, DecodeImpl)
        assert impl.name == name
