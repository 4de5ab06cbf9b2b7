"""Random problems: the same on every machine, of every kind, and an interrupted run goes on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import fuzz, record
from harness.check import compare
from harness.fuzz import EDGES, MAX_KEYS, SHAPES, draw
from impls.catalog import OURS, load
from impls.problem import DecodeProblem
from impls.torch_attention import TorchSdpa
from tests.harness.honest import honest

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_draws_are_repeatable_and_cover_what_they_should():
    draws = [draw(0, number) for number in range(3000)]
    assert draws[17] == draw(0, 17)
    assert draws[17] != draw(1, 17)
    lens = [n for drawn in draws for n in drawn.problem.kv_lens]
    assert set(EDGES) <= set(lens)
    assert min(lens) == 0
    assert 65_000 < max(lens) <= MAX_KEYS
    assert max(drawn.problem.total_kv for drawn in draws) <= MAX_KEYS
    assert {drawn.problem.batch for drawn in draws} >= {0, 1, 2, 8, 16, 20}
    shapes = {(p.heads_q, p.heads_kv, p.head_dim, p.dtype) for p in (drawn.problem for drawn in draws)}
    assert shapes == set(SHAPES)
    assert {q // kv for q, kv, _, _ in shapes} >= {1, 4, 5, 6, 7, 8, 16, 24, 70}


def test_an_interrupted_run_goes_on(tmp_path):
    path = tmp_path / "random.jsonl"
    names = ("torch-sdpa", "flash-attn-2")
    few = fuzz.fuzz(path, count=3, seed=3, device="cpu", names=names)
    again = fuzz.fuzz(path, count=4, seed=3, device="cpu", names=names)
    assert again[: len(few)] == few
    assert [(r["case"], r["impl"]) for r in again] == [
        (f"random_0000{number}", name) for number in range(4) for name in names
    ]
    assert [r["status"] for r in again[::2]] == ["ok"] * 4
    assert {r["status"] for r in again[1::2]} <= {"unavailable", "unsupported"}  # here, or on a CPU
    assert fuzz.fuzz(path, count=4, seed=3, device="cpu", names=names, budget_s=0) == again
    assert sum(r["kind"] == "run" for r in record.read(path)) == 2


def test_several_processes_try_what_one_would(tmp_path):
    alone, together = (
        fuzz.fuzz(tmp_path / f"{jobs}.jsonl", count=6, seed=3, device="cpu", names=("torch-sdpa",), jobs=jobs)
        for jobs in (1, 2)
    )
    assert len(alone) == 6
    assert sorted(_without_run(alone), key=str) == sorted(_without_run(together), key=str)


def _without_run(rows):
    return [{key: value for key, value in row.items() if key != "run_id"} for row in rows]


def test_what_raises_is_recorded_and_left_behind(tmp_path, monkeypatch):
    class Raises(TorchSdpa):
        def plan(self, problem, device, tuning=None):
            raise RuntimeError("an illegal memory access was encountered")

    path = tmp_path / "random.jsonl"
    monkeypatch.setattr(fuzz, "_load", lambda name: Raises())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fuzz.fuzz(path, count=2, seed=3, device="cpu", names=("torch-sdpa",))
    monkeypatch.undo()
    rows = fuzz.fuzz(path, count=2, seed=3, device="cpu", names=("torch-sdpa",))
    assert [(r["case"], r["status"]) for r in rows] == [("random_00000", "failed"), ("random_00001", "ok")]
    assert rows[0]["reason"] == "RuntimeError: an illegal memory access was encountered"


def test_no_problem_is_begun_after_the_budget(tmp_path):
    path = tmp_path / "random.jsonl"
    assert fuzz.fuzz(path, count=3, seed=3, device="cpu", names=("torch-sdpa",), budget_s=0) == []


def test_a_wrong_answer_is_tried_again_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    class Doubles(TorchSdpa):
        def plan(self, problem, device, tuning=None):
            plan = super().plan(problem, device, tuning)
            run = plan.run

            def twice(inputs, out):
                output = run(inputs, out)
                output.out.mul_(2)
                return output

            plan.run = twice
            return plan

    monkeypatch.setattr(fuzz, "_load", lambda name: Doubles())
    number = next(n for n in range(100) if 0 < draw(0, n).problem.total_kv < 300)
    path = tmp_path / "random.jsonl"
    skipped = [record.run_record("r", "random", {})]
    for n in range(number):
        drawn = draw(0, n)
        row = {"status": "unsupported", "reason": "not now"}
        skipped.append(fuzz._record("r", drawn, "torch-sdpa", row))
    record.append(path, *skipped)
    *_, row = fuzz.fuzz(path, count=number + 1, seed=0, device="cpu", names=("torch-sdpa",))
    assert row["status"] == "wrong"
    assert row["config"]["again"]["worst_row"] < 1  # the real one is right
    assert f"{row['case']} torch-sdpa: row " in capsys.readouterr().out


# --- no false alarm ---------------------------------------------------------------------------------------


@given(number=st.integers(0, 10**9), splits=st.integers(1, 40), block=st.sampled_from([16, 64, 128, 512]))
@settings(max_examples=600, deadline=None)
def test_honest_kernels_pass_on_random_problems(number, splits, block):
    drawn = draw(0, number)
    if drawn.problem.kv_bytes > 4e6:  # the long ones are for a GPU
        drawn = draw(0, next(n for n in range(number, number + 1000) if draw(0, n).problem.kv_bytes <= 4e6))
    inputs, ref = fuzz.make_material(drawn, CPU)
    result = compare(honest(inputs, splits=splits, block=block), ref, drawn.problem)
    assert result.ok, f"{drawn}: {result.reason}"


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", OURS)
def test_our_kernels_pass_on_random_problems(name, data):
    """A few shapes alone: each is a compilation on a CPU."""
    heads_q, heads_kv, head_dim, dtype = data.draw(st.sampled_from([(4, 1, 64, "float16"), (4, 2, 96, "bfloat16")]))
    lens = data.draw(st.lists(st.sampled_from([n for n in EDGES if n < 300]), max_size=4))
    problem = DecodeProblem(
        kv_lens=tuple(lens),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        dtype=dtype,
        scale=data.draw(st.sampled_from([None, 0.01, 1.0])),
    )
    drawn = fuzz.Draw(
        sequence=0,
        number=0,
        problem=problem,
        family=data.draw(st.sampled_from(fuzz.FAMILY_NAMES)),
        layout=data.draw(st.sampled_from(["packed", "interleaved"])),
        num_splits=data.draw(st.sampled_from(fuzz.SPLITS)),
        seed=data.draw(st.integers(0, 2**31)),
    )
    row = fuzz.try_one(load(name), drawn, *fuzz.make_material(drawn, DEVICE))
    assert row["status"] == "ok", f"{drawn}: {row['reason']}"
