"""The check lets honest kernels pass, at every length and family, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.check import budget, check_plan, compare, disagreement
from harness.inputs import FAMILIES, make_inputs
from impls.contract import DecodeInputs, DecodeOutput, empty_output
from impls.problem import DecodeProblem
from impls.reference import Reference, reference
from tests.harness.honest import honest

DTYPES = ("float16", "bfloat16", "float32")
P = DecodeProblem(kv_lens=(300, 0, 1, 64), heads_q=4, heads_kv=2, head_dim=64)


def judge(inputs: DecodeInputs, output: DecodeOutput):
    return compare(output, reference(inputs), inputs.problem)


# --- honest kernels pass --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_honest_kernels_pass_in_every_family(family, dtype):
    problem = DecodeProblem(kv_lens=(1, 0, 2, 63, 200, 1001), heads_q=6, heads_kv=2, head_dim=64, dtype=dtype)
    inputs = make_inputs(problem, 0, "cpu", family=family)
    ref = reference(inputs)
    for form in ({}, {"splits": 3, "block": 32}, {"splits": 8}, {"reverse": True, "block": 128}):
        result = compare(honest(inputs, **form), ref, problem)
        assert result.ok, (form, result.reason)
        assert result.worst_row < 0.85
        assert result.worst_lse < 0.7


@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_kernels_pass_with_margin_at_long_context(dtype):
    problem = DecodeProblem(kv_lens=(16384,), heads_q=2, heads_kv=1, head_dim=64, dtype=dtype)
    inputs = make_inputs(problem, 0, "cpu")
    ref = reference(inputs)
    for form in ({}, {"splits": 16}, {"truncate": dtype != "float32"}):
        result = compare(honest(inputs, **form), ref, problem)
        assert result.ok, (form, result.reason)
        assert result.worst_row < 0.6
        assert result.worst_lse < 0.6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_one_long_split_is_no_false_alarm(family, dtype):
    """Truncated products add up, and light keys vanish in a thread's sum: both grow with the keys of a split."""
    problem = DecodeProblem(kv_lens=(131072,), heads_q=2, heads_kv=1, head_dim=32, dtype=dtype)
    inputs = make_inputs(problem, 0, "cpu", family=family)
    ref = reference(inputs)
    for form in ({"lanes": 4}, {"lanes": 4, "reverse": True}, {"truncate": dtype != "float32"}):
        result = compare(honest(inputs, block=1024, **form), ref, problem)
        assert result.ok, (form, result.reason)


def test_light_keys_beside_a_heavy_one_are_allowed_for():
    """Each half a last place of the sum: added first, they count; added last, they are lost."""
    keys = 1 << 16
    problem = DecodeProblem(kv_lens=(keys,), heads_q=1, heads_kv=1, head_dim=16, dtype="float32", scale=1.0)
    inputs = make_inputs(problem, 0, "cpu")
    inputs.q.zero_()
    inputs.q[..., 0] = 1
    inputs.k[:, 0, 0] = math.log(2**-25) + torch.linspace(-0.5, 0.5, keys)
    for place, lost in ((0, True), (keys - 1, False)):
        there = replace(inputs, k=inputs.k.clone())
        there.k[place, 0, 0] = 0.0
        ref = reference(there)
        output = honest(there, lanes=4, block=1024)
        off = abs(float(output.lse) - float(ref.lse))
        assert (off > 1e-4) == lost
        assert compare(output, ref, problem).ok
        assert off < float(budget(ref, problem).lse) < 1e-3


@given(
    kv_lens=st.lists(st.integers(0, 300), max_size=4),
    group=st.sampled_from([1, 2, 5, 7, 8]),
    heads_kv=st.integers(1, 3),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([None, 1.0, 0.01]),
    family=st.sampled_from(list(FAMILIES)),
    splits=st.integers(1, 20),
    block=st.sampled_from([16, 32, 64, 128]),
    reverse=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_no_false_alarm(kv_lens, group, heads_kv, head_dim, dtype, scale, family, splits, block, reverse, seed):
    problem = DecodeProblem(
        kv_lens=tuple(kv_lens),
        heads_q=group * heads_kv,
        heads_kv=heads_kv,
        head_dim=head_dim,
        dtype=dtype,
        scale=scale,
    )
    inputs = make_inputs(problem, seed, "cpu", family=family)
    result = judge(inputs, honest(inputs, splits=splits, block=block, reverse=reverse))
    assert result.ok, result.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_tokens_are_no_false_alarm(dtype):
    """Equal keys with equal values err alike: nothing averages out, and the budget knows."""
    problem = DecodeProblem(kv_lens=(333,), heads_q=6, heads_kv=2, head_dim=64, dtype=dtype)
    for seed in range(5):
        inputs = make_inputs(problem, seed, "cpu")
        inputs.k[1:] = inputs.k[1:2].clone()
        inputs.k[0] = (0.9 * inputs.q[0, ::3].float()).to(inputs.k.dtype)  # one key stands out
        inputs.v[:] = inputs.v[:1].abs().clone()
        inputs.v[0] *= -0.5
        ref = reference(inputs)
        for form in ({}, {"splits": 7}, {"reverse": True, "block": 128}, {"block": 16}):
            result = compare(honest(inputs, **form), ref, problem)
            assert result.ok, result.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_sdpa_passes(dtype):
    problem = DecodeProblem(kv_lens=(777,), heads_q=4, heads_kv=2, head_dim=64, dtype=dtype)
    inputs = make_inputs(problem, 0, "cpu")
    q, k, v = (t.transpose(0, 1)[None] for t in (inputs.q, inputs.k, inputs.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
    result = judge(inputs, DecodeOutput(out=out.contiguous(), lse=None))
    assert result.ok, result.reason
    assert result.lse_err is None


# --- the budget follows the data ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_rows_budget_is_a_few_roundoffs_of_its_norm_at_every_length(dtype):
    unit = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    for n in (64, 1024, 16384):
        problem = DecodeProblem(kv_lens=(n,), heads_q=2, heads_kv=1, head_dim=64, dtype=dtype)
        ref = reference(make_inputs(problem, 0, "cpu"))
        share = budget(ref, problem).row / ref.out.norm(dim=-1)
        assert (share > 1.5 * unit).all()
        assert (share < 3.5 * unit).all()


def test_budgets_of_rows_do_not_mix():
    """A long sequence's small outputs are judged by themselves, whatever shares the batch."""
    problem = DecodeProblem(kv_lens=(2, 8192), heads_q=2, heads_kv=1, head_dim=64)
    inputs = make_inputs(problem, 0, "cpu")
    output = honest(inputs)
    output.out[1] *= 1.03
    result = judge(inputs, output)
    assert "row (sequence 1, head" in result.reason
    assert result.rel_l2 < 0.03


@pytest.mark.parametrize("n", [4096, 65536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_one_key_counts_at_any_length(n, dtype):
    """In the exact family: one key of the middle, at no edge of anything, lost in 65536."""
    problem = DecodeProblem(kv_lens=(n,), heads_q=2, heads_kv=1, head_dim=64, dtype=dtype)
    inputs = make_inputs(problem, 0, "cpu", family="exact")
    ref = reference(inputs)
    for splits in (1, 7):
        assert compare(honest(inputs, splits=splits, block=1024), ref, problem).worst_element < 0.9
    keep = torch.arange(n) != n // 3
    fewer = DecodeInputs(
        problem=replace(problem, kv_lens=(n - 1,)),
        q=inputs.q,
        k=inputs.k[keep],
        v=inputs.v[keep],
        cu_seqlens_k=torch.tensor([0, n - 1]).int(),
    )
    assert compare(honest(fewer, splits=7, block=1024), ref, problem).worst_row > 50


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_that_round_normalised_weights_pass(family, dtype):
    problem = DecodeProblem(kv_lens=(1, 2, 63, 200), heads_q=4, heads_kv=2, head_dim=64, dtype=dtype)
    inputs = make_inputs(problem, 0, "cpu", family=family)
    out = torch.zeros(4, 4, 64)
    for b, (first, keys) in enumerate(zip(problem.cu_seqlens, problem.kv_lens, strict=False)):
        q = inputs.q[b].float().reshape(2, 2, 64)
        k, v = (t[first : first + keys].float().transpose(0, 1) for t in (inputs.k, inputs.v))
        weights = (problem.softmax_scale * q @ k.mT).softmax(-1).to(inputs.q.dtype).float()
        out[b] = (weights @ v).flatten(0, 1)
    result = judge(inputs, DecodeOutput(out.to(inputs.q.dtype), None))
    assert result.ok, result.reason


def test_disagreement_is_told_in_the_terms_of_an_error():
    inputs = make_inputs(P, 0, "cpu")
    ref = reference(inputs)
    right = honest(inputs)
    other = DecodeOutput(right.out.clone(), None)
    other.out[0, 0] += 0.25
    apart = disagreement(right, other, ref, P)
    error = (other.out[0, 0].double() - right.out[0, 0].double()).norm()
    assert apart["rel_l2"] == pytest.approx((error / ref.out.norm()).item())
    assert apart["worst_row"] == pytest.approx((error / budget(ref, P).row[0, 0]).item())
    assert disagreement(right, right, ref, P) == {"rel_l2": 0.0, "worst_row": 0.0}


# --- wrong outputs fail ---------------------------------------------------------------------------------


def faulty(fault: str, inputs: DecodeInputs) -> DecodeOutput:
    """An honest kernel with one thing wrong."""
    problem = inputs.problem
    lens, start = problem.kv_lens, problem.cu_seqlens[:-1]
    keep = torch.ones(problem.total_kv, dtype=torch.bool)
    if fault == "last key dropped":
        keep[[s + n - 1 for s, n in zip(start, lens, strict=True) if n > 1]] = False
    elif fault == "first key dropped":
        keep[[s for s, n in zip(start, lens, strict=True) if n > 1]] = False
    elif fault == "one split dropped":
        for s, n in zip(start, lens, strict=True):
            keep[s + n // 2 : s + n // 2 + n // 8] = False
    if not keep.all():
        counts = tuple(int(keep[s : s + n].sum()) for s, n in zip(start, lens, strict=True))
        fewer = replace(problem, kv_lens=counts)
        return honest(
            DecodeInputs(
                problem=fewer,
                q=inputs.q,
                k=inputs.k[keep],
                v=inputs.v[keep],
                cu_seqlens_k=torch.tensor(fewer.cu_seqlens, dtype=torch.int32),
            ),
            splits=4,
        )
    if fault == "scale missing":
        return honest(replace(inputs, problem=replace(problem, scale=1.0)), splits=4)
    if fault == "heads tiled instead of interleaved":
        tiled = inputs.q.unflatten(1, (problem.group, problem.heads_kv)).transpose(1, 2).flatten(1, 2)
        right = honest(replace(inputs, q=tiled), splits=4)
        out = right.out.unflatten(1, (problem.heads_kv, problem.group)).transpose(1, 2).flatten(1, 2)
        return DecodeOutput(out=out, lse=None)
    if fault == "two values swapped":
        v = inputs.v.clone()
        v[[0, 1]] = v[[1, 0]]
        return honest(replace(inputs, v=v), splits=4)
    output = honest(inputs, splits=4)
    at = output.out.shape[0] - 1
    if fault == "zeros":
        return DecodeOutput(torch.zeros_like(output.out), None)
    if fault == "mean of V":
        inputs = replace(inputs, q=torch.zeros_like(inputs.q))
        return DecodeOutput(honest(inputs).out, None)
    if fault == "one row NaN":
        output.out[at, 1] = torch.nan
    elif fault == "one element infinite":
        output.out[at, 1, 3] = torch.inf
    elif fault == "one element off":
        output.out[at, 1, 3] += 0.1 * output.out[at, 1].float().norm() / 8
    elif fault == "sequences swapped":
        return DecodeOutput(output.out.flip(0), output.lse.flip(0))
    elif fault == "LSE in base 2":
        return DecodeOutput(output.out, output.lse / math.log(2))
    elif fault == "LSE in float16":
        return DecodeOutput(output.out, output.lse.half().float())
    elif fault == "one LSE NaN":
        output.lse[at, 0] = torch.nan
    else:
        raise AssertionError(fault)
    return output


FAULTS = {
    "zeros": "row",
    "mean of V": "row",
    "last key dropped": "row",
    "first key dropped": "row",
    "one split dropped": "row",
    "scale missing": "row",
    "heads tiled instead of interleaved": "row",
    "two values swapped": "row",
    "one row NaN": "expected finite values, got nan in 64 of 64 elements (1 of 8 rows)",
    "one element infinite": "expected finite values, got inf in 1 of 64 elements (1 of 8 rows)",
    "one element off": "x its budget (L2), element 3 ",
    "sequences swapped": "row",
    "LSE in base 2": "lse[",
    "LSE in float16": "lse[",
    "one LSE NaN": "lse[1, 0]: expected a finite value, got nan (1 of 8 values)",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [63, 4096])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_kernels_fail(fault, n, dtype):
    problem = DecodeProblem(kv_lens=(n, n + 5), heads_q=4, heads_kv=2, head_dim=64, dtype=dtype)
    inputs = make_inputs(problem, 1, "cpu", family="needles")
    assert judge(inputs, honest(inputs, splits=4)).ok
    result = judge(inputs, faulty(fault, inputs))
    assert not result.ok
    assert FAULTS[fault] in result.reason


def test_partials_of_low_precision_show_in_the_exact_family():
    problem = DecodeProblem(kv_lens=(4096,), heads_q=8, heads_kv=2, head_dim=64)
    inputs = make_inputs(problem, 0, "cpu", family="exact")
    parts = inputs.v.double().unflatten(0, (8, 512)).mean(1).bfloat16().float()  # [splits, Hkv, D]
    out = parts.mean(0).repeat_interleave(4, dim=0)[None].bfloat16()
    result = judge(inputs, DecodeOutput(out, None))
    assert not result.ok
    assert result.worst_element > 1.2


def test_empty_sequences():
    problem = DecodeProblem(kv_lens=(0, 3), heads_q=2, heads_kv=1, head_dim=64)
    inputs = make_inputs(problem, 0, "cpu")
    output = honest(inputs)
    assert judge(inputs, output).ok
    output.lse[0, 1] = torch.inf
    assert judge(inputs, output).reason == "lse[0, 1]: expected -inf (no keys), got inf (1 of 4 values)"
    output.lse[0, 1] = -torch.inf
    output.lse[1, 0] = -torch.inf
    assert judge(inputs, output).reason == "lse[1, 0]: expected a finite value, got -inf (1 of 4 values)"
    output = honest(inputs)
    output.out[0, 1, 5] = 1e-3
    assert (
        "row (sequence 0, head 1): error infx its budget (L2), element 5 infx: expected 0, got 0.000999"
        in judge(inputs, output).reason
    )
    output.out[0, 1, 5] = torch.nan
    assert "row (sequence 0, head 1): expected finite values" in judge(inputs, output).reason


def test_rows_without_an_answer_are_not_judged():
    problem = DecodeProblem(kv_lens=(3, 4), heads_q=2, heads_kv=1, head_dim=64)
    inputs = make_inputs(problem, 0, "cpu")
    output = honest(inputs)
    inputs.v[:3] = torch.nan
    output.out[0] = 7
    result = judge(inputs, output)
    assert result.ok
    assert result.rel_l2 < 0.01


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (DecodeOutput(torch.zeros(4, 4, 32).bfloat16(), None), "out: expected shape (4, 4, 64), got (4, 4, 32)"),
        (DecodeOutput(torch.zeros(4, 4, 64), None), "out: expected dtype torch.bfloat16, got torch.float32"),
        (
            DecodeOutput(torch.zeros(4, 4, 64).bfloat16(), torch.zeros(4, 4).double()),
            "lse: expected dtype torch.float32, got torch.float64",
        ),
        (
            DecodeOutput(torch.zeros(4, 4, 64).bfloat16(), torch.zeros(4, 1)),
            "lse: expected shape (4, 4), got (4, 1)",
        ),
    ],
)
def test_wrong_shapes_and_dtypes(output, reason):
    result = judge(make_inputs(P, 0, "cpu"), output)
    assert not result.ok
    assert result.reason.startswith(reason)


def test_results_are_strict_json():
    inputs = make_inputs(P, 0, "cpu")
    output = honest(inputs)
    output.out[0, 0, 0] = torch.nan
    text = json.dumps(judge(inputs, output).to_dict(), allow_nan=False)
    assert json.loads(text)["finite"] is False
    assert set(json.loads(text)) >= {"rel_l2", "worst_row", "lse_err", "finite"}


# --- running a plan -------------------------------------------------------------------------------------


class Plan:
    """A plan around an honest kernel; ``fault`` may spoil the run."""

    def __init__(self, fault: Callable[[DecodeInputs, DecodeOutput, torch.Tensor], None] | None = None) -> None:
        self.config: dict[str, str] = {}
        self.fault = fault
        self.scratch = torch.zeros(8)
        self.table = torch.arange(8)

    def new_output(self) -> DecodeOutput | None:
        return empty_output(P, torch.device("cpu"))

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return (self.scratch, self.table)

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        assert out is not None
        assert out.lse is not None
        right = honest(inputs)
        out.out.copy_(right.out)
        out.lse.copy_(right.lse)
        if self.fault:
            self.fault(inputs, out, self.scratch)
        return out


@pytest.fixture(scope="module")
def case() -> tuple[DecodeInputs, Reference]:
    inputs = make_inputs(P, 0, "cpu")
    return inputs, reference(inputs)


def test_an_honest_plan_passes(case):
    plan = Plan()
    result = check_plan(plan, *case)
    assert result.ok, result.reason
    assert plan.scratch.isnan().all()
    assert torch.equal(plan.table, torch.arange(8))


def reads_scratch(inputs, out, scratch):
    out.out[0, 0, 0] += scratch[0]


def writes_before(inputs, out, scratch):
    torch.as_strided(out.out, (4,), (1,), out.out.storage_offset() - 4).zero_()


def writes_after(inputs, out, scratch):
    torch.as_strided(out.lse, (2,), (1,), out.lse.storage_offset() + out.lse.numel()).zero_()


def changes_inputs(inputs, out, scratch):
    inputs.k[3, 1, 2:4] += 1


def leaves_a_row(inputs, out, scratch):
    out.out[3, 2] = torch.nan  # as it was filled


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (reads_scratch, "row (sequence 0, head 0): expected finite values, got nan"),
        (writes_before, "out: written outside the tensor, 8 bytes before it, the nearest 1 bytes away"),
        (writes_after, "lse: written outside the tensor, 8 bytes after it, the nearest 0 bytes away"),
        (changes_inputs, "k: expected unchanged inputs, got 2 changed elements"),
        (leaves_a_row, "row (sequence 3, head 2): expected finite values, got nan"),
    ],
)
def test_a_plan_that_misbehaves_fails(fault, reason):
    inputs = make_inputs(P, 0, "cpu")
    result = check_plan(Plan(fault), inputs, reference(inputs))
    assert not result.ok
    assert reason in result.reason


def test_a_plan_must_use_the_output_it_is_given(case):
    class Elsewhere(Plan):
        def run(self, inputs, out):
            return honest(inputs)

    assert check_plan(Elsewhere(), *case).reason == "run: expected the output tensors it was given, got others"


def test_a_view_of_the_output_in_another_order_is_not_what_was_given(case):
    class Transposed(Plan):
        def run(self, inputs, out):
            right = honest(inputs)
            shape = out.out.shape
            view = out.out.view(shape[0], shape[2], shape[1]).transpose(1, 2)
            view.copy_(right.out)
            out.lse.copy_(right.lse)
            return DecodeOutput(view, out.lse)

    assert check_plan(Transposed(), *case).reason == "run: expected the output tensors it was given, got others"


def test_a_plan_must_return_the_lse_that_it_has_a_tensor_for(case):
    class Mute(Plan):
        def run(self, inputs, out):
            super().run(inputs, out)
            out.lse.fill_(7)
            return DecodeOutput(out.out, None)

    assert check_plan(Mute(), *case).reason == "run: expected the LSE that it was given a tensor for, got none"


def test_a_plan_may_allocate_its_output(case):
    class Allocates(Plan):
        def new_output(self):
            return None

        def run(self, inputs, out):
            assert out is None
            return DecodeOutput(honest(inputs).out, None)

    result = check_plan(Allocates(), *case)
    assert result.ok, result.reason


@pytest.mark.gpu
def test_a_library_cannot_return_what_its_memory_held_before():
    """The allocator would hand the last result's block out again; a row nobody wrote must show."""
    inputs = make_inputs(P, 0, "cuda")
    ref = reference(inputs)
    right = ref.out.bfloat16()

    class LeavesARow(Plan):
        def new_output(self):
            return None

        def workspaces(self):
            return ()

        def run(self, inputs, out):
            fresh = torch.empty_like(right)
            fresh[:, :3] = right[:, :3]
            return DecodeOutput(fresh, None)

    for _ in range(3):
        stale = right.clone()
        del stale
        result = check_plan(LeavesARow(), inputs, ref)
        assert "head 3): expected finite values, got nan" in result.reason


@pytest.mark.parametrize("seed", range(20))
def test_equal_scores_err_alike_in_the_lse(seed):
    """At the maximum too: the error that all keys have in common does not average out."""
    problem = DecodeProblem(kv_lens=(0, 218, 0, 0), heads_q=7, heads_kv=1, head_dim=128, dtype="float32", scale=1.0)
    inputs = make_inputs(problem, seed, "cpu", family="equal")
    result = compare(honest(inputs, block=16), reference(inputs), problem)
    assert result.ok, result.reason
