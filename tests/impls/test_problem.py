"""The problem validates once, and says what is wrong where."""

from __future__ import annotations

import math
from typing import Any

import pytest

from impls.problem import DecodeProblem, ProblemError

GOOD: dict[str, Any] = {"kv_lens": (3, 0, 5), "heads_q": 8, "heads_kv": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lens": (3, 1, 2, -7)}, "kv_lens[3]: expected >= 0, got -7"),
        ({"kv_lens": (3, 1.0)}, "kv_lens[1]: expected an integer, got 1.0"),
        ({"kv_lens": (True,)}, "kv_lens[0]: expected an integer, got True"),
        ({"kv_lens": "1x8"}, "kv_lens: expected a sequence of integers, got '1x8'"),
        ({"kv_lens": 8}, "kv_lens: expected a sequence of integers, got 8"),
        (
            {"kv_lens": (2**30, 2**30)},
            "kv_lens: expected a sum <= 2147483647 (cu_seqlens_k is int32), got 2147483648",
        ),
        ({"heads_q": 7}, "heads_q: expected a multiple of heads_kv = 2, got 7"),
        ({"heads_q": 0}, "heads_q: expected an integer >= 1, got 0"),
        ({"heads_kv": -1}, "heads_kv: expected an integer >= 1, got -1"),
        ({"head_dim": 64.0}, "head_dim: expected an integer >= 1, got 64.0"),
        ({"dtype": "fp8"}, "dtype: expected one of float16, bfloat16, float32, got 'fp8'"),
        ({"scale": 0}, "scale: expected a finite number > 0 or None, got 0"),
        ({"scale": math.nan}, "scale: expected a finite number > 0 or None, got nan"),
        ({"scale": math.inf}, "scale: expected a finite number > 0 or None, got inf"),
        ({"scale": "big"}, "scale: expected a finite number > 0 or None, got 'big'"),
    ],
)
def test_bad_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        DecodeProblem(**GOOD | change)
    assert str(caught.value) == message


def test_what_follows_from_the_fields() -> None:
    problem = DecodeProblem(**GOOD)
    assert (problem.batch, problem.total_kv, problem.max_kv, problem.group) == (3, 8, 5, 4)
    assert problem.cu_seqlens == (0, 3, 3, 8)
    assert problem.kv_bytes == 2 * 8 * 2 * 64 * 2
    assert problem.softmax_scale == 64**-0.5


def test_the_batch_of_none() -> None:
    problem = DecodeProblem(**GOOD | {"kv_lens": []})
    assert (problem.batch, problem.total_kv, problem.max_kv, problem.cu_seqlens) == (0, 0, 0, (0,))


def test_the_default_scale_is_that_of_the_true_head_dim() -> None:
    assert DecodeProblem(**GOOD | {"head_dim": 80}).softmax_scale == 80**-0.5
    assert DecodeProblem(**GOOD | {"scale": 2}).softmax_scale == 2.0


@pytest.mark.parametrize("scale", [None, 0.25])
def test_json_round_trip(scale: float | None) -> None:
    problem = DecodeProblem(**GOOD, dtype="float16", scale=scale)
    assert ("scale" in problem.to_dict()) == (scale is not None)
    assert DecodeProblem.from_dict(problem.to_dict()) == problem


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD | {"heads": 4}, "problem: expected keys .*, got heads"),
        ({k: v for k, v in GOOD.items() if k != "heads_q"}, "problem: expected key heads_q, got"),
        ({}, "problem: expected key head_dim, got none"),
    ],
)
def test_unknown_and_missing_keys_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        DecodeProblem.from_dict(data)


@pytest.mark.parametrize(("heads_q", "heads_kv", "tiles"), [(32, 8, 8), (16, 1, 1), (17, 1, 2), (128, 2, 8)])
def test_a_split_launches_a_tile_for_every_16_heads_of_a_group(heads_q: int, heads_kv: int, tiles: int) -> None:
    assert DecodeProblem(kv_lens=(1,), heads_q=heads_q, heads_kv=heads_kv, head_dim=64).tiles_per_split(16) == tiles
