"""What is Triton's own: the compiler's view of our kernels without a GPU, tiles, q's strides, the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.check import check_plan
from harness.inputs import make_inputs
from impls import triton_combine, triton_splitkv, triton_tile
from impls.contract import Scalar
from impls.reference import reference
from impls.splitkv_plan import WORK, work_of
from impls.triton_combine import FORMS, combine_form
from impls.triton_splitkv import TritonSplitKV
from impls.triton_tile import CPU, Machine, machine_of, sm_90
from tests.impls.cases import problem

ROOT = Path(__file__).parents[2]
H200 = sm_90(132)


def ask_compiler(question: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.impls.compile_triton", question],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_compiles_for_sm_90_without_spills() -> None:
    """Every tile that the rule picks on an H200, for all head dims, small and large groups, all kinds of work."""
    kernels = ask_compiler("resources")
    assert {f"d{dim}" for dim in (64, 80, 96, 128, 192, 256)} == {name.split()[1] for name in kernels}
    for name, used in kernels.items():
        assert used["stack"] == used["local"] == 0, f"{name}: expected no spills, got {used}"
        assert used["shared"] <= 232448, f"{name}: expected to fit an SM of an H200, got {used}"


@pytest.mark.parametrize(
    ("kv_lens", "work"),
    [
        ((1024, 1024), "short"),  # less than 256 keys a CTA
        ((8192,), "even"),
        ((8192,) * 16, "steady"),  # 4 MiB a CTA
        ((4096,) * 16, "even"),
        ((8192,) * 17, "rounds"),
        ((6000,) * 17, "spill"),  # a few more CTAs than SMs
        ((6000,) * 25, "rounds"),
        ((1024,) * 128, "crowd"),  # several rounds of CTAs of one length
        ((300, 548) * 120, "crowd"),
        ((300, 548) * 119 + (20_000,), "long"),  # one outlasts the others
        ((1877,) * 37, "packed"),
        ((4096,) * 37, "rounds"),
        ((4096,) * 64, "rounds"),
        ((300, 548) * 25, "crowd"),  # three CTAs an SM, of unlike sequences
        ((548,) * 50, "packed"),
        ((1024, 2048) * 20, "long"),  # long ones would meet on one SM
        ((1024, 2048) * 64, "crowd"),
        ((600, 6000, 2000), "short"),  # cut into splits that no round holds evenly
        ((1024,), "few"),  # eight CTAs
        ((60_000, 600_000, 200_000), "long"),
        ((), "few"),
    ],
)
def test_work_on_an_h200(kv_lens: tuple[int, ...], work: str) -> None:
    shape = replace(problem(), kv_lens=kv_lens, heads_q=32, heads_kv=8, head_dim=128)
    assert work_of(shape, 132) == work


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("splits_max", [1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 1000])
def test_a_combine_program_asks_for_all_splits_at_once_and_holds_them(head_dim: int, splits_max: int) -> None:
    form, num_warps = combine_form(head_dim, splits_max)
    assert form["BLOCK_S"] >= min(splits_max, 128)
    assert form["COLUMNS"] * form["BLOCK_S"] <= 2048 * num_warps
    assert 2 * form["COLUMNS"] > min(32, head_dim)
    assert form["COLUMNS"] & (form["COLUMNS"] - 1) == 0


def test_every_form_of_a_combine_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None may be compiled later, in front of a CUDA graph; none is run again for another tile."""
    asked: list[int] = []
    monkeypatch.setattr(triton_combine, "combine", lambda *tensors: asked.append(tensors[-1]))
    triton_combine.compile_forms.cache_clear()
    for _ in range(2):
        triton_combine.compile_forms(8, 64, torch.float16, torch.device("cpu"))
    triton_combine.compile_forms.cache_clear()
    assert asked == list(FORMS)


def test_new_lengths_and_batch_sizes_ask_for_no_specialisation() -> None:
    """Two of the split kernel, with a merge by exchange and without, and every form of the combine kernel."""
    assert ask_compiler("variants") == {"split": 2, "combine": len(FORMS)}


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that the rules take for an H200."""
    monkeypatch.setattr(triton_splitkv, "machine_of", lambda device: H200)
    return torch.device("cuda", 0)


def test_what_the_rules_know_of_an_h200() -> None:
    assert Machine(sms=132, shared_bytes=232448, registers=65536, capability=(9, 0)) == H200
    assert (H200.interprets, H200.pdl) == (False, True)
    assert (replace(H200, capability=(8, 9)).pdl, CPU.pdl, CPU.interprets) == (False, False, True)


def test_what_the_rules_know_of_the_device_that_is_here(device: torch.device) -> None:
    machine = machine_of(device)
    if device.type == "cpu":
        assert machine == CPU
        return
    properties = torch.cuda.get_device_properties(device)
    assert machine == Machine(
        sms=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
        registers=properties.regs_per_multiprocessor,
        capability=(properties.major, properties.minor),
    )
    if machine.capability == (9, 0):
        assert machine == sm_90(machine.sms)


@pytest.mark.parametrize(
    ("head_dim", "work", "an_sm"),
    [(128, "long", 1), (128, "short", 2), (128, "even", 2), (64, "long", 2), (64, "short", 2), (256, "even", 1)],
)
def test_programs_that_an_h200_surely_holds(head_dim: int, work: str, an_sm: int) -> None:
    """By shared memory, or else by registers: two programs of 128 threads."""
    shape = problem(1024, heads=(32, 8), head_dim=head_dim)
    tile = triton_tile.choose_tile(shape, H200, triton_tile.TILE_TUNING, work=work)
    assert triton_tile.at_once(shape, tile, H200) == 132 * an_sm


@pytest.mark.parametrize(
    ("heads", "head_dim", "batches"),
    [
        ((32, 8), 128, [(8192,) * 10, (8192,), (1024,) * 128, (600, 6000, 2000), (1877,) * 37, (4096,) * 64]),
        ((8, 1), 64, [(1200,) * 60 + (900,) * 140, (40_000, 300), (500,) * 40]),
    ],
)
def test_what_later_lengths_need_is_compiled_with_the_first_plan(
    monkeypatch: pytest.MonkeyPatch,
    h200: torch.device,
    heads: tuple[int, int],
    head_dim: int,
    batches: list[tuple[int, ...]],
) -> None:
    """A plan may be made in front of a CUDA graph, for lengths of any kind."""
    compiled: list[tuple[triton_tile.Tile, bool]] = []
    monkeypatch.setattr(triton_splitkv, "_compile", lambda *what: compiled.append(what[-2:]))
    exchanged = []
    monkeypatch.setattr(triton_splitkv, "TritonPlan", lambda *what: exchanged.append((what[-2], what[-1].exchange)))
    impl = TritonSplitKV()
    impl.plan(problem(1024, heads=heads, head_dim=head_dim), h200)
    first = list(compiled)
    for lens in batches:
        impl.plan(problem(*lens, heads=heads, head_dim=head_dim), h200)
    assert compiled == first
    assert set(exchanged) <= set(first)
    assert {exchange for _, exchange in exchanged} == {False, True}


@pytest.mark.parametrize(
    ("lens", "tuning", "splits"),
    [
        ((1569,) * 20, {}, 1),
        ((1569,) * 20, {"num_splits": 2}, 2),
        ((1569,) * 20, {"waves": 3}, 2),
        ((921,) * 10, {}, 3),  # fewer CTAs than SMs
    ],
)
def test_packed_work_of_over_a_cta_an_sm_is_not_split(
    lens: tuple[int, ...], tuning: dict[str, Scalar], splits: int
) -> None:
    """All CTAs are on the device at once: a round more or less means nothing."""
    shape = problem(*lens, heads=(64, 8), head_dim=256)
    choice = {**triton_splitkv.TUNING, **tuning}
    tile = triton_tile.choose_tile(shape, H200, choice, work=work_of(shape, 132))
    assert work_of(shape, 132) == "packed"
    assert triton_tile.at_once(shape, tile, H200) >= len(lens) * 8
    assert set(triton_splitkv.decide(shape, H200, choice, tile).table.counts.tolist()) == {splits}


def test_a_tile_of_more_than_16_rows_is_never_eager() -> None:
    for group, eager in ((4, True), (16, True), (17, False), (64, False)):
        shape = problem(1024, heads=(group, 1), head_dim=128)
        tile = triton_tile.choose_tile(shape, H200, {**triton_tile.TILE_TUNING, "eager": True}, work="long")
        assert tile.eager is eager


@pytest.mark.parametrize("work", WORK)
def test_who_chooses_the_keys_of_a_tile_gets_three_stages(work: str) -> None:
    shape = problem(1024, heads=(64, 1), head_dim=256)
    tile = triton_tile.choose_tile(shape, H200, {**triton_tile.TILE_TUNING, "block_n": 64}, work=work)
    assert (tile.block_n, tile.num_stages) == (64, 3)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"block_n": 48}, "block_n: expected a power of two >= 16, got 48"),
        ({"block_n": 8}, "block_n: expected a power of two >= 16, got 8"),
        ({"block_h": 24}, "block_h: expected a power of two >= 16, got 24"),
        ({"num_warps": 3}, "num_warps: expected a power of two >= 1, got 3"),
        ({"num_stages": 0}, "num_stages: expected an integer >= 1, got 0"),
        ({"eager": 1}, "eager: expected true, false or none, got 1"),
    ],
)
def test_bad_tiles_are_refused(device: torch.device, tuning: dict[str, Scalar], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TritonSplitKV().plan(problem(1), device, tuning)


@pytest.mark.parametrize("block_h", [16, 32])
@pytest.mark.parametrize("block_n", [16, 64])
def test_any_tile_is_right(device: torch.device, block_h: int, block_n: int) -> None:
    """Several head tiles on a KV head, whole and partial tiles of keys."""
    inputs = make_inputs(problem(0, 64, 100, heads=(40, 1)), 17, device)
    plan = TritonSplitKV().plan(inputs.problem, device, {"block_h": block_h, "block_n": block_n, "num_splits": 2})
    result = check_plan(plan, inputs, reference(inputs))
    assert result.ok, result.reason


def test_strided_queries_are_right(device: torch.device) -> None:
    """q cut out of a fused projection: rows and heads further apart than packed ones."""
    inputs = make_inputs(problem(70, 9, heads=(8, 2)), 19, device)
    fused = torch.full((2, 12, 96), torch.nan, dtype=inputs.q.dtype, device=device)
    fused[:, 2:10, 16:80] = inputs.q
    strided = replace(inputs, q=fused[:, 2:10, 16:80])
    plan = TritonSplitKV().plan(inputs.problem, device, {"num_splits": 2})
    result = check_plan(plan, strided, reference(inputs))
    assert result.ok, result.reason


def test_head_dims_over_256_are_refused_with_the_rule(device: torch.device) -> None:
    assert TritonSplitKV().unsupported(problem(1, head_dim=257), device) == "head_dim: expected <= 256, got 257"


def test_the_other_device_is_refused_with_the_reason() -> None:
    other = torch.device("cuda" if triton_splitkv.INTERPRETED else "cpu")
    reason = TritonSplitKV().unsupported(problem(1), other)
    assert reason is not None
    assert reason.startswith("device: expected")
    assert reason.endswith(f"got {other.type}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_results_are_rounded_to_nearest(device: torch.device, dtype: str) -> None:
    """One key: the output is V itself, to the bit; cutting off would show in every second element of bfloat16."""
    inputs = make_inputs(problem(1, 2, dtype=dtype), 23, device)
    plan = TritonSplitKV().plan(inputs.problem, device, {"num_splits": 1})
    out = plan.run(inputs, plan.new_output()).out
    assert torch.equal(out[0], inputs.v[0].expand_as(out[0]))
    result = check_plan(plan, inputs, reference(inputs))
    assert result.ok, result.reason
