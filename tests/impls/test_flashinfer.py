"""The adapter of FlashInfer, against stand-ins for its wrappers that compute as they say they do."""

from __future__ import annotations

import math
import sys
from math import ceil
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from harness.check import check_plan
from harness.inputs import LAYOUTS, guard, make_inputs
from impls import flashinfer
from impls.contract import ImplUnavailable, InputError, PlanRefused
from impls.flashinfer import READERS, FlashInfer, chunk_keys, first_fault, tile_rows, workspace_floats
from impls.problem import DecodeProblem
from impls.reference import reference
from tests.impls.cases import problem
from tests.impls.test_paged import attend

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class Wrapper:
    """What the two wrappers have in common: they remember, and return base-2 LSEs, finite without keys."""

    made: ClassVar[list[Any]] = []
    fault: ClassVar[Exception | None] = None

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert (layout, workspace.dim(), workspace.dtype) == ("NHD", 1, torch.float32)
        self.workspace = workspace
        self.planned: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []
        Wrapper.made.append(self)

    def keep_plan(self, *args: Any) -> None:
        if Wrapper.fault is not None:
            raise Wrapper.fault
        self.planned.append(args)

    def compute(self, q: Tensor, sequences: list[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor | None) -> None:
        for b, (k, v) in enumerate(sequences):
            out[b], natural = attend(q[b], k, v, self.scale)
            if lse is not None:
                lse[b] = natural / math.log(2) if len(k) else -5e4

    @property
    def scale(self) -> float:
        return float(self.planned[-1][-1]["sm_scale"])


class Ragged(Wrapper):
    """``BatchPrefillWithRaggedKVCacheWrapper``."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.backend = backend

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        **options: Any,
    ) -> None:
        self.keep_plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, options)

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor | None, return_lse: bool) -> None:
        assert return_lse is (lse is not None)
        self.ran.append((q, k, v, out, lse))
        edges = self.planned[-1][1].tolist()
        spans = [slice(*edges[b : b + 2]) for b in range(len(edges) - 1)]
        self.compute(q, [(k[span], v[span]) for span in spans], out, lse)


class Paged(Wrapper):
    """``BatchDecodeWithPagedKVCacheWrapper``."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        self.keep_plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, options)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        lse: Tensor | None,
        return_lse: bool,
    ) -> None:
        assert return_lse is (lse is not None)
        k, v = paged_kv_cache
        self.ran.append((q, k, v, out, lse))
        indptr, indices, last, *_, size, _ = self.planned[-1]
        sequences = []
        for b, tail in enumerate(last.tolist()):
            pages = indices[indptr[b] : indptr[b + 1]].long()
            n = (len(pages) - 1) * size + tail if len(pages) else 0
            sequences.append((k[pages].flatten(0, 1)[:n], v[pages].flatten(0, 1)[:n]))
        self.compute(q, sequences, out, lse)


@pytest.fixture
def impl(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    fake = SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        BatchDecodeWithPagedKVCacheWrapper=Paged,
        __version__="0.5.3",
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(flashinfer, "sm_count", lambda device: 132)
    monkeypatch.setattr(Wrapper, "made", [])
    monkeypatch.setattr(Wrapper, "fault", None)
    return FlashInfer()


@pytest.mark.parametrize("heads", [(2, 2), (8, 2)])
@pytest.mark.parametrize("lens", [(70,), (5, 0, 129, 0), (64, 128), (32, 16, 0), (0, 0), ()])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_is_right(
    impl: FlashInfer, reader: str, lens: tuple[int, ...], heads: tuple[int, int]
) -> None:
    inputs = make_inputs(problem(*lens, heads=heads, scale=0.2), 3, CPU)
    plan = impl.plan(inputs.problem, CPU, {"reader": reader, "lse": True})
    result = check_plan(plan, guard(inputs), reference(inputs))
    assert result.ok, result.reason
    assert plan.config["reader"] == reader


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_rows_are_passed_as_they_are(impl: FlashInfer, layout: str) -> None:
    inputs = make_inputs(problem(5, 0, 70, heads=(8, 2), dtype="bfloat16", scale=0.25), 1, CPU, layout=layout)
    plan = impl.plan(inputs.problem, CPU, {"lse": True})
    out = plan.new_output()
    for _ in range(2):
        assert plan.run(inputs, out) is out
    (wrapper,) = Wrapper.made
    assert (type(wrapper), wrapper.backend) == (Ragged, "fa2")
    ((queries, keys, *shape, options),) = wrapper.planned
    assert (queries.tolist(), keys.tolist()) == ([0, 1, 2, 3], [0, 5, 5, 75])
    assert {queries.dtype, keys.dtype} == {torch.int32}
    assert shape == [8, 2, 64]
    assert options == {"q_data_type": torch.bfloat16, "sm_scale": 0.25}
    for called in wrapper.ran:
        wanted = (inputs.q, inputs.k, inputs.v, out.out, out.lse)
        assert all(got is want for got, want in zip(called, wanted, strict=True))
    assert plan.workspaces()[0] is wrapper.workspace


@pytest.mark.parametrize(
    ("lens", "size", "indptr", "last"),
    [
        ((128, 64), 64, [0, 2, 3], [64, 64]),
        ((32, 0, 64), 16, [0, 2, 2, 6], [16, 0, 16]),
        ((5, 0, 3), 1, [0, 5, 5, 8], [1, 0, 1]),
    ],
)
@pytest.mark.parametrize("reader", READERS[1:])
def test_pages_are_views_as_large_as_the_lengths_allow(
    impl: FlashInfer, reader: str, lens: tuple[int, ...], size: int, indptr: list[int], last: list[int]
) -> None:
    inputs = make_inputs(problem(*lens, heads=(8, 2)), 1, CPU)
    plan = impl.plan(inputs.problem, CPU, {"reader": reader})
    plan.run(inputs, None)
    (wrapper,) = Wrapper.made
    assert wrapper.use_tensor_cores is (reader == "paged")
    ((starts, pages, tails, *shape, page_size, options),) = wrapper.planned
    assert (starts.tolist(), tails.tolist(), page_size) == (indptr, last, size)
    assert pages.tolist() == list(range(sum(lens) // size))
    assert shape == [8, 2, 64]
    assert options == {"q_data_type": torch.float16, "sm_scale": 64**-0.5}
    for got, packed in zip(wrapper.ran[0][1:3], (inputs.k, inputs.v), strict=True):
        assert got.data_ptr() == packed.data_ptr()
        assert got.shape == (sum(lens) // size, size, 2, 64)
    assert plan.config["page_size"] == size


def test_the_lse_is_natural_and_corrected_without_keys_alone(impl: FlashInfer) -> None:
    inputs = make_inputs(problem(5, 0, heads=(8, 2)), 1, CPU)
    plan = impl.plan(inputs.problem, CPU, {"lse": True})
    lse = plan.run(inputs, None).lse
    assert lse is not None
    assert (lse[1] == -math.inf).all()
    torch.testing.assert_close(lse[0].double(), reference(inputs).lse[0])
    assert "base 2" in str(plan.config["lse_note"])


@pytest.mark.parametrize("lens", [(5, 0), (0,)])
def test_the_lse_is_left_out_unless_asked_for(impl: FlashInfer, lens: tuple[int, ...]) -> None:
    inputs = make_inputs(problem(*lens, heads=(8, 2)), 1, CPU)
    plan = impl.plan(inputs.problem, CPU)
    out = plan.new_output()
    assert out.lse is None
    assert plan.run(inputs, out).lse is None
    assert torch.equal(out.out[-1], torch.zeros(8, 64, dtype=torch.float16))
    assert plan.config["lse"] is False


def test_a_batch_without_keys_makes_no_wrapper(impl: FlashInfer) -> None:
    for lens in ((), (0, 0)):
        inputs = make_inputs(problem(*lens), 1, CPU)
        out = impl.plan(inputs.problem, CPU, {"lse": True}).run(inputs, None)
        assert out.lse is not None
        assert out.out.shape == (len(lens), 4, 64)
        assert (out.lse == -math.inf).all()
    assert Wrapper.made == []


def test_plans_own_what_they_run_on(impl: FlashInfer) -> None:
    """Planning for other lengths leaves an earlier plan as it was."""
    inputs = make_inputs(problem(5, 70), 1, CPU)
    plan = impl.plan(inputs.problem, CPU)
    impl.plan(problem(60, 15), CPU)
    assert check_plan(plan, inputs, reference(inputs)).ok
    first, second = Wrapper.made
    assert first.workspace.data_ptr() != second.workspace.data_ptr()


@pytest.mark.parametrize(
    ("shape", "chunk", "splits"),
    [
        (problem(8192, heads=(32, 8), head_dim=128), 249, 33),  # 264 CTAs, 33 a KV head
        (problem(*[8192] * 16, heads=(32, 8), head_dim=128), 4096, 2),
        (problem(*[1024] * 128, heads=(32, 8), head_dim=128), None, 1),  # more sequences than CTAs
        (problem(131072, *[1024] * 31, heads=(32, 8), head_dim=128), 65536, 2),  # one count of CTAs for all
        (problem(100, heads=(32, 8)), None, 1),  # shorter than a chunk may be
        (problem(1000, heads=(400, 400)), None, 1),
    ],
)
def test_the_splits_of_the_tensor_core_planner(
    impl: FlashInfer, shape: DecodeProblem, chunk: int | None, splits: int
) -> None:
    assert chunk_keys(shape, 132, 1) == chunk
    config = impl.plan(shape, CPU).config
    assert (config["splits_max"], config["chunk_keys"]) == (splits, chunk)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_chunk_is_the_smallest_that_fits(page_size: int) -> None:
    for shape in (problem(8192, 64, 640, heads=(8, 2)), problem(*[2048] * 20, heads=(70, 2))):
        limit = 2 * 132 // 2

        def ctas(chunk: int, shape: DecodeProblem = shape) -> int:
            return ceil(shape.group / tile_rows(shape)) * sum(ceil(n / chunk) for n in shape.kv_lens)

        chunk = chunk_keys(shape, 132, page_size)
        assert chunk is not None
        assert chunk % page_size == 0
        assert ctas(chunk) <= limit
        assert chunk == 128 or ctas(chunk - page_size) > limit


@pytest.mark.parametrize("heads", [(2, 2), (32, 8), (24, 1), (70, 1)])
@pytest.mark.parametrize("lens", [(8192,), (300, 5, 0), (2048,) * 30])
def test_the_workspace_holds_what_is_split(lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    """What the planner asks for: a tile of rows and their LSE for every query head and item."""
    shape = problem(*lens, heads=heads)
    chunk = chunk_keys(shape, 132, 1)
    items = 0
    if chunk is not None:
        items = ceil(shape.group / tile_rows(shape)) * sum(max(1, ceil(n / chunk)) for n in lens)
    needed = shape.heads_q * items * tile_rows(shape) * (shape.head_dim + 1)
    assert workspace_floats(shape, 132, "ragged") >= needed
    assert workspace_floats(shape, 132, "paged-cuda-cores") >= 32 * 132 * shape.group * (shape.head_dim + 1)


def test_cuda_cores_refuse_other_groups(impl: FlashInfer) -> None:
    assert impl.plan(problem(5, heads=(8, 2)), CPU, {"reader": "paged-cuda-cores"}).config["splits_max"] is None
    with pytest.raises(PlanRefused, match=r"heads_q: expected 1, 2, 3, 4, 8 query heads a KV head .*, got 7"):
        impl.plan(problem(5, heads=(7, 1)), CPU, {"reader": "paged-cuda-cores"})


def test_pages_want_one_layout_of_keys_and_values(impl: FlashInfer) -> None:
    inputs = make_inputs(problem(64, heads=(8, 2)), 1, CPU)
    object.__setattr__(inputs, "v", torch.cat([inputs.v, inputs.v], 1)[:, :2])
    with pytest.raises(InputError, match="v: expected the strides of k"):
        impl.plan(inputs.problem, CPU, {"reader": "paged"}).run(inputs, None)


def test_offsets_past_32_bits_are_refused_with_the_number(impl: FlashInfer) -> None:
    inputs = make_inputs(problem(2, 2, heads=(1, 1)), 1, CPU)
    stride = 2**30 + 64
    far = SimpleNamespace(stride=lambda dim: stride)
    object.__setattr__(inputs, "k", far)
    with pytest.raises(InputError, match=f"k: expected element offsets <= {2**32 - 1} .*, got {4 * stride}"):
        impl.plan(inputs.problem, CPU).run(inputs, None)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"reader": "cudnn"}, "reader: expected one of ragged, paged, paged-cuda-cores, got 'cudnn'"),
        ({"lse": 1}, "lse: expected true or false, got 1"),
        ({"num_splits": 1}, "tuning: expected keys among reader, lse, got 'num_splits'"),
    ],
)
def test_bad_tuning_is_refused(impl: FlashInfer, tuning: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        impl.plan(problem(5), CPU, tuning)


def test_kernels_that_do_not_compile_are_unavailable_with_what_was_said(impl: FlashInfer) -> None:
    output = "Ninja build failed. Ninja output:\nnvcc -c x.cu\nx.cu(3): error: no such type\nninja: stopped"
    Wrapper.fault = RuntimeError(output)
    message = r"^flashinfer: RuntimeError: x\.cu\(3\): error: no such type$"
    with pytest.raises(ImplUnavailable, match=message):
        impl.plan(problem(5), CPU)
    Wrapper.fault = FileNotFoundError("[Errno 2] No such file or directory: 'ninja'")
    with pytest.raises(ImplUnavailable, match=r"FileNotFoundError: .*'ninja'"):
        impl.plan(problem(5), CPU)


def test_a_fault_after_the_kernels_were_there_is_no_missing_library(impl: FlashInfer) -> None:
    impl.plan(problem(5), CPU)
    Wrapper.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        impl.plan(problem(5), CPU)
    with pytest.raises(ImplUnavailable):  # kernels of another head dim, never there
        impl.plan(problem(5, head_dim=128), CPU)


def test_a_fault_of_the_device_is_no_missing_library(impl: FlashInfer) -> None:
    Wrapper.fault = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        impl.plan(problem(5), CPU)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\nb: error: c\n", "b: error: c"), ("\n  only this\nand that", "only this"), ("", "no message")],
)
def test_the_line_that_says_what_went_wrong(text: str, line: str) -> None:
    assert first_fault(text) == line


@pytest.mark.parametrize(
    ("shape", "device", "rule"),
    [
        (problem(1), CPU, "device: expected cuda, got cpu"),
        (problem(1, dtype="float32"), CUDA, "dtype: expected float16 or bfloat16, got float32"),
        (problem(1, head_dim=96), CUDA, "head_dim: expected one of 64, 128, 256, got 96"),
        (problem(1, heads=(70, 1)), CUDA, None),
    ],
)
def test_refusals_name_the_rule(
    impl: FlashInfer,
    monkeypatch: pytest.MonkeyPatch,
    shape: DecodeProblem,
    device: torch.device,
    rule: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert impl.unsupported(shape, device) == rule
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    if device == CUDA:
        assert impl.unsupported(shape, device) == "device: expected compute capability >= 8.0, got 7.5"


def test_a_missing_library_says_what_import_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImplUnavailable, match="import flashinfer: ModuleNotFoundError: "):
        FlashInfer()
