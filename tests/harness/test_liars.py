"""Cheats go through the whole loop, and none of them comes out with a time that counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.runner import run_study
from harness.study import Case, Entry, Study
from harness.worker import METHODS, Setup
from impls.problem import DecodeProblem
from tests.harness import liars

SMALL = DecodeProblem(kv_lens=(70, 33), heads_q=4, heads_kv=2, head_dim=64, dtype="float16")
LARGE = DecodeProblem(kv_lens=(4096, 1000), heads_q=16, heads_kv=8, head_dim=128, dtype="float16")


def rows_of(folder: Path, problem: DecodeProblem, setup: Setup) -> Mapping[str, Any]:
    study = Study(
        name="liars",
        title="Liars",
        cases=(Case(name="case", problem=problem, seed=liars.SEED),),
        entries=tuple(Entry(impl=name, tuning={}) for name in setup.catalog),
        path=folder / "study.toml",
    )
    return {row["impl"]: row for row in run_study(study, setup=setup).rows}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    catalog = {
        "honest": "impls.torch_attention:TorchSdpa",
        "skips": "tests.harness.liars:Skips",
        "plans": "tests.harness.liars:Plans",
    }
    return rows_of(tmp_path_factory.mktemp("liars"), SMALL, Setup(device="cpu", catalog=catalog))


def test_the_honest_one_is_ok(on_cpu: Mapping[str, Any]) -> None:
    assert on_cpu["honest"]["status"] == "ok"


@pytest.mark.parametrize("liar", ["skips", "plans"])
def test_a_liar_is_wrong_on_a_cpu(on_cpu: Mapping[str, Any], liar: str) -> None:
    assert on_cpu[liar]["status"] == "wrong"
    assert on_cpu[liar]["timing"] is None


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("method", list(METHODS["cuda"]))
def test_liars_are_wrong_by_every_method_of_a_gpu(method: str, tmp_path: Path) -> None:
    catalog = {
        "honest": "impls.triton_splitkv:TritonSplitKV",
        "sdpa": "impls.torch_attention:TorchSdpa",
        "skips": "tests.harness.liars:Skips",
        "plans": "tests.harness.liars:Plans",
        "elsewhere": "tests.harness.liars:Elsewhere",
    }
    rows = rows_of(tmp_path, LARGE, Setup(device="cuda", catalog=catalog, method=method))
    assert {name: row["status"] for name, row in rows.items() if name in ("honest", "sdpa")} == {
        "honest": "ok",
        "sdpa": "ok",
    }
    for liar in ("skips", "plans"):
        assert rows[liar]["status"] == "wrong", rows[liar]["reason"]
        assert rows[liar]["timing"] is None
    assert rows["elsewhere"]["status"] in ("wrong", "invalid", "failed"), rows["elsewhere"]
    assert {row["timing"]["method"] for row in rows.values() if row["timing"]} == {method}
