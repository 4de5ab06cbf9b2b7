"""Findings are shrunk to the smallest problem on which they still come."""

from __future__ import annotations

import sys

import torch

from harness import record, reproduce
from harness.record import CHECKS_FILE, FINDINGS_FILE
from harness.reproduce import shrink
from impls.problem import DecodeProblem
from impls.torch_attention import TorchSdpa

CPU = torch.device("cpu")
P = DecodeProblem(kv_lens=(40, 7, 0, 33), heads_q=8, heads_kv=2, head_dim=64, dtype="float16")


class ReadsTheNext(TorchSdpa):
    """Adds the next sequence's first V with weight 0, where there is one."""

    def plan(self, problem, device, tuning=None):
        plan = super().plan(problem, device, tuning)
        run = plan.run

        def reads(inputs, out):
            output = run(inputs, out)
            ends = problem.cu_seqlens
            for b in range(problem.batch - 1):
                if problem.kv_lens[b] > 0 and ends[b + 1] < problem.total_kv:
                    output.out[b] += 0 * inputs.v[ends[b + 1], 0]
            return output

        plan.run = reads
        return plan


def test_shrinking_keeps_what_fails():
    least = shrink(P, lambda problem: max(problem.kv_lens, default=0) > 4 and problem.group > 1)
    assert (least.kv_lens, least.heads_q, least.heads_kv) == ((5,), 4, 1)
    assert shrink(P, lambda problem: True).kv_lens == ()
    asked = []
    assert shrink(P, lambda problem: bool(asked.append(problem)), max_trials=3) == P
    assert len(asked) == 3


def test_a_finding_is_shrunk_and_recorded(tmp_path, monkeypatch, capsys):
    given = record.check_record(
        run_id="r",
        case="case",
        impl="torch-sdpa",
        status="wrong",
        reason="normal memory: NaN",
        problem=P,
        seed=0,
        check={"finite": False, "rel_l2": None, "worst_row": None, "lse_err": None, "family": "normal memory"},
    )
    record.append(tmp_path / CHECKS_FILE, record.run_record("r", "study", {}), given)
    monkeypatch.setattr(sys, "argv", ["reproduce", str(tmp_path), "--device", "cpu"])

    monkeypatch.setattr(reproduce, "load", lambda name: ReadsTheNext())
    assert reproduce.main() == 0
    run, found = record.read(tmp_path / FINDINGS_FILE)
    assert (run["kind"], found["status"], found["check"]["family"]) == ("run", "wrong", "normal memory")
    assert found["problem"] == {**P.to_dict(), "kv_lens": [1, 1], "heads_q": 1, "heads_kv": 1}
    assert "NaN in 1 other sequences and around: row (sequence 0, head 0)" in found["reason"]
    assert capsys.readouterr().out.endswith("1 findings\n")

    monkeypatch.setattr(reproduce, "load", lambda name: TorchSdpa())
    assert reproduce.main() == 0
    *_, found = record.read(tmp_path / FINDINGS_FILE)
    assert (found["status"], found["problem"]) == ("ok", P.to_dict())
