"""An ablation is no peer: being ahead of it says nothing about the libraries."""

from __future__ import annotations

from pathlib import Path

from harness.render.frame import load
from impls.catalog import ABLATIONS, IMPLS, OURS
from tests.harness import fake_records as fake


def test_ablations_are_in_the_catalog_and_not_ours() -> None:
    assert set(ABLATIONS) <= set(IMPLS)
    assert not set(ABLATIONS) & set(OURS)


def test_the_fastest_peer_is_a_library(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    rows = load([fake.write(tmp_path / "libraries", records)]).rows.set_index("label")
    assert rows.loc["triton-splitkv", "peer"] == "flash-attn-3"
    for record in records:
        if record.get("impl") == "flash-attn-3":
            record["impl"] = ABLATIONS[0]
    rows = load([fake.write(tmp_path / "ablation", records)]).rows.set_index("label")
    assert rows.loc[ABLATIONS[0], "us"] < rows.loc["flash-attn-2", "us"]
    assert rows.loc["triton-splitkv", "peer"] == "flash-attn-2"
