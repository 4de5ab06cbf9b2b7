"""One suite over implementations x cases: the same promises of every implementation available on this device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from harness.check import CheckResult, budget, check_plan, run_checked
from harness.inputs import LAYOUTS, guard, isolate, make_inputs
from impls.catalog import IMPLS, OURS, load
from impls.contract import (
    TORCH_DTYPES,
    DecodeImpl,
    DecodeInputs,
    DecodeOutput,
    ImplUnavailable,
    InputError,
    PlanRefused,
    Scalar,
)
from impls.paged_plan import PagedImpl
from impls.problem import INT32_MAX, DecodeProblem
from impls.reference import Reference, reference
from tests.impls.cases import CASES, ConformanceCase, problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

FIELDS = ("dtype", "device", "head_dim", "heads_q", "kv_lens")
"""What a refusal may be about; a library's own words start with the implementation's name instead."""

KNOWN_WRONG = {
    ("flashinfer", "equal-keys"): "partials are rounded to the dtype of the output",
}
"""(library, case) -> why its answer is wrong. A library that has mended it fails here, and is struck off."""


def _loaded() -> dict[str, DecodeImpl]:
    loaded = {}
    for name in IMPLS:
        try:
            loaded[name] = load(name)
        except ImplUnavailable:
            if name in OURS:
                raise
    return loaded


LOADED = _loaded()


def fitting(name: str, shape: DecodeProblem) -> DecodeProblem:
    """The problem, or where an implementation reads whole pages, one with as many pages as the other has keys."""
    page_size = LOADED[name].page_size if isinstance(LOADED[name], PagedImpl) else 1
    return replace(shape, kv_lens=tuple(n * page_size for n in shape.kv_lens))


AVAILABLE = [name for name, impl in LOADED.items() if impl.unsupported(fitting(name, problem(1)), DEVICE) is None]
"""The implementations that compute something on this device."""


def kernels(name: str) -> ModuleType:
    return import_module(IMPLS[name].partition(":")[0])


def grouped(case: ConformanceCase) -> object:
    """The case as a parameter; all that are compiled for one shape run in one worker, which compiles it once."""
    p = case.problem
    shape = f"{p.heads_q}-{p.heads_kv}-{p.head_dim}-{p.dtype}"
    return pytest.param(case, marks=pytest.mark.xdist_group(shape), id=case.name)


GROUPED = [grouped(case) for case in CASES]


@cache
def prepared(name: str) -> tuple[DecodeInputs, Reference]:
    """The inputs of a case, and what is right."""
    case = next(case for case in CASES if case.name == name)
    inputs = case.draw(case.problem, DEVICE)
    return inputs, reference(inputs)


@cache
def outcome(case: str, name: str) -> tuple[CheckResult, DecodeOutput]:
    """What an implementation makes of a case, and whether that is right."""
    inputs, ref = prepared(case)
    tuning = next(c for c in CASES if c.name == case).tuning if name in OURS else None
    return run_checked(LOADED[name].plan(inputs.problem, DEVICE, tuning), inputs, ref)


def run(name: str, inputs: DecodeInputs, tuning: dict[str, Scalar] | None = None) -> DecodeOutput:
    plan = LOADED[name].plan(inputs.problem, DEVICE, tuning if name in OURS else None)
    return plan.run(inputs, plan.new_output())


def checked(name: str, inputs: DecodeInputs, num_splits: int) -> CheckResult | InputError:
    """The verdict, or the refusal of these tensors by :meth:`DecodePlan.run`."""
    plan = LOADED[name].plan(inputs.problem, DEVICE, {"num_splits": num_splits} if name in OURS else None)
    try:
        return check_plan(plan, inputs, reference(inputs))
    except InputError as refusal:
        return refusal


def test_ours_are_available() -> None:
    assert set(OURS) <= set(AVAILABLE)


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("case", GROUPED)
def test_right(case: ConformanceCase, name: str) -> None:
    """Right by the data's own budget, in NaN-filled outputs and workspaces; refused with the rule; or known."""
    refusal = LOADED[name].unsupported(case.problem, DEVICE)
    if refusal is not None:
        assert refusal.partition(":")[0] in (*FIELDS, name)
        ours_refuses = name == "tilelang-splitkv" and DEVICE.type == "cuda" and case.problem.dtype == "float32"
        assert name not in OURS or ours_refuses, refusal
        return
    result, _ = outcome(case.name, name)
    if (name, case.name) in KNOWN_WRONG:
        assert not result.ok, f"right, although {KNOWN_WRONG[name, case.name]}"
        return
    assert result.ok, f"{case.covers}: {result.reason}"


@pytest.mark.parametrize("case", GROUPED)
def test_pairs_agree(case: ConformanceCase) -> None:
    """No two implementations are further apart than their two budgets."""
    names = [
        name
        for name in AVAILABLE
        if LOADED[name].unsupported(case.problem, DEVICE) is None and (name, case.name) not in KNOWN_WRONG
    ]
    outputs = {name: outcome(case.name, name)[1] for name in names}
    allowed = budget(prepared(case.name)[1], case.problem)
    assert len(names) >= 2
    for a, b in combinations(names, 2):
        apart = (outputs[a].out.double() - outputs[b].out.double()).norm(dim=-1)
        assert (apart <= 2 * allowed.row).all(), f"{a} and {b}: {(apart / allowed.row).max():.3g} budgets apart"


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("num_splits", [1, 4, 64])
def test_config_states_what_ran(name: str, num_splits: int) -> None:
    shape = problem(0, 5, 1001)
    config = LOADED[name].plan(shape, DEVICE, {"num_splits": num_splits}).config
    assert config["num_splits"] == num_splits
    assert config["splits_max"] == num_splits
    assert config["work_items"] == 1 + min(5, num_splits) + num_splits
    assert {"block_n", "block_h", "num_stages", "tma", "warp_specialize", "compute_dtype", "version"} <= set(config)


def test_the_ablation_splits_every_sequence_alike() -> None:
    """As many splits as the official example, but never more than keys; or as many as are asked for."""
    plan = LOADED["tilelang-equal-splits"].plan
    config = plan(problem(0, 5, 1001), DEVICE).config
    assert (config["num_splits"], config["splits_max"], config["work_items"]) == (8, 8, 1 + 5 + 8)
    assert plan(problem(0, 5, 1001), DEVICE, {"num_splits": 2}).config["work_items"] == 1 + 2 + 2


@pytest.mark.parametrize("name", OURS)
def test_one_split_needs_no_workspace(name: str) -> None:
    plan = LOADED[name].plan(problem(70, 9), DEVICE, {"num_splits": 1})
    assert plan.config["workspace_bytes"] == 0
    assert sum(workspace.numel() for workspace in plan.workspaces()) == 0


@pytest.mark.parametrize("name", AVAILABLE)
def test_unknown_tuning_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="'nonsense'"):
        LOADED[name].plan(fitting(name, problem(1)), DEVICE, {"nonsense": 1})


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_bad_split_counts_are_refused(name: str, value: Scalar) -> None:
    with pytest.raises(ValueError, match="num_splits: expected"):
        LOADED[name].plan(problem(1), DEVICE, {"num_splits": value})


# --- nothing else is read ---------------------------------------------------------------------------------


READS_MORE = {"flash-attn-3": "multiplies V of the next sequence by 0 where it fills a sequence's last tile"}
"""Faults of others that are known, by the implementation: a strict xfail tells when one is mended."""


def _with_known_faults(names: list[str], known: dict[str, str]) -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.xfail(raises=AssertionError, strict=True, reason=known[name]))
        if name in known
        else name
        for name in names
    ]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("fill", [math.nan, math.inf])
@pytest.mark.parametrize("name", _with_known_faults(AVAILABLE, READS_MORE))
def test_nothing_else_is_read(name: str, fill: float, splits: int) -> None:
    """Guard rows and all other sequences hold NaN or infinity; a sequence's output is bit-identical."""
    inputs = make_inputs(fitting(name, problem(5, 0, 70, 33)), 3, DEVICE)
    tuning: dict[str, Scalar] = {"num_splits": splits}
    expected = run(name, guard(inputs, fill=1.0), tuning)
    for b in range(inputs.problem.batch):
        got = run(name, isolate(inputs, b, fill=fill), tuning)
        assert torch.equal(got.out[b], expected.out[b])
        if expected.lse is not None and got.lse is not None:
            assert torch.equal(got.lse[b], expected.lse[b])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", OURS)
def test_nan_among_a_sequences_own_keys_stays_nan(name: str, splits: int) -> None:
    """In the sequence that holds it and there alone: not 0, which would pass for an answer."""
    inputs = make_inputs(problem(200, 150, 90), 3, DEVICE)
    clean = run(name, inputs, {"num_splits": splits})
    k = inputs.k.clone()
    k[200 + 77] = math.nan
    dirty = run(name, replace(inputs, k=k), {"num_splits": splits})
    assert dirty.out[1].isnan().all()
    assert dirty.lse is not None
    assert dirty.lse[1].isnan().all()
    for b in (0, 2):
        assert torch.equal(dirty.out[b], clean.out[b])


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
def test_more_sequences_than_a_second_grid_axis_holds(name: str) -> None:
    """With one key each, every output is that key's value."""
    inputs = make_inputs(problem(*[1] * 70_000, heads=(4, 2)), 3, DEVICE)
    got = run(name, inputs, {"num_splits": 1})
    assert torch.equal(got.out, inputs.v.repeat_interleave(2, dim=1))


# --- layout and offsets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", AVAILABLE)
def test_layouts_are_right_or_refused_by_name(name: str, layout: str) -> None:
    inputs = make_inputs(fitting(name, problem(70, 9, heads=(8, 2))), 5, DEVICE, layout=layout)
    result = checked(name, inputs, 2)
    if isinstance(result, InputError):
        assert layout != "packed"
        assert str(result).partition(":")[0] in ("k", "v")
    else:
        assert result.ok, result.reason


@pytest.mark.parametrize("name", OURS)
def test_misaligned_starts_are_right_or_refused_by_name(name: str) -> None:
    """K and V that start 2 bytes past a 16-byte boundary: no 16-byte copy may touch them."""
    inputs = make_inputs(problem(70, 9), 5, DEVICE)
    k, v = (
        torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # the allocation itself is aligned
        for x in (inputs.k, inputs.v)
    )
    result = checked(name, replace(inputs, k=k, v=v), 2)
    if isinstance(result, InputError):
        assert str(result).partition(":")[0] in ("k", "v")
    else:
        assert result.ok, result.reason


def _far_rows(shape: DecodeProblem, stride: int, folder: Path) -> Tensor:
    """``[total_kv, 1, D]`` whose rows lie ``stride`` elements apart: a sparse file on a CPU."""
    dtype = TORCH_DTYPES[shape.dtype]
    size = (shape.total_kv - 1) * stride + shape.head_dim
    if DEVICE.type == "cpu":
        flat = torch.from_file(str(folder / "far"), shared=True, size=size, dtype=dtype)
    else:
        flat = torch.empty(size, dtype=dtype, device=DEVICE)
    rows = flat.as_strided((shape.total_kv, 1, shape.head_dim), (stride, stride, 1))
    return rows.copy_(make_inputs(shape, 9, DEVICE).k)


@pytest.mark.parametrize("name", OURS)
def test_offsets_past_int32_are_right_or_refused_with_the_number(name: str, tmp_path: Path) -> None:
    shape = problem(2, 2, heads=(1, 1))
    stride = 2**30 + 64
    k = _far_rows(shape, stride, tmp_path)
    inputs = replace(make_inputs(shape, 9, DEVICE), k=k)
    result = checked(name, inputs, 2)
    if isinstance(result, InputError):
        assert str(INT32_MAX) in str(result)
        assert str(4 * stride) in str(result)
    else:
        assert result.ok, result.reason


@pytest.mark.parametrize("name", OURS)
def test_a_workspace_over_budget_is_refused_before_it_is_allocated(name: str) -> None:
    huge = problem(*[2**24] * 64, heads=(64, 1), head_dim=128)
    needed = 64 * 1024 * 64 * 129 * 4
    with pytest.raises(PlanRefused, match=rf"workspace: expected <= {2 << 30} bytes .*, got {needed}"):
        LOADED[name].plan(huge, DEVICE, {"num_splits": 1024})


# --- combine ----------------------------------------------------------------------------------------------


COMBINES = {"tilelang-splitkv": "impls.tilelang_splitkv", "triton-splitkv": "impls.triton_combine"}
"""Implementation -> the module that has its ``combine``."""


def _combined(name: str, partial: Tensor, lse: Tensor, splits: list[int]) -> tuple[Tensor, Tensor]:
    """What the combine kernel of an implementation makes of consecutive slots, ``splits[b]`` of them for each b."""
    heads, dim = partial.shape[1:]
    first = 0
    rows = []
    for b, count in enumerate(splits):
        rows.append((b, first, count, 0))
        first += count
    out = torch.full((len(splits), heads, dim), math.nan, dtype=torch.float16, device=DEVICE)
    out_lse = torch.full((len(splits), heads), math.nan, device=DEVICE)
    merges = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    import_module(COMBINES[name]).combine(partial, lse, merges, out, out_lse)
    return out, out_lse


def _partials(slots: int, heads: int = 4, dim: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    partial = torch.randn((slots, heads, dim), generator=generator)
    return partial.to(DEVICE), torch.randn((slots, heads), generator=generator).to(DEVICE)


def _merged(partial: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64: weights exp(lse_s - lse)."""
    total = torch.logsumexp(lse.double(), 0)
    return ((lse.double() - total).exp()[..., None] * partial.double()).sum(0), total


@pytest.mark.parametrize("name", OURS)
def test_combine_merges_any_number_of_splits(name: str) -> None:
    splits = [2, 3, 33, 70]
    partial, lse = _partials(sum(splits))
    out, out_lse = _combined(name, partial, lse, splits)
    first = 0
    for b, count in enumerate(splits):
        want, want_lse = _merged(partial[first : first + count], lse[first : first + count])
        torch.testing.assert_close(out[b].double(), want, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(out_lse[b].double(), want_lse, atol=2e-6, rtol=2e-6)
        first += count


@pytest.mark.parametrize("name", OURS)
def test_combine_skips_empty_splits(name: str) -> None:
    """An empty split's partial is NaN: weighting it with 0 would leave NaN. First, last and middle."""
    partial, lse = _partials(5)
    for slot in (0, 2, 4):
        partial[slot] = math.nan
        lse[slot] = -math.inf
    out, out_lse = _combined(name, partial, lse, [5])
    want, want_lse = _merged(partial[1:4:2], lse[1:4:2])
    torch.testing.assert_close(out[0].double(), want, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(out_lse[0].double(), want_lse, atol=2e-6, rtol=2e-6)


FORMS = [
    *[("tilelang-splitkv", {"many": many}) for many in (False, True)],
    *[("triton-splitkv", {"splits_max": splits}) for splits in (16, 32, 64, 128)],
]
"""Every form of the combine kernels of our implementations, whichever a plan would take."""


@pytest.mark.parametrize("head_dim", [64, 80, 192])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_every_form_of_a_combine_merges_any_number_of_splits(
    name: str, form: dict[str, int], head_dim: int
) -> None:
    """Empty splits, whose partials are NaN, anywhere; all that is merged first; and whole sequences of them."""
    counts = [1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129, 130, 256, 257, 300]
    empty = {len(counts): 33, len(counts) + 1: 130}
    spare = 2  # slots before and after, which belong to nobody
    slots = spare + sum(counts) + sum(empty.values()) + spare
    generator = torch.Generator().manual_seed(5)
    partial = torch.randn((slots, 3, head_dim), generator=generator)
    lse = 4 * torch.randn((slots, 3), generator=generator)
    keyless = torch.rand((slots, 3), generator=generator) < 0.3
    first = spare
    rows = []
    for b, count in enumerate([*counts, *empty.values()]):
        rows.append((b, first, count, 0))
        if b in empty:
            keyless[first : first + count] = True
        elif count > 128:  # the most that a form merges at a time
            keyless[first : first + 128, 1] = True
        first += count
    lse[keyless] = -torch.inf
    partial[keyless] = torch.nan
    for edge in (slice(spare), slice(first, None)):
        partial[edge], lse[edge] = torch.nan, 100.0
    out = torch.full((len(rows) + 1, 3, head_dim), torch.nan, device=DEVICE)
    out_lse = torch.full((len(rows) + 1, 3), torch.nan, device=DEVICE)
    merges = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    import_module(COMBINES[name]).combine(partial.to(DEVICE), lse.to(DEVICE), merges, out, out_lse, **form)
    out, out_lse = out.cpu(), out_lse.cpu()
    for b, first, count, _ in rows:
        scores = lse[first : first + count].double()
        total = torch.logsumexp(scores, 0)
        weights = torch.where(scores > -torch.inf, (scores - total).exp(), 0.0)
        want = (weights[..., None] * partial[first : first + count].double().nan_to_num()).sum(0)
        torch.testing.assert_close(out[b].double(), want, atol=5e-6, rtol=5e-6)
        torch.testing.assert_close(out_lse[b].double(), total, atol=5e-6, rtol=5e-6)
    assert not out[list(empty)].any()
    assert torch.isneginf(out_lse[list(empty)]).all()
    assert out[len(rows)].isnan().all()  # a row that no merge names stays as it is
    assert out_lse[len(rows)].isnan().all()


@pytest.mark.parametrize("name", OURS)
def test_combine_of_empty_splits_alone_is_empty(name: str) -> None:
    partial = torch.full((40, 4, 64), math.nan, device=DEVICE)
    lse = torch.full((40, 4), -math.inf, device=DEVICE)
    out, out_lse = _combined(name, partial, lse, [3, 37])
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(out_lse, torch.full_like(out_lse, -math.inf))


@pytest.mark.parametrize("name", OURS)
def test_combine_takes_scores_far_apart(name: str) -> None:
    """LSEs of -6e33 and 1e4 beside small ones: no constant, no overflow."""
    partial, lse = _partials(3)
    lse[0], lse[1], lse[2] = -6e33, 1e4, 0.0
    out, out_lse = _combined(name, partial, lse, [3])
    torch.testing.assert_close(out[0].double(), partial[1].double(), atol=1e-3, rtol=1e-3)
    assert torch.equal(out_lse[0], lse[1])


@pytest.mark.parametrize("name", OURS)
def test_unequal_splits_merge_to_the_unsplit_result(name: str) -> None:
    """3072 and 64 keys: the split kernel's own partials, cut where the caller wants them."""
    whole = make_inputs(problem(3136), 13, DEVICE)
    parts = make_inputs(problem(3072, 64), 13, DEVICE)
    parts = replace(parts, q=whole.q.expand(2, -1, -1).contiguous(), k=whole.k, v=whole.v)
    partial = run(name, parts, {"num_splits": 1})
    assert partial.lse is not None
    out, out_lse = _combined(name, partial.out.float(), partial.lse, [2])
    ref = reference(whole)
    # The partials are rounded to float16 here, as the kernel's own are not: one more rounding.
    assert ((out.double() - ref.out).norm(dim=-1) <= 3 * budget(ref, whole.problem).row).all()
    torch.testing.assert_close(out_lse.double(), ref.lse, atol=5e-6, rtol=5e-6)


# --- the official example's own acceptance ----------------------------------------------------------------


def _official_reference(inputs: DecodeInputs) -> Tensor:
    """The official GQA decode example's reference for equal lengths, in the input dtype's precision."""
    p = inputs.problem
    batch, keys = p.batch, p.max_kv
    q = inputs.q.view(batch, p.heads_kv, p.group, p.head_dim)
    k, v = (x.view(batch, keys, p.heads_kv, p.head_dim) for x in (inputs.k, inputs.v))
    scores = torch.einsum("bhgd,bshd->bhgs", q, k)
    weights = torch.softmax(scores / p.head_dim**0.5, dim=-1)
    return torch.einsum("bhgs,bshd->bhgd", weights, v).reshape(batch, p.heads_q, p.head_dim)


@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("name", OURS)
def test_official_acceptance(name: str, num_splits: int) -> None:
    shape = problem(512, heads=(8, 2), head_dim=128)
    if DEVICE.type == "cuda":
        shape = problem(8192, heads=(32, 8), head_dim=128)
    inputs = make_inputs(shape, 0, DEVICE)
    out, ref = run(name, inputs, {"num_splits": num_splits}).out, _official_reference(inputs)
    assert torch.allclose(out, ref, atol=1e-2, rtol=1e-2)
    x, y = out.double(), ref.double()
    assert 1 - 2 * (x * y).sum() / (x * x + y * y).sum() <= 1e-2


# --- launching --------------------------------------------------------------------------------------------

COMPILED = [
    # The interpreter compiles nothing: without a GPU, tests/impls/test_triton.py asks the compiler instead.
    pytest.param("triton-splitkv", marks=pytest.mark.gpu),
    "tilelang-splitkv",
]


@pytest.mark.parametrize("name", COMPILED)
def test_new_lengths_and_batch_sizes_never_recompile(name: str) -> None:
    """Twenty batches, one sequence, odd totals, empty ones and multiples of 16 among them."""
    batches = [tuple((37 * b + 16 * i) % 211 for i in range(1 + b % 5)) for b in range(20)]
    assert (0,) in batches
    if DEVICE.type == "cuda":
        batches.append((140_000,))  # long enough for the tile of long work
    for num_splits in (1, 2, 4):  # each size of a cluster is a kernel, where splits merge in clusters
        run(name, make_inputs(problem(33), 1, DEVICE), {"num_splits": num_splits})
    before = kernels(name).compiled_variants()
    for lens in batches:
        run(name, make_inputs(problem(*lens), 1, DEVICE), {"num_splits": 1 + len(lens)})
    assert kernels(name).compiled_variants() == before > 0


@contextmanager
def sync_is_an_error() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", AVAILABLE)
def test_run_only_launches(name: str) -> None:
    """Clean under the sync debugger, and right when a CUDA graph of it is replayed on other values."""
    shape = fitting(name, problem(700, 0, 33, heads=(8, 2), head_dim=128))
    inputs, other = (make_inputs(shape, seed, DEVICE) for seed in (1, 2))
    plan = LOADED[name].plan(shape, DEVICE)
    plan.run(inputs, plan.new_output())
    target = plan.new_output()
    with sync_is_an_error():
        plan.run(inputs, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan.run(inputs, target)
    for mine, new in zip((inputs.q, inputs.k, inputs.v), (other.q, other.k, other.v), strict=True):
        mine.copy_(new)
    graph.replay()
    expected = plan.run(other, plan.new_output())
    assert torch.equal(captured.out, expected.out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
def test_run_allocates_nothing(name: str) -> None:
    inputs = make_inputs(problem(700, 33, heads=(8, 2), head_dim=128), 1, DEVICE)
    plan = LOADED[name].plan(inputs.problem, DEVICE, {"num_splits": 4})
    out = plan.new_output()
    plan.run(inputs, out)
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    plan.run(inputs, out)
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before
