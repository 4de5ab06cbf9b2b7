"""The oracle against formulas, against torch, and against its own promises."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from harness.inputs import make_inputs
from impls.contract import DecodeInputs
from impls.problem import DecodeProblem
from impls.reference import CHUNK, ROUNDING_RMS, half_subnormal, reference, unit_roundoff


def problem(*kv_lens: int, heads_q: int = 6, heads_kv: int = 2, head_dim: int = 16, **rest) -> DecodeProblem:
    return DecodeProblem(kv_lens=kv_lens, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, **rest)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_it_is_attention_head_by_head(dtype, scale):
    p = problem(5, 0, 1, 33, dtype=dtype, scale=scale)
    inputs = make_inputs(p, 0, "cpu")
    ref = reference(inputs)
    for b, start in enumerate(p.cu_seqlens[:-1]):
        rows = slice(start, start + p.kv_lens[b])
        for h in range(p.heads_q):
            scores = p.softmax_scale * inputs.k[rows, h // 3].double() @ inputs.q[b, h].double()
            torch.testing.assert_close(ref.lse[b, h], scores.logsumexp(0))
            expected = scores.softmax(0) @ inputs.v[rows, h // 3].double()
            torch.testing.assert_close(ref.out[b, h], expected)
            torch.testing.assert_close(ref.top[b, h], scores.max() if len(scores) else ref.lse[b, h])


def test_chunks_change_nothing():
    p = problem(2 * CHUNK + 1, head_dim=8)
    inputs = make_inputs(p, 0, "cpu")
    q, k, v = (t.double().transpose(0, 1)[None] for t in (inputs.q, inputs.k, inputs.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(reference(inputs).out, expected, atol=1e-13, rtol=1e-12)


def test_no_sequences_and_no_keys():
    ref = reference(make_inputs(problem(), 0, "cpu"))
    assert ref.out.shape == (0, 6, 16)
    assert ref.lse.shape == (0, 6)
    ref = reference(make_inputs(problem(0, 0), 0, "cpu"))
    assert torch.equal(ref.out, torch.zeros(2, 6, 16, dtype=torch.float64))
    assert torch.equal(ref.lse, torch.full((2, 6), -torch.inf, dtype=torch.float64))


def test_nan_stays_in_its_sequence():
    p = problem(4, 5, 6)
    inputs = make_inputs(p, 0, "cpu")
    clean = reference(inputs)
    inputs.k[4:9] = torch.nan
    inputs.v[4:9] = torch.nan
    dirty = reference(inputs)
    for b in (0, 2):
        assert torch.equal(dirty.out[b], clean.out[b])
        assert torch.equal(dirty.lse[b], clean.lse[b])
    assert dirty.out[1].isnan().all()


def test_scores_of_a_million_stay_finite():
    inputs = make_inputs(problem(100, 7), 0, "cpu", family="buried")
    ref = reference(inputs)
    assert (ref.top < -5e5).all()
    torch.testing.assert_close(ref.out[0], inputs.v[:100].double().mean(0).repeat_interleave(3, dim=0))


def test_one_roundings_rms_is_as_measured():
    values = torch.exp2(torch.rand(200_000, generator=torch.Generator().manual_seed(0)).double())
    for dtype in (torch.bfloat16, torch.float16):
        error = (values.to(dtype).double() / values - 1).square().mean().sqrt().item()
        assert error == pytest.approx(ROUNDING_RMS * unit_roundoff(dtype), rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "unit", "smallest"),
    [
        (torch.float16, 2**-11, 2**-25),
        (torch.bfloat16, 2**-8, 2**-134),
        (torch.float32, 2**-24, 2**-150),
    ],
)
def test_roundoffs(dtype, unit, smallest):
    assert unit_roundoff(dtype) == unit
    assert half_subnormal(dtype) == smallest


def test_rounding_of_p_has_the_predicted_size():
    """Round P in float64 arithmetic, so that no other error is there, and compare with ``p_rms``."""
    p = problem(300, heads_q=64, heads_kv=4, head_dim=64)
    inputs = make_inputs(p, 0, "cpu")
    ref = reference(inputs)
    q = inputs.q[0].double().reshape(4, 16, 64)
    scores = p.softmax_scale * q @ inputs.k.double().permute(1, 2, 0)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = weights.bfloat16().double() @ inputs.v.double().transpose(0, 1)
    error = (rounded / weights.sum(-1, keepdim=True)).flatten(0, 1) - ref.out[0]
    assert (error / ref.p_rms[0]).square().mean().sqrt().item() == pytest.approx(1, rel=0.1)


def test_the_only_key_has_nothing_to_round():
    ref = reference(make_inputs(problem(1, 1), 0, "cpu"))
    assert torch.equal(ref.p_rms, torch.zeros_like(ref.p_rms))
    assert ref.s_rms.max() < 1e-12  # what float64 leaves of v - out = 0


def test_float32_weights_are_not_rounded():
    ref = reference(make_inputs(problem(50, dtype="float32"), 0, "cpu"))
    assert torch.equal(ref.p_rms, torch.zeros_like(ref.p_rms))
    assert (ref.s_rms > 0).all()


def test_vanishing_float16_weights_are_a_bias():
    """One key e^20 above the others: in float16 their weights round to 0, all of them."""
    p = DecodeProblem(kv_lens=(65,), heads_q=1, heads_kv=1, head_dim=64, dtype="float16", scale=1.0)
    q, k, v = torch.zeros(1, 1, 64).half(), torch.zeros(65, 1, 64).half(), torch.ones(65, 1, 64).half()
    q[..., 0], k[0, 0, 0] = 1, 20
    k[1:, 0, 0] = torch.linspace(0, 1e-2, 64)
    ref = reference(DecodeInputs(problem=p, q=q, k=k, v=v, cu_seqlens_k=torch.tensor([0, 65]).int()))
    lost = 1 - ref.out.new_tensor(1 / (1 + sum(math.exp(x - 20) for x in k[1:, 0, 0].tolist())))
    assert (ref.bias >= 0.99 * lost).all()


def test_equal_scores_are_counted_but_not_the_largest():
    p = problem(8, heads_q=1, heads_kv=1)
    inputs = make_inputs(p, 0, "cpu", family="equal")
    assert reference(inputs).tied.item() == 0  # all are the largest
    inputs.k[5] = 3 * inputs.q[0]
    assert reference(inputs).tied.item() == pytest.approx(7 / 8)


def test_swing_sees_what_cancels_later():
    p = problem(2 * CHUNK, heads_q=1, heads_kv=1, dtype="float32")
    inputs = make_inputs(p, 0, "cpu", family="exact")
    inputs.v[:CHUNK] = 1
    inputs.v[CHUNK:] = -1
    ref = reference(inputs)
    assert torch.equal(ref.out, torch.zeros_like(ref.out))
    torch.testing.assert_close(ref.swing, torch.full_like(ref.swing, 0.5))


@pytest.mark.gpu
def test_every_device_has_the_same_answer():
    p = problem(0, 5, 2000, head_dim=64)
    cpu = make_inputs(p, 0, "cpu", family="needles")
    gpu = DecodeInputs(
        problem=p, q=cpu.q.cuda(), k=cpu.k.cuda(), v=cpu.v.cuda(), cu_seqlens_k=cpu.cu_seqlens_k.cuda()
    )
    expected, got = reference(cpu), reference(gpu)
    for field in fields(expected):
        torch.testing.assert_close(
            getattr(got, field.name).cpu(), getattr(expected, field.name), rtol=1e-6, atol=1e-12, msg=field.name
        )
