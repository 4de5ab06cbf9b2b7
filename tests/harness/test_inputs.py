"""Inputs: seeds, families, layouts, and the guards around what must not be read."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from harness.inputs import FAMILIES, LAYOUTS, guard, input_sets, isolate, make_inputs, needle_keys
from impls.problem import DecodeProblem
from impls.reference import reference

P = DecodeProblem(kv_lens=(5, 0, 130, 1), heads_q=6, heads_kv=2, head_dim=64)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_finite_seeded_and_has_a_finite_answer(family, dtype):
    problem = DecodeProblem(kv_lens=P.kv_lens, heads_q=6, heads_kv=2, head_dim=64, dtype=dtype)
    inputs, again, other = (make_inputs(problem, seed, "cpu", family=family) for seed in (3, 3, 4))
    for name in ("q", "k", "v"):
        assert getattr(inputs, name).isfinite().all(), name
        assert torch.equal(getattr(inputs, name), getattr(again, name)), name
    assert not torch.equal(inputs.v, other.v)
    ref = reference(inputs)
    assert ref.out.isfinite().all()
    assert ref.lse[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_lens", [(), (0,), (0, 0)])
def test_families_without_keys(family, kv_lens):
    problem = DecodeProblem(kv_lens=kv_lens, heads_q=2, heads_kv=1, head_dim=8)
    assert make_inputs(problem, 0, "cpu", family=family).k.shape == (0, 1, 8)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(KeyError, match=r"family: expected one of normal, needles, .*, got 'gauss'"):
        make_inputs(P, 0, "cpu", family="gauss")
    with pytest.raises(KeyError, match=r"layout: expected one of packed, .*, got 'paged'"):
        make_inputs(P, 0, "cpu", layout="paged")


def test_normal_is_zero_mean_and_unit_variance():
    problem = DecodeProblem(kv_lens=(4096,), heads_q=1, heads_kv=1, head_dim=64)
    v = make_inputs(problem, 0, "cpu").v.double()
    assert v.mean().item() == pytest.approx(0, abs=0.01)
    assert v.std().item() == pytest.approx(1, abs=0.01)


def test_input_sets_are_independent_and_start_with_the_checked_one():
    sets = input_sets(P, 7, "cpu", 3)
    assert torch.equal(sets[0].k, make_inputs(P, 7, "cpu").k)
    for a, b in combinations(sets, 2):
        for name in ("q", "k", "v"):
            assert not torch.equal(getattr(a, name), getattr(b, name))
    pointers = {getattr(s, name).data_ptr() for s in sets for name in ("q", "k", "v", "cu_seqlens_k")}
    assert len(pointers) == 12
    with pytest.raises(ValueError, match="count: expected >= 1, got 0"):
        input_sets(P, 7, "cpu", 0)


def test_needle_keys_are_the_ends_and_both_sides_of_each_edge():
    for splits in (1, 2, 3, 4, 8, 16, 64):
        edges = [1001 * s // splits for s in range(splits + 1)]
        wanted = {edge - 1 for edge in edges[1:]} | set(edges[:-1])
        assert wanted <= set(needle_keys(1001))
    assert set(needle_keys(1001, [77])) == set(needle_keys(1001)) | {
        key for s in range(78) for edge in [1001 * s // 77] for key in (edge - 1, edge) if 0 <= key < 1001
    }
    assert needle_keys(0) == []
    assert needle_keys(2) == [0, 1]


def test_a_plans_own_edges_are_needles_too():
    problem = DecodeProblem(kv_lens=(0, 1001), heads_q=1, heads_kv=1, head_dim=64)
    plain = make_inputs(problem, 0, "cpu", family="needles")
    marked = make_inputs(problem, 0, "cpu", family="needles", split_counts=[(1, 77)])
    moved = (plain.k != marked.k).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(needle_keys(1001, [77])) - set(needle_keys(1001)) <= set(moved)


@pytest.mark.parametrize("scale", [None, 1.0, 0.01])
def test_needles_take_the_weight_and_every_one_counts(scale):
    n = 4096
    problem = DecodeProblem(kv_lens=(n,), heads_q=8, heads_kv=2, head_dim=64, scale=scale)
    inputs = make_inputs(problem, 0, "cpu", family="needles")
    q = inputs.q[0].double().reshape(2, 4, 64)
    weight = (problem.softmax_scale * q @ inputs.k.double().permute(1, 2, 0)).softmax(-1)
    needles = needle_keys(n)
    assert weight[..., needles].sum(-1).min() > 0.5
    assert weight[..., needles].amin(-1).min() > 0.01 / len(needles)


@pytest.mark.parametrize("scale", [None, 1.0, 0.01])
def test_tagged_keys_weigh_something_beside_a_heavy_one(scale):
    n = 4096
    problem = DecodeProblem(kv_lens=(n,), heads_q=8, heads_kv=2, head_dim=64, scale=scale)
    inputs = make_inputs(problem, 0, "cpu", family="tagged")
    q = inputs.q[0].double().reshape(2, 4, 64)
    weight = (problem.softmax_scale * q @ inputs.k.double().permute(1, 2, 0)).softmax(-1)
    assert weight[..., 0].min() > 0.2
    assert weight[..., 0].max() < 0.9
    # Most of the rest is on keys that are each less than a five-hundredth of it.
    light = torch.where(weight < weight[..., :1] / 500, weight, 0.0).sum(-1)
    assert light.min() > 0.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_buried_scores_are_equal_and_below_a_mask_value_of_a_million(head_dim, dtype):
    problem = DecodeProblem(kv_lens=(5,), heads_q=1, heads_kv=1, head_dim=head_dim, dtype=dtype)
    inputs = make_inputs(problem, 0, "cpu", family="buried")
    scores = (inputs.k[:, 0].double() @ inputs.q[0, 0].double()) * problem.softmax_scale
    assert (scores == scores[0]).all()
    assert -2e6 <= scores[0] <= -1e6


def test_tags_tell_heads_and_sequences_apart():
    problem = DecodeProblem(kv_lens=(64, 64), heads_q=3, heads_kv=3, head_dim=64)
    means = make_inputs(problem, 0, "cpu", family="tagged").v.double().unflatten(0, (2, 64)).mean(1)
    for a, b in combinations(means.flatten(0, 1), 2):
        assert (a - b).norm() > 20


@pytest.mark.parametrize("n", [1, 2, 3, 200, 4096])
def test_exact_sums_are_small_and_exact_but_no_part_of_them_is(n):
    problem = DecodeProblem(kv_lens=(n, 7), heads_q=2, heads_kv=1, head_dim=64)
    inputs = make_inputs(problem, 0, "cpu", family="exact")
    ref = reference(inputs)
    assert ref.exact.all()
    sums = inputs.v[:n].double().sum(0)
    torch.testing.assert_close(ref.out[0], sums.expand(2, -1) / n, atol=1e-15, rtol=1e-12)
    assert sums.abs().min() >= 1
    assert sums.abs().max() <= 4
    if n >= 200:
        for part in (inputs.v[: n // 2], inputs.v[n // 3 : n], inputs.v[1:n]):
            assert part.double().sum(0).norm() > 2 * sums.norm()
    torch.testing.assert_close(ref.lse[0], torch.full((2,), math.log(n), dtype=torch.float64))


def test_sums_that_float32_cannot_hold_are_not_exact():
    problem = DecodeProblem(kv_lens=(64, 64), heads_q=1, heads_kv=1, head_dim=8, dtype="float32")
    inputs = make_inputs(problem, 0, "cpu", family="exact")
    inputs.v[:64, :, 0] = 2.0**19  # 64 of them make 2^25
    inputs.v[64, :, 1] = 0.5
    exact = reference(inputs).exact
    assert exact[0, 0].tolist() == [False, *[True] * 7]
    assert exact[1, 0].tolist() == [True, False, *[True] * 6]


def test_extreme_scores_reach_ten_thousand():
    problem = DecodeProblem(kv_lens=(512,), heads_q=2, heads_kv=1, head_dim=64, dtype="float16")
    ref = reference(make_inputs(problem, 0, "cpu", family="extreme"))
    assert ref.top.min() > 1e4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_values(layout):
    packed = make_inputs(P, 1, "cpu")
    inputs = make_inputs(P, 1, "cpu", layout=layout)
    assert torch.equal(inputs.k, packed.k)
    assert torch.equal(inputs.v, packed.v)
    assert inputs.k.is_contiguous() == (layout == "packed")


def test_guard_surrounds_both_tensors():
    inputs = make_inputs(P, 0, "cpu")
    guarded = guard(inputs, fill=math.inf, rows=3)
    for name in ("k", "v"):
        view = getattr(guarded, name)
        assert torch.equal(view, getattr(inputs, name))
        whole = view.as_strided((len(view) + 6, 2, 64), view.stride(), 0)
        assert torch.equal(whole[:3], torch.full_like(whole[:3], math.inf))
        assert torch.equal(whole[-3:], torch.full_like(whole[-3:], math.inf))


def test_isolate_leaves_one_sequence():
    inputs = make_inputs(P, 0, "cpu")
    alone = isolate(inputs, 2)
    for name in ("k", "v"):
        view = getattr(alone, name)
        assert torch.equal(bits(view[5:135]), bits(getattr(inputs, name)[5:135]))
        assert view[:5].isnan().all()
        assert view[135:].isnan().all()
    assert torch.equal(reference(alone).out[2], reference(inputs).out[2])
