import math

import pytest

from harness import cost
from impls.problem import DecodeProblem

OFFICIAL = DecodeProblem(kv_lens=(8192,), heads_q=32, heads_kv=8, head_dim=128)


def test_units_of_the_official_shape_at_20_us() -> None:
    assert cost.io_bytes(OFFICIAL) == 33_570_816
    assert cost.gbps(cost.io_bytes(OFFICIAL), 20.0) == pytest.approx(1678.5, abs=0.05)
    assert cost.tflops(cost.flops(OFFICIAL), 20.0) == pytest.approx(6.71, abs=0.005)


def test_bytes_follow_dtype_lengths_and_heads() -> None:
    problem = DecodeProblem(kv_lens=(3, 0, 5), heads_q=6, heads_kv=2, head_dim=64, dtype="float32")
    assert cost.io_bytes(problem) == 4 * (2 * 8 * 2 * 64 + 2 * 3 * 6 * 64)
    assert cost.flops(problem) == 4 * 6 * 8 * 64


def test_a_batch_of_nothing_costs_nothing() -> None:
    problem = DecodeProblem(kv_lens=(), heads_q=8, heads_kv=8, head_dim=64)
    assert (cost.io_bytes(problem), cost.flops(problem)) == (0, 0)


@pytest.mark.parametrize("us", [0.0, -1.0, math.nan, math.inf])
def test_no_rate_of_an_impossible_time(us: float) -> None:
    with pytest.raises(ValueError, match="us: expected a finite time > 0"):
        cost.gbps(1, us)
    with pytest.raises(ValueError, match="us: expected a finite time > 0"):
        cost.tflops(1, us)
