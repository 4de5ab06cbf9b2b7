"""The paged adapters of flash-attn, against stand-ins that compute from pages and tables as the libraries do."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.check import check_plan
from harness.inputs import LAYOUTS, guard, make_inputs
from impls import flash_attn, libraries
from impls.contract import DecodeInputs, ImplUnavailable, PlanRefused, Scalar
from impls.flash_attn import FlashAttn2Paged, FlashAttn3Paged
from impls.paged_plan import PagedImpl, Pages, as_pages, check_pages
from impls.problem import DecodeProblem
from impls.reference import reference
from tests.impls.cases import problem

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``[Hq, D]`` and the natural-log LSE ``[Hq]`` of one query token: +inf without keys, as these libraries."""
    if not len(k):
        return torch.zeros_like(q), torch.full(q.shape[:1], math.inf)
    k, v = (x.float().repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    scores = scale * torch.einsum("hd,nhd->hn", q.float(), k)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v).to(q.dtype), scores.logsumexp(-1)


class KVCache:
    """Stands in for ``flash_attn_with_kvcache``: keyword arguments as named by the library, or an error."""

    def __init__(self, table: str, *known: str) -> None:
        self.table = table
        self.known = {table, "cache_seqlens", "softmax_scale", "num_splits", "return_softmax_lse", *known}
        self.calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> tuple[Any, ...]:
        assert set(options) == self.known
        assert options["return_softmax_lse"] is True
        self.calls.append(((q, k_cache, v_cache), options))
        table, lengths = options[self.table], options["cache_seqlens"]
        assert (table.dtype, lengths.dtype) == (torch.int32, torch.int32)
        assert table.is_contiguous()
        rows = [
            attend(
                q[b, 0],
                *(x[table[b].long()].flatten(0, 1)[:n] for x in (k_cache, v_cache)),
                options["softmax_scale"],
            )
            for b, n in enumerate(lengths.tolist())
        ]
        out, lse = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return out[:, None], lse[:, :, None], None, None


@pytest.fixture
def fa2(monkeypatch: pytest.MonkeyPatch) -> tuple[FlashAttn2Paged, KVCache]:
    library = KVCache("block_table")
    fake = SimpleNamespace(flash_attn_with_kvcache=library, __version__="2.8.3")
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    monkeypatch.setattr(flash_attn, "sm_count", lambda device: 132)
    return FlashAttn2Paged(), library


class Hopper:
    """Stands in for the module of flash-attn 3."""

    def __init__(self) -> None:
        self.flash_attn_with_kvcache = KVCache("page_table", "scheduler_metadata")
        self.metadata: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def get_scheduler_metadata(self, *args: Any, **options: Any) -> Tensor:
        self.metadata.append((args, options))
        return torch.tensor([len(self.metadata)])


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> tuple[FlashAttn3Paged, Hopper]:
    library = Hopper()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    monkeypatch.setattr(libraries, "packages_distributions", lambda: {"flash_attn_interface": ["some-fa3"]})
    monkeypatch.setattr(libraries, "version", lambda name: "3.0.0")
    return FlashAttn3Paged(), library


def test_pages_are_where_the_rows_are() -> None:
    pages = Pages.of(problem(128, 0, 64, 192), CPU, 64)
    assert pages.table.tolist() == [[0, 1, 0], [0, 0, 0], [2, 0, 0], [3, 4, 5]]
    assert pages.lengths.tolist() == [128, 0, 64, 192]
    assert (pages.width, pages.size) == (3, 64)


@pytest.mark.parametrize(("lens", "shape"), [((), (0, 0)), ((0, 0), (2, 0)), ((64,), (1, 1))])
def test_tables_of_small_batches(lens: tuple[int, ...], shape: tuple[int, int]) -> None:
    assert tuple(Pages.of(problem(*lens), CPU, 64).table.shape) == shape


def test_every_key_is_in_exactly_one_page_of_its_sequence() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        shape = problem(*(64 * rng.integers(0, 5, size=rng.integers(1, 9))).tolist())
        pages = Pages.of(shape, CPU, 64)
        used = [page for row, n in zip(pages.table.tolist(), shape.kv_lens, strict=True) for page in row[: n // 64]]
        assert used == list(range(shape.total_kv // 64))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_views_of_any_layout(layout: str) -> None:
    inputs = make_inputs(problem(128, 64, heads=(8, 2)), 5, CPU, layout=layout)
    for packed in (inputs.k, inputs.v):
        pages = as_pages(packed, 64)
        assert pages.data_ptr() == packed.data_ptr()
        assert pages.shape == (3, 64, 2, 64)
        assert pages.stride() == (64 * packed.stride(0), *packed.stride())
        assert torch.equal(pages.flatten(0, 1), packed)


@pytest.mark.parametrize(
    ("lens", "got"),
    [((64, 128), None), ((), None), ((0,), None), ((64, 63, 128), "kv_lens[1] = 63"), ((64, 1), "kv_lens[1] = 1")],
)
def test_lengths_that_are_not_whole_pages_are_refused(lens: tuple[int, ...], got: str | None) -> None:
    """A last page that is only begun counts too: the view would end outside the tensor."""
    refusal = check_pages(problem(*lens), 64)
    if got is None:
        assert refusal is None
    else:
        assert refusal == f"kv_lens: expected multiples of 64 (pages are a view of the packed rows), got {got}"
        with pytest.raises(PlanRefused, match="expected multiples of 64"):
            Pages.of(problem(*lens), CPU, 64)


def results_are_right(impl: PagedImpl, lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    inputs = make_inputs(problem(*lens, heads=heads, scale=0.2), 3, CPU)
    plan = impl.plan(inputs.problem, CPU)
    assert plan.new_output() is None
    assert plan.workspaces() == ()
    result = check_plan(plan, guard(inputs), reference(inputs))
    assert result.ok, result.reason


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1)])
@pytest.mark.parametrize("lens", [(256,), (256, 0, 768, 0), (0, 0), ()])
def test_flash_attn_2_is_right(
    fa2: tuple[FlashAttn2Paged, KVCache], lens: tuple[int, ...], heads: tuple[int, int]
) -> None:
    results_are_right(fa2[0], lens, heads)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1)])
@pytest.mark.parametrize("lens", [(64,), (64, 0, 320, 0), (0, 0), ()])
def test_flash_attn_3_is_right(
    fa3: tuple[FlashAttn3Paged, Hopper], lens: tuple[int, ...], heads: tuple[int, int]
) -> None:
    results_are_right(fa3[0], lens, heads)


def is_page_view(pages: Tensor, packed: Tensor, size: int) -> bool:
    return pages.data_ptr() == packed.data_ptr() and pages.shape == (len(packed) // size, size, *packed.shape[1:])


def test_flash_attn_2_gets_views_and_the_table_of_the_plan(fa2: tuple[FlashAttn2Paged, KVCache]) -> None:
    impl, library = fa2
    inputs = make_inputs(problem(512, 256, heads=(8, 2)), 1, CPU)
    plan = impl.plan(inputs.problem, CPU)
    for _ in range(2):
        plan.run(inputs, None)
    ((q, k, v), options), (_, again) = library.calls
    assert q.shape == (2, 1, 8, 64)
    assert q.data_ptr() == inputs.q.data_ptr()
    assert is_page_view(k, inputs.k, 256)
    assert is_page_view(v, inputs.v, 256)
    assert options["block_table"].tolist() == [[0, 1], [2, 0]]
    assert options["cache_seqlens"].tolist() == [512, 256]
    assert (options["softmax_scale"], options["num_splits"]) == (64**-0.5, 0)
    assert all(options[key] is again[key] for key in ("block_table", "cache_seqlens"))


def test_flash_attn_2_states_its_splits(fa2: tuple[FlashAttn2Paged, KVCache]) -> None:
    """Here it splits without grouped heads too."""
    impl, library = fa2
    config = impl.plan(problem(8192, heads=(32, 8), head_dim=128), CPU).config
    assert (config["function"], config["version"]) == ("flash_attn.flash_attn_with_kvcache", "2.8.3")
    assert (config["num_splits"], config["splits_max"], config["page_size"]) == (0, 32, 256)
    assert impl.plan(problem(4096, heads=(32, 32)), CPU).config["splits_max"] == 8
    inputs = make_inputs(problem(512, heads=(8, 2)), 1, CPU)
    plan = impl.plan(inputs.problem, CPU, {"num_splits": 3})
    plan.run(inputs, None)
    assert (plan.config["num_splits"], plan.config["splits_max"]) == (3, 3)
    assert library.calls[-1][1]["num_splits"] == 3


def test_flash_attn_3_is_scheduled_once_by_plan(fa3: tuple[FlashAttn3Paged, Hopper]) -> None:
    impl, library = fa3
    inputs = make_inputs(problem(128, 64, 0, heads=(8, 2), dtype="bfloat16"), 1, CPU)
    plan = impl.plan(inputs.problem, CPU, {"num_splits": 5})
    ((args, options),) = library.metadata
    assert args[:6] == (3, 1, 128, 8, 2, 64)
    assert args[6].tolist() == [128, 64, 0]
    assert options == {"qkv_dtype": torch.bfloat16, "page_size": 64, "num_splits": 5}
    for _ in range(2):
        plan.run(inputs, None)
    assert len(library.metadata) == 1
    ((q, k, v), called), (_, again) = library.flash_attn_with_kvcache.calls
    assert q.shape == (3, 1, 8, 64)
    assert is_page_view(k, inputs.k, 64)
    assert is_page_view(v, inputs.v, 64)
    # The longest sequence, as the function sees it, is the one that the metadata were made for.
    assert called["page_table"].shape[1] * k.shape[1] == args[2]
    assert called["page_table"].tolist() == [[0, 1], [2, 0], [0, 0]]
    assert called["cache_seqlens"] is args[6]
    assert called["num_splits"] == 5
    assert called["scheduler_metadata"] is again["scheduler_metadata"]
    assert called["scheduler_metadata"].tolist() == [1]
    assert plan.config["version"] == "some-fa3 3.0.0"
    assert plan.config["page_size"] == 64


@pytest.mark.parametrize("num_splits", ["auto", -1, True, None])
def test_a_split_count_that_the_library_cannot_take_is_refused(
    fa3: tuple[FlashAttn3Paged, Hopper], num_splits: Scalar
) -> None:
    with pytest.raises(ValueError, match=r"num_splits: expected an integer >= 0 \(0: the library chooses\), got"):
        fa3[0].plan(problem(64), CPU, {"num_splits": num_splits})


def test_who_makes_the_schedule_is_asked_by_a_known_name(fa3: tuple[FlashAttn3Paged, Hopper]) -> None:
    with pytest.raises(ValueError, match="scheduled_by: expected one of plan, call, got 'host'"):
        fa3[0].plan(problem(64), CPU, {"scheduled_by": "host"})


@pytest.mark.parametrize("lens", [(0, 0), ()])
def test_a_batch_without_keys_is_neither_scheduled_nor_called(
    fa3: tuple[FlashAttn3Paged, Hopper], lens: tuple[int, ...]
) -> None:
    impl, library = fa3
    inputs = make_inputs(problem(*lens, heads=(8, 2)), 1, CPU)
    out = impl.plan(inputs.problem, CPU).run(inputs, None)
    assert out.lse is not None
    assert (out.out.shape, out.lse.shape) == ((len(lens), 8, 64), (len(lens), 8))
    assert (library.metadata, library.flash_attn_with_kvcache.calls) == ([], [])


def test_infinity_is_corrected_for_sequences_without_keys_alone(fa2: tuple[FlashAttn2Paged, KVCache]) -> None:
    inputs = make_inputs(problem(256, 0, heads=(8, 2)), 1, CPU)
    lse = fa2[0].plan(inputs.problem, CPU).run(inputs, None).lse
    assert lse is not None
    assert (lse[1] == -math.inf).all()
    assert lse[0].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "device", "rule"),
    [
        (problem(256), CPU, "device: expected cuda, got cpu"),
        (problem(256, dtype="float32"), CUDA, "dtype: expected float16 or bfloat16, got float32"),
        (problem(256, head_dim=68), CUDA, "head_dim: expected a multiple of 8 up to 256, got 68"),
        (problem(256, 255), CUDA, "kv_lens: expected multiples of 256 "),
    ],
)
def test_refusals_name_the_rule(
    fa2: tuple[FlashAttn2Paged, KVCache], shape: DecodeProblem, device: torch.device, rule: str
) -> None:
    refusal = fa2[0].unsupported(shape, device)
    assert refusal is not None
    assert refusal.startswith(rule)


def test_the_build_is_asked_with_one_page(
    fa2: tuple[FlashAttn2Paged, KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    impl, library = fa2
    assert impl.refusal_of_build(problem(256), CPU) is None
    assert library.calls[0][0][1].shape == (1, 256, 1, 64)
    asked: list[DecodeProblem] = []

    def remembering(tiny: DecodeProblem, device: torch.device) -> str:
        asked.append(tiny)
        return "flash-attn-2-paged: head dim 96 not built"

    monkeypatch.setattr(impl, "refusal_of_build", remembering)
    for shape in (problem(512, 256, head_dim=96), problem(768, head_dim=96)):
        assert impl.unsupported(shape, CUDA) == "flash-attn-2-paged: head dim 96 not built"
    assert asked == [problem(256, head_dim=96)]


def test_what_the_scheduler_refuses_is_quoted(
    fa3: tuple[FlashAttn3Paged, Hopper], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*args: Any, **options: Any) -> None:
        raise RuntimeError("no such head dim\nsecond line")

    impl, _ = fa3
    monkeypatch.setattr(impl, "_schedule", refusing)
    assert impl.refusal_of_build(problem(64), CPU) == "flash-attn-3-paged: no such head dim"


def test_flash_attn_3_wants_hopper(fa3: tuple[FlashAttn3Paged, Hopper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    refusal = "device: expected compute capability 9.x (Hopper), got 8.6"
    assert fa3[0].unsupported(problem(64), CUDA) == refusal


@pytest.mark.parametrize(
    ("impl", "module"), [(FlashAttn2Paged, "flash_attn"), (FlashAttn3Paged, "flash_attn_interface")]
)
def test_a_missing_library_says_what_import_said(
    monkeypatch: pytest.MonkeyPatch, impl: type[PagedImpl], module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImplUnavailable, match=f"import {module}: ModuleNotFoundError: "):
        impl()


def test_a_fault_of_the_device_is_no_refusal(
    fa3: tuple[FlashAttn3Paged, Hopper], monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulting(inputs: DecodeInputs, *_: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(fa3[0], "_function", faulting)
    with pytest.raises(torch.OutOfMemoryError):
        fa3[0].refusal_of_build(problem(64), CPU)
