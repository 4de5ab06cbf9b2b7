"""What a report tells: its decisions, its figures and their captions, its links, and what it says is missing."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import font_manager
from matplotlib.text import Text

from harness import record as rec
from harness.render import looks, render_study
from harness.render.captions import CAPTIONS
from harness.render.decisions import decide
from harness.render.figures import FIGURES
from harness.render.frame import load
from harness.render.groups import MAX_PANELS, curves_of, launch_floor, pairs_of, sweeps_of
from harness.render.looks import SPARE, STYLES, WIDTH, style
from harness.render.markdown import WORDS
from harness.render.plots_detail import device_parts, rounding_floor
from harness.render.rows import _without_waiting
from harness.render.text import percent_text
from impls.catalog import DESCRIPTIONS, IMPLS, OURS
from impls.problem import DecodeProblem
from tests.harness import fake_records as fake

FAULT: Mapping[str, Any] = {
    **dict.fromkeys(("rel_l2", "worst_row", "lse_err", "worst_element", "worst_lse", "rel_row"), 1.5),
    "finite": True,
    "pairs": [],
    "probes": [
        {
            **dict.fromkeys(("rel_l2", "worst_row", "lse_err", "worst_element", "worst_lse", "rel_row"), 1.5),
            "family": "normal",
            "probe": "values",
            "ok": False,
            "finite": True,
            "reason": "off",
        }
    ],
}
RIGHT: Mapping[str, Any] = {"probes": [{**FAULT["probes"][0], "ok": True, "reason": None}]}
SWEEP: Mapping[str, DecodeProblem] = {f"b{b}_4k": fake.problem([4096] * b) for b in (1, 4, 16, 64)}


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rendered report of a study of split counts, with a profile."""
    folder = tmp_path_factory.mktemp("reports") / "h200-splits"
    records = fake.split_records()
    fake.write(folder, records)
    rec.append(folder / "records-kernels.jsonl", *fake.profiled(records, run_id="run-9"))
    render_study([folder])
    return folder


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rendered comparison of one study on two GPUs."""
    root = tmp_path_factory.mktemp("reports")
    cases = SWEEP | {"skew": fake.problem([32768, *[1024] * 31])}
    one = fake.write(root / "h200", fake.gpu_records(cases, run_id="run-a", study="h200"))
    other = fake.on_gpu(fake.gpu_records(cases, run_id="run-b", study="l4"), "NVIDIA L4")
    return render_study([one, fake.write(root / "l4", other)]).parent


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """The lines under one heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def retime(records: list[rec.Record], label: str, us: float) -> None:
    """Give one series the same time in every round."""
    for record in records:
        if record["kind"] == "measurement" and rec.series_label(record) == label:
            for i, sample in enumerate(record["timing"]["samples"]):
                sample["us"] = us * (1 + 1e-4 * (i % 3))


# What to run


def test_the_decision_names_the_fastest_its_splits_its_margin_and_ties(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    for label, us in {"tilelang-splitkv": 10.0, "triton-splitkv": 10.05, "flash-attn-3": 12.0}.items():
        retime(records, label, us)
    folder = fake.write(tmp_path / "study", records)
    [found] = decide(load([folder]))
    assert (found.best.impl, found.next.impl, found.ties) == (
        "tilelang-splitkv",
        "triton-splitkv",
        ("triton-splitkv",),
    )
    render_study([folder])
    told = section(text_of(folder), "What to run")
    anchor = rf"#r{found.best.line}"
    assert f"| `b1_8k` | 1 × 8,192 | `tilelang-splitkv` | auto: 16 | [10.0]({anchor})" in told
    assert re.search(r"\*\*tie\*\* with `triton-splitkv` \(\[0\.5 to 0\.5 %\]\(#r\d+\)\) \| 32 / 8, 128 \|", told)


def test_what_is_paired_by_round_and_what_is_a_median_is_said_once(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    records = [r for r in records if r.get("role") != "impl" or r["impl"] in OURS]
    for label, times in {"tilelang-splitkv": (10.0, 20.0, 30.0), "triton-splitkv": (22.0, 40.0, 31.0)}.items():
        [record] = [r for r in records if r["kind"] == "measurement" and rec.series_label(r) == label]
        for sample in record["timing"]["samples"]:
            sample["us"] = times[sample["round"] % 3]
    folder = fake.write(tmp_path / "study", records)
    render_study([folder])
    told = section(text_of(folder), "What to run")
    assert text_of(folder).count("is the median of ratios formed round by round") == 1
    assert "so it need not be the quotient of the two medians beside it." in told
    [found] = decide(load([folder]))
    assert found.margin is not None
    assert found.margin.median == pytest.approx(2.0), "where the medians' quotient is 1.55"


def test_a_first_plan_says_in_its_header_that_caches_may_have_been_warm(splits: Path) -> None:
    text = text_of(splits)
    header = "first plan, ms (caches warm or cold, not told apart)"
    assert f"| {header}, longest | plan µs, median |" in section(text, "By implementation")
    assert f"| {header} | plan µs |" in section(text, "All measurements")
    assert "these times are not to be compared from one implementation to another" in text
    assert "compile ms" not in text


def test_a_fixed_split_count_is_recommended_only_where_it_is_ahead(tmp_path: Path) -> None:
    records = fake.split_records({"b1_8k": fake.GPU_CASES["b1_8k"]}, counts=(4, 8, 16))
    for label, us in {"triton-splitkv": 10.0, "triton-splitkv num_splits=8": 9.98}.items():
        retime(records, label, us)
    [found] = decide(load([fake.write(tmp_path / "tie", records)]))
    assert (found.best.label, found.own) == ("triton-splitkv", None)
    retime(records, "triton-splitkv num_splits=8", 8.0)
    folder = fake.write(tmp_path / "ahead", records)
    [found] = decide(load([folder]))
    assert (found.best.label, found.own.label) == ("triton-splitkv num_splits=8", "triton-splitkv")
    render_study([folder])
    assert "| `triton-splitkv` | 8 (auto: 16 is 25.0 % slower) |" in text_of(folder)


def test_on_a_tie_our_kernel_is_named_before_an_ablation(tmp_path: Path) -> None:
    records = fake.with_everyone(fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]}))
    for label, us in {"tilelang-equal-splits": 10.0, "triton-splitkv": 10.04, "tilelang-splitkv": 10.05}.items():
        retime(records, label, us)
    folder = fake.write(tmp_path / "study", records)
    [found] = decide(load([folder]))
    assert (found.best.impl, found.next.impl) == ("tilelang-splitkv", "tilelang-equal-splits")
    assert found.ties == ("tilelang-equal-splits", "triton-splitkv")
    retime(records, "tilelang-equal-splits", 9.0)
    [found] = decide(load([fake.write(tmp_path / "ahead", records)]))
    assert (found.best.impl, found.next.impl) == ("tilelang-equal-splits", "triton-splitkv")


def same_as_ours(tmp_path: Path) -> Path:
    """A rendered report in which the ablation ran the very same as our kernel, and was faster by chance."""
    records = fake.with_everyone(fake.gpu_records({name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")}))
    config = {"function": "f", "block_n": 128, "splits_max": 8, "work_items": 64, "num_splits": "auto"}
    for r in records:
        if r.get("impl") == "tilelang-splitkv":
            r["config"] = config
        if r.get("impl") == "tilelang-equal-splits":
            r["config"] = config | {"num_splits": 8, "work_items": 64 if r["case"] == "b1_8k" else 32}
    for label, us in {"tilelang-equal-splits": 3.0, "tilelang-splitkv": 3.015, "triton-splitkv": 3.3}.items():
        retime(records, label, us)
    folder = fake.write(tmp_path / "study", records)
    render_study([folder])
    return folder


def test_an_ablation_that_runs_the_same_is_neither_a_tie_nor_counted(tmp_path: Path) -> None:
    folder = same_as_ours(tmp_path)
    comparison = load([folder])
    other, same = decide(comparison)
    assert (other.case, other.same, other.ties) == ("b1_1k", (), ("tilelang-equal-splits",))
    assert (same.best.impl, same.next.impl, same.ties) == ("tilelang-splitkv", "triton-splitkv", ())
    assert same.same == ("tilelang-equal-splits",)
    rows = comparison.impls.set_index(["case", "label"])
    assert rows.loc[("b1_8k", "tilelang-splitkv"), "slowdown"] == 1.0
    assert rows.loc[("b1_1k", "tilelang-equal-splits"), "slowdown"] == 1.0
    text = text_of(folder)
    assert re.search(r": `triton-splitkv`; `tilelang-equal-splits` runs the same \|", section(text, "What to run"))
    counts = "`tilelang-splitkv` on 2 and `tilelang-equal-splits` on 1."
    assert f"Fastest or tied, of 2 cases: {counts}" in section(text, "Who is ahead")
    assert "on 2 of 2 cases (`tilelang-equal-splits` on 1)." in text.splitlines()[4]
    assert re.search(r"\| `tilelang-splitkv` \| \[2 of 2\]\(#measurements\) \| 2 of 2 \| 1 of 2 \|", text)
    said = (
        "`tilelang-equal-splits` runs the same as `tilelang-splitkv` on `b1_8k` (one kernel, in one configuration"
    )
    assert said in section(text, "What to run")


def test_the_bound_stands_beside_the_time_it_is_held_against(tmp_path: Path) -> None:
    folder = fake.write(tmp_path / "study", fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]}))
    render_study([folder])
    [bound] = load([folder]).bounds.itertuples()
    row = next(
        line for line in section(text_of(folder), "What to run").splitlines() if line.startswith("| `b1_8k`")
    )
    assert f"| [{bound.us:.2f}](#{bound.anchor}) |" in row


@pytest.mark.parametrize(
    ("largest", "splits", "told"),
    [(5, 6, "up to 5; 1 of 2 sequences get 1"), (5, 8, "up to 5; 8 for 2 sequences"), (1, 2, "1 |")],
)
def test_the_splits_of_an_uneven_batch_are_told_as_far_as_a_record_knows(
    largest: int, splits: int, told: str, tmp_path: Path
) -> None:
    records = fake.gpu_records({"skew": fake.problem([8192, 64])})
    for r in records:
        if r.get("impl") == "tilelang-splitkv":
            r["config"] |= {"splits_max": largest, "work_items": 8 * splits, "block_h": 16}
    retime(records, "tilelang-splitkv", 1.0)
    folder = fake.write(tmp_path / "study", records)
    render_study([folder])
    assert f"| auto: {told}" in section(text_of(folder), "What to run")


def test_a_study_of_split_counts_counts_the_same_everywhere(tmp_path: Path) -> None:
    records = fake.split_records({"b1_8k": fake.GPU_CASES["b1_8k"]}, counts=(4, 8, 16))
    for label, us in {"triton-splitkv": 10.0, "triton-splitkv num_splits=8": 8.0, "tilelang-splitkv": 11.0}.items():
        retime(records, label, us)
    comparison = load([fake.write(tmp_path / "study", records)])
    rows = comparison.impls.set_index("label")
    assert rows.loc["triton-splitkv", "slowdown"] == 1.0
    assert rows.loc["triton-splitkv num_splits=8", "slowdown"] == pytest.approx(0.8, rel=1e-3)
    render_study([tmp_path / "study"])
    text = text_of(tmp_path / "study")
    lines = text.splitlines()
    assert lines[4].startswith("The split count that an implementation chooses by itself is within 1 % of the best")
    assert lines[4].endswith("the worst is 25.0 % slower (`triton-splitkv` on `b1_8k`: auto: 16, where 8 is best).")
    assert lines[5] == (
        "By its own choice of splits, `triton-splitkv` is the fastest, or ties with the fastest, on 1 of 1 case."
    )
    assert lines[6].startswith("Against `flash-attn-3` at its fastest split count, the only peer in this study, in")
    plans = [r["plan_us"] for r in records if r.get("impl") == "triton-splitkv" and not r["config"].get("asked")]
    assert lines[7].startswith(
        "Times are of calls with a plan that is made: new lengths want a new one, once for all"
    )
    assert f" and {statistics.median(plans):.1f} µs (`triton-splitkv`) in the median." in lines[7]
    assert "| `triton-splitkv` | [1 of 1](#measurements) | 1 of 1 | 1 of 1 |" in text
    assert "Fastest or tied, of 1 case: `triton-splitkv` on 1." in text
    assert "`triton-splitkv` is fastest or tied on 1 of 1 case, and reaches" in text
    assert "An implementation, with the splits that it chooses by itself, is *fastest or tied* on a case if" in text
    assert re.search(r"\*\*\[10\.0\]\(#r\d+\)\*\*", section(text, "Latency"))


def test_letters_are_of_the_font_that_comes_with_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have another version of it, and then, with a list of fonts of its own, no other."""
    fonts = font_manager.fontManager
    other = dataclasses.replace(fonts.ttflist[0], name="DejaVu Sans", fname="/usr/share/fonts/DejaVuSans.ttf")
    monkeypatch.setattr(fonts, "ttflist", [other])
    looks._own_fonts.cache_clear()
    try:
        with style():
            assert Path(font_manager.findfont("DejaVu Sans")).is_relative_to(matplotlib.get_data_path())
    finally:
        looks._own_fonts.cache_clear()


def test_words_are_explained_where_there_are_times(tmp_path: Path) -> None:
    render_study([fake.write(tmp_path / "gpu", fake.gpu_records())])
    text = text_of(tmp_path / "gpu")
    assert "What words mean: [Words](#words)." in text
    words = text.partition("\n### Words\n")[2].partition("To repeat it")[0]
    assert [line.split("**")[1] for line in words.splitlines() if line.startswith("- **")] == list(WORDS)


def test_no_difference_has_a_sign() -> None:
    assert [percent_text(ratio) for ratio in (0.9999, 1.0, 1.0001, 0.99, 1.25)] == [
        "0.0",
        "0.0",
        "0.0",
        "-1.0",
        "25.0",
    ]


def test_what_runs_is_told_from_the_records_and_the_catalog(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    records = [r for r in records if r.get("impl") != "torch-varlen"]
    for r in records:
        if r.get("impl") == "flash-attn-3":
            r["config"] |= {"library": "flash-attn", "version": "fa3 3.0", "function": "attn.varlen_func"}
        if r.get("impl") == "torch-sdpa":
            r |= {"impl": "my-kernel", "config": {}}
    folder = fake.write(tmp_path / "study", records)
    render_study([folder])
    told = section(text_of(folder), "What runs")
    assert f"| `flash-attn-3` | `attn.varlen_func` | flash-attn fa3 3.0 | {DESCRIPTIONS['flash-attn-3']} |" in told
    assert "| `my-kernel` | – | – | – |" in told
    assert "torch-varlen" not in told


def test_uneven_batches_state_the_largest_split_count(tmp_path: Path) -> None:
    folder = fake.write(tmp_path / "study", fake.gpu_records({"skew": fake.problem([8192, 64])}))
    render_study([folder])
    assert "| 2 sequences, 8,256 in all, longest 8,192 |" in text_of(folder)
    assert "| auto: up to 8 |" in text_of(folder)


def checks_beside(folder: Path, records: list[rec.Record], **env: object) -> None:
    """A study with a deeper check in which flash-attn-3 is wrong on one case, by code of this environment."""
    run = records[0] | {"run_id": "run-checks", "env": {**records[0]["env"], **env}}
    rec.append(folder / rec.CHECKS_FILE, run)
    for r in (r for r in records if r.get("impl") in ("triton-splitkv", "flash-attn-3")):
        bad = (r["case"], r["impl"]) == ("b1_8k", "flash-attn-3")
        told = {"status": "wrong", "reason": "normal: off", "check": FAULT} if bad else {"check": FAULT | RIGHT}
        rec.append(folder / rec.CHECKS_FILE, r | {"kind": "check", "timing": None, "run_id": "run-checks"} | told)


@pytest.mark.parametrize(
    ("env", "there"),
    [({}, True), ({"git": "fedcba98" * 5}, False), ({"gpu": "NVIDIA H100"}, False), ({"dirty": True}, False)],
)
def test_without_a_deeper_check_of_its_own_a_study_points_to_one_of_the_same_kernels(
    env: Mapping[str, object], there: bool, tmp_path: Path
) -> None:
    records = fake.gpu_records({name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")})
    folder = fake.write(tmp_path / "study", records)
    checks_beside(tmp_path / "other", records, **env)
    render_study([folder])
    [line] = [line for line in text_of(folder).splitlines() if line.startswith("Right in the check before each")]
    if there:
        assert line.endswith(
            "stands in [other](../other/README.md#deep), where `triton-splitkv` is right on 2 of 2 cases and"
            " `flash-attn-3` is right on 1 of 2."
        )
    else:
        assert line == "Right in the check before each timing; no deeper check was recorded."


def test_a_kernel_that_is_wrong_in_the_check_beside_a_study_is_marked_in_its_figures(tmp_path: Path) -> None:
    records = fake.gpu_records({name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")})
    folder = fake.write(tmp_path / "study", records)
    checks_beside(tmp_path / "other", records)
    comparison = load([folder])
    assert comparison.faulty == {"flash-attn-3"}
    for name in ("share", "slowdown", "support"):
        figure = FIGURES[name](comparison)
        assert figure is not None
        ticks = [t.get_text().replace("\n", "") for t in figure.axes[0].get_xticklabels()]
        legend = [t.get_text() for t in figure.legends[0].get_texts()] if figure.legends else ticks
        assert [text for text in legend if "†" in text] == ["flash-attn-3†"], name
    render_study([folder])
    text = text_of(folder)
    note = (
        "† not right on some case of the [deeper check](../other/README.md#deep) of the same kernels, in `other`."
    )
    assert text.count(note) == 7, "six figures, and the best peers"
    assert note in section(text, "Support")
    assert "| `flash-attn-3`† |" in section(text, "Support")
    assert (
        "How `flash-attn-3` is wrong, at worst: a row is off by up to 150 % of its own size, on `normal` inputs"
        in text
    )


def test_a_study_points_to_the_split_counts_and_the_second_run_beside_it(tmp_path: Path) -> None:
    cases = {name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k", "b16_8k")}
    folder = fake.write(tmp_path / "study", fake.gpu_records(cases))
    counts = fake.write(tmp_path / "counts", fake.split_records({n: cases[n] for n in ("b1_1k", "b1_8k")}))
    fake.write(tmp_path / "another", fake.on_gpu(fake.split_records(cases), "NVIDIA L4"))
    rec.replace_cases(folder / rec.REPEAT_FILE, fake.gpu_records(cases, run_id="run-b"))
    render_study([folder])
    assert section(text_of(folder), "Split counts").strip() == (
        "*No figure here: the study asks for no case at several fixed split counts;"
        " [counts](../counts/README.md#counts) does for 2 of these 3 cases, at the same commit and on a"
        " GPU of the same name.*"
    )
    render_study([counts])
    text = text_of(counts)
    assert '<a id="counts"></a>\n\n## Split counts' in text
    assert (
        "what differs from run to run is not in them; [study](../study/README.md#run-to-run) tells of two runs, at"
        " the same commit and on a GPU of the same name." in section(text, "What to run")
    )
    (folder / rec.REPEAT_FILE).unlink()
    render_study([counts])
    assert "what differs from run to run is not in them." in section(text_of(counts), "What to run")


def test_a_study_is_pointed_to_for_what_it_holds_and_not_for_its_name(tmp_path: Path) -> None:
    cases = {name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")}
    skew = {"skew": fake.problem([8192, 64, 64])}
    alike = {"skew": fake.problem([8192, 127, 1])}  # as many keys, and as many in the longest
    folder = fake.write(tmp_path / "study", fake.gpu_records(cases | skew))
    for name, mine in {"a": alike, "b": {"b1_8k": cases["b1_8k"]}, "z": cases}.items():
        fake.write(tmp_path / name, fake.split_records(mine))
        rec.replace_cases(tmp_path / name / rec.REPEAT_FILE, fake.gpu_records(mine, run_id="run-b"))
        checks_beside(tmp_path / name, fake.gpu_records(mine))
    render_study([folder])
    text = text_of(folder)
    assert "[z](../z/README.md#counts) does for 2 of these 3 cases" in text
    assert "[z](../z/README.md#run-to-run) tells of two runs" in text
    assert "stands in [z](../z/README.md#deep), where" in text
    only = fake.write(tmp_path / "only", fake.gpu_records(skew))
    render_study([only])
    assert "README.md#counts" not in text_of(only), "another problem of the same name"
    assert "README.md#run-to-run" not in section(text_of(only), "What to run")
    assert "stands in [a](../a/README.md#deep), where" in text_of(only), "the same kernels, on other cases"


def test_what_the_deeper_check_found_wrong_stands_at_the_top(tmp_path: Path) -> None:
    records = fake.gpu_records({name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")})
    folder = fake.write(tmp_path / "study", records)
    for r in [r for r in records if r.get("impl") in ("triton-splitkv", "flash-attn-3")]:
        bad = (r["case"], r["impl"]) == ("b1_8k", "triton-splitkv")
        told = {"status": "wrong", "reason": "normal: off", "check": FAULT} if bad else {"check": FAULT | RIGHT}
        rec.append(folder / rec.CHECKS_FILE, r | {"kind": "check", "timing": None} | told)
    render_study([folder])
    text = text_of(folder)
    told = "in the [deeper check](#deep) `triton-splitkv` is wrong on 1 of 2 cases."
    assert (
        f"\nRight in the check before each timing; {told}\nHow `triton-splitkv` is wrong, at worst: a row is off by"
        in text
    )
    assert '<a id="deep"></a>\n\n## Checked in depth' in text
    assert re.search(r"\| `triton-splitkv` \| \[2 of 2\]\(#measurements\) \| \*\*\[1 of 2\]\(#deep\)\*\* \|", text)
    assert re.search(r"\| `flash-attn-3` \| \[2 of 2\]\(#measurements\) \| \[2 of 2\]\(#deep\) \|", text)
    assert re.search(r"\| `torch-sdpa` \| \[2 of 2\]\(#measurements\) \| – \|", text), "which was not tried"
    assert len(re.findall(r"\[ok\]\(#r\d+\)†", section(text, "Support"))) == 1
    assert "| `triton-splitkv`† |" in section(text, "What to run")
    assert section(text, "What to run").endswith("† not right in the [deeper check](#deep).\n\n")
    assert "† not right in the [deeper check](#deep) on some case." in section(text, "Who is ahead")


def test_a_best_peer_that_the_deeper_check_found_wrong_is_marked(tmp_path: Path) -> None:
    records = fake.gpu_records({name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")})
    folder = fake.write(tmp_path / "study", records)
    (bad,) = (r for r in records if (r.get("case"), r.get("impl")) == ("b1_8k", "flash-attn-3"))
    told = {"kind": "check", "timing": None, "status": "wrong", "reason": "normal: off", "check": FAULT}
    rec.append(folder / rec.CHECKS_FILE, bad | told)
    render_study([folder])
    said = section(text_of(folder), "Who is ahead").partition("### Against the best peer")[2]
    of_case = {line.split("`")[1]: line for line in said.splitlines() if line.startswith("| `b1")}
    assert "`flash-attn-3`† by" in of_case["b1_8k"]
    assert "†" not in of_case["b1_1k"]
    assert "with its interval. † not right in the [deeper check](#deep)." in said


# Figures and captions


def test_every_figure_has_its_words_and_every_implementation_its_look() -> None:
    assert list(FIGURES) == list(CAPTIONS)
    assert set(IMPLS) <= set(STYLES)
    assert set(IMPLS) == set(DESCRIPTIONS)
    both = [*STYLES.values(), *SPARE]
    assert len({colour for colour, _ in both}) == len({marker for _, marker in both}) == len(both)


# What the three kinds of colour-blindness leave of linear RGB, at full severity: G. M. Machado, M. M. Oliveira and
# L. A. F. Fernandes, "A physiologically-based model for simulation of color vision deficiency", IEEE TVCG 15, 2009.
SIGHT = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9309, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def seen(colour: str, sight: str) -> npt.NDArray[np.float64]:
    """CIE L*a*b* of a colour as someone sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]
    xyz = np.array(to_xyz) @ np.clip(np.array(SIGHT[sight]) @ linear, 0, 1) / [0.9505, 1, 1.0888]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_stay_apart_for_everybody(sight: str) -> None:
    for a, b in itertools.combinations(STYLES, 2):
        apart = np.linalg.norm(seen(STYLES[a][0], sight) - seen(STYLES[b][0], sight))
        assert apart > 12, f"{a} and {b}"


def test_split_counts_are_a_figure_and_not_series_of_others(splits: Path) -> None:
    comparison = load([splits])
    assert len(comparison.series) == 27
    assert comparison.shown == ("tilelang-splitkv", "triton-splitkv", "flash-attn-3")
    curves = curves_of(comparison)
    assert len(curves) == 9
    first = curves[0]
    assert [row.asked_splits for row in first.fixed] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert first.own is not None
    assert first.own.label == "tilelang-splitkv"
    told = section(text_of(splits), "Split counts")
    assert "figures/splits.png" in told
    assert re.search(
        r"chooses by itself is within 1 % of the best fixed count tried, or ahead of it, on \d of 9 \(", told
    )
    row = next(line for line in told.splitlines() if line.startswith("| `b1_8k` | `triton-splitkv`"))
    assert "| auto: 16 | " in row


def explained_splits(tmp_path: Path, *, traced: bool = True) -> Path:
    """A rendered study of split counts whose kernels merge in different ways, and what was traced of it."""
    cases = {name: fake.GPU_CASES[name] for name in ("b1_8k", "skew_1x128k_31x1k")}
    records = fake.merging(fake.split_records(cases))
    for r in records:
        if str(r.get("case")).startswith("skew") and r["config"].get("splits_max") == 1:
            for sample in r["timing"]["samples"]:
                sample["us"] *= 4  # for one CTA reads the longest sequence alone
    folder = fake.write(tmp_path / "study", records)
    if traced:
        rec.append(folder / "records-kernels.jsonl", *fake.split_profiles(records, run_id="run-9"))
    render_study([folder])
    return folder


def lines_of(told: str, case: str, label: str) -> list[list[str]]:
    """The cells of the lines of all tables that begin with a case and an implementation."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in told.splitlines()]
    return [row for row in rows if row[:2] == [f"`{case}`", f"`{label}`"]]


def test_too_few_and_too_many_splits_are_explained_part_by_part(tmp_path: Path) -> None:
    folder = explained_splits(tmp_path)
    rows = load([folder]).impls.set_index(["case", "label"])
    told = section(text_of(folder), "Split counts")
    short, *long = lines_of(told, "b1_8k", "triton-splitkv")
    one, best, most = (rows.loc[("b1_8k", f"triton-splitkv num_splits={n}")] for n in (1, 16, 128))
    assert (best["main_net_us"], best["others_net_us"]) == (pytest.approx(best["traced_us"]), 0), "merges inside"
    assert most["others_net_us"] == pytest.approx(8.4), "the combine kernel's wait is not its work"
    assert most["main_us"] < most["others_us"], "and longer than the split kernel with it"
    few = one["traced_us"] - best["traced_us"]
    assert f", traced +{few:.1f} µs (split kernel +{few:.1f}); 8 CTAs for 132 SMs, 4.19 MB each" in short[7]
    many = most["traced_us"] - best["traced_us"]
    assert (
        f", traced +{many:.2f} µs (split kernel {many - 8.4:+.2f}, combine kernel +8.40); 1,024 CTAs of" in short[8]
    )
    assert [line[2:8] for line in long] == [
        ["1", "fewest", "nothing to merge", "8", "0.061", "4.19 MB"],
        ["16", "default, best", "by exchange", "128", "0.97", "262 KB"],
        ["128", "most", "by a combine kernel", "1,024", "7.8", "32.8 KB"],
    ]
    assert [line[10] for line in long] == ["0.00", "in the split kernel", "8.40"]
    for line in long:
        us = [0.0 if cell == "in the split kernel" else float(cell) for cell in line[9:13]]
        assert sum(us[:3]) == pytest.approx(us[3], abs=0.06)
    peer = lines_of(told, "b1_8k", "flash-attn-3")
    assert re.search(r"\(longest kernel \+\d+\.\d\)$", peer[0][7]), "its other kernels take the same"
    assert [line[10:12] for line in peer[1:]] == [["4.00", "0.50"]] * len(peer[1:])


def test_the_caption_of_split_counts_says_where_their_time_goes(tmp_path: Path) -> None:
    told = section(text_of(explained_splits(tmp_path)), "Split counts")
    assert re.search(
        r"With the fewest splits 5 \(implementation, case\) pairs lose over 1 % against their best count; most of"
        r" that time goes in the split kernel \(of others the longest\) on 5 \(CTAs, known on 4: fewer than the"
        r" device has SMs on 2 and for sequences of unlike length on 2\); the most on `\S+` on `skew_\w+`, asked"
        r" for 1: traced \+\d+\.\d µs \(split kernel \+\d+\.\d\)\.",
        told,
    )
    assert "With the most splits 6 (implementation, case) pairs lose over 1 %" in told
    assert told.count("Splits that merge in a cluster or by exchange do so inside of the split kernel") == 2
    assert "Traced in run `run-9`." in told


def test_a_trace_of_another_configuration_or_commit_is_told_apart(tmp_path: Path) -> None:
    folder = explained_splits(tmp_path)
    run, *profiles = rec.read(folder / "records-kernels.jsonl")
    run["env"] |= {"git": "fedcba98" * 5}
    [other] = [r for r in profiles if (r["case"], rec.series_label(r)) == ("b1_8k", "triton-splitkv num_splits=1")]
    other["config"] |= {"block_n": 64}
    for r in profiles:
        r["config"] |= {"said_by_later_code": True}
    (folder / "records-kernels.jsonl").unlink()
    rec.append(folder / "records-kernels.jsonl", run, *profiles)
    render_study([folder])
    told = section(text_of(folder), "Split counts")
    short, first, *_ = lines_of(told, "b1_8k", "triton-splitkv")
    assert "traced" not in short[7]
    assert first[9:] == ["not traced", "–", "–", "–"]
    assert "Traced in run `run-9`, at commit `fedcba98fedc` where the times are of `0123456789ab`." in told
    assert (
        "Traced in another version or configuration than timed, or with other splits, so left out:"
        " `triton-splitkv num_splits=1` on `b1_8k`." in told
    )
    assert ", which traces show on 4; most of that time goes" in told
    parts = section(text_of(folder), "Where the time goes")
    assert "Traced in run `run-9`, at commit `fedcba98fedc` where the times are of `0123456789ab`." in parts
    assert (
        "Traced in another version or configuration than timed: `triton-splitkv num_splits=1` on `b1_8k`." in parts
    )
    for r in profiles:
        r["config"] |= {"version": "2"}
    records = rec.read(folder / "records.jsonl")
    for r in records[1:]:
        r["config"] |= {"version": "1"}
    for path in folder.glob("*.jsonl"):
        path.unlink()
    fake.write(folder, records)
    rec.append(folder / "records-kernels.jsonl", run, *profiles)
    render_study([folder])
    told = section(text_of(folder), "Split counts")
    assert told.count("All of what was traced is of another version or configuration than was timed") == 2
    assert "No record says" not in told


def test_without_a_profile_the_work_items_explain_too_few_and_too_many(tmp_path: Path) -> None:
    folder = explained_splits(tmp_path, traced=False)
    told = section(text_of(folder), "Split counts")
    assert ", 8 CTAs for 132 SMs, 4.19 MB each |" in told
    assert ", 256 CTAs for 132 SMs, 2.61 MB each in the mean and at most 67.1 MB |" in told, (
        "the longest sequence, alone"
    )
    assert ", 1,024 CTAs of 32.8 KB and up to 128 partial results a row to merge |" in told
    assert (
        told.count("No record says which kernels the time of these split counts goes to: `splitkv run STUDY") == 2
    )
    assert "split (longest) kernel" not in told
    assert "traced" not in told
    assert lines_of(told, "b1_8k", "triton-splitkv")[1][2:8] == [
        *("1", "fewest", "nothing to merge", "8", "0.061", "4.19 MB")
    ]


def test_a_profile_is_a_figure_with_its_sums(splits: Path) -> None:
    told = section(text_of(splits), "Where the time goes")
    assert "figures/parts.png" in told
    assert "The parts add up to the untraced time within 5 % or 1 µs on all of 81 traced measurements." in told
    assert "programmatic dependent launch" not in told, "nothing overlaps"


def overlapping(tmp_path: Path, *, total_us: float = 12.0) -> Path:
    """A rendered report of one case in which our kernels wait, as they do, for the kernel before them."""
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    folder = fake.write(tmp_path / "study", records)
    profiles = fake.profiled(records, run_id="run-9")
    split, combine = {"name": "split", "us": 23.0}, {"name": "combine", "us": 21.0}
    waits = {
        "tilelang-splitkv": ([split], 0.0, -11.0),  # for the call before
        "triton-splitkv": ([split, combine], -19.0, 0.0),  # for the other kernel of its call
    }
    for r in profiles:
        if r.get("impl") in waits:
            kernels, gap, between = waits[r["impl"]]
            traced = sum(kernel["us"] for kernel in kernels) + gap + between
            told = {"kernels": kernels, "gap_us": gap, "between_us": between, "traced_us": traced}
            r["timing"]["breakdown"] = {**r["timing"]["breakdown"], **told, "total_us": total_us}
    bound = next(r for r in records if r.get("impl") == rec.STREAM_READ)
    plain = {"calls": 9, "kernels": [split], "gap_us": 0.0, "between_us": 0.25, "traced_us": 23.2, "total_us": 23.2}
    timing = bound["timing"] | {"method": "kernels", "breakdown": plain}
    rec.append(folder / "records-kernels.jsonl", *profiles, bound | {"run_id": "run-9", "timing": timing})
    render_study([folder])
    return folder


def test_the_wait_of_a_kernel_that_is_put_in_place_early_is_taken_off(tmp_path: Path) -> None:
    folder = overlapping(tmp_path)
    comparison = load([folder])
    rows = comparison.impls.set_index("label")
    stacked = device_parts(rows)
    assert all((values.dropna() >= 0).all() for values in stacked.values())
    assert sum(values.fillna(0) for values in stacked.values()).to_list() == pytest.approx(
        rows["traced_us"].to_list()
    )
    told = section(text_of(folder), "Where the time goes")
    assert told.count("(programmatic dependent launch), and then waits within its own traced time.") == 2
    of_impl = {line.split("`")[3]: line for line in told.splitlines() if line.startswith("| `b1_8k`")}
    assert "| 1 | 12.0 | 0.00 | 0.00 | 0.00 | 12.0 | 12.0 | yes | 23.0 |" in of_impl["tilelang-splitkv"]
    assert "| 2 | 23.0 | 2.00 | 0.00 | 0.00 | 25.0 | 12.0 | **no** | – |" in of_impl["triton-splitkv"]
    method = section(text_of(folder), "Method")
    assert (
        "Traces show calls of `tilelang-splitkv` overlapping with the call before: the first kernel is put"
        in method
    )
    assert "start of the next, 0.25 µs pass, and they are in its time." in method


@pytest.mark.parametrize(
    ("parts", "net"),
    [
        ((10.0, 2.0, 0.5, 1.0), (10.0, 2.0, 0.5, 1.0)),
        ((23.0, 0.0, 0.0, -11.0), (12.0, 0.0, 0.0, 0.0)),
        ((10.0, 2.0, -3.0, 1.0), (9.0, 0.0, 0.0, 1.0)),  # more than the others have
        ((5.0, 4.0, 0.5, -6.0), (0.0, 3.0, 0.5, 0.0)),  # more than the longest has
    ],
)
def test_no_part_is_below_zero_and_their_sum_stays(parts: tuple[float, ...], net: tuple[float, ...]) -> None:
    assert tuple(_without_waiting(*parts).values()) == net
    assert sum(net) == sum(parts)


def test_what_does_not_add_up_is_named_with_samples_that_lie_far_apart(tmp_path: Path) -> None:
    folder = overlapping(tmp_path)
    lines = rec.read(folder / "records.jsonl")
    retime(lines, "triton-splitkv", 30.0)
    [triton] = [r for r in lines if r.get("impl") == "triton-splitkv"]
    triton["timing"]["samples"][0]["us"] = 20.0
    (folder / "records.jsonl").unlink()
    fake.write(folder, lines)
    render_study([folder])
    told = section(text_of(folder), "Where the time goes")
    assert (
        "on 5 of 6 traced measurements, and not for `triton-splitkv` on `b1_8k` (samples from 20.0 to 30.0 µs);"
        " times so far apart fall into separate groups" in told
    )


def test_a_batch_sweep_names_the_steepest_cliff(tmp_path: Path) -> None:
    records = fake.gpu_records(SWEEP)
    fallen = next(r for r in records if r.get("impl") == "flash-attn-3" and r["case"] == "b64_4k")
    for sample in fallen["timing"]["samples"]:
        sample["us"] *= 2
    folder = fake.write(tmp_path / "study", records)
    [sweep] = sweeps_of(load([folder]))
    assert sorted(set(sweep.rows["batch"])) == [1, 4, 16, 64]
    render_study([folder])
    told = section(text_of(folder), "Batch size")
    assert "figures/batch.png" in told
    assert re.search(r"The steepest cliff is `flash-attn-3`'s: from 8\d % of the bound at 16 to 4\d % at 64", told)


def test_a_figure_shows_so_many_panels_and_says_of_how_many(tmp_path: Path) -> None:
    cases = {f"b{b}_{n}": fake.problem([n] * b) for n in range(100, 1200, 100) for b in (1, 2, 4)}
    comparison = load([fake.write(tmp_path / "study", fake.gpu_records(cases, n=5))])
    assert len(sweeps_of(comparison)) == 11
    figure = FIGURES["batch"](comparison)
    assert figure is not None
    assert len(figure.axes) == MAX_PANELS
    assert CAPTIONS["batch"].reading(comparison).endswith(f"{MAX_PANELS} of 11 lengths are drawn.")


def test_uneven_batches_stand_beside_even_ones_of_about_the_same_bytes(tmp_path: Path) -> None:
    cases = {
        "even": fake.problem([4096] * 16),
        "one": fake.problem([65536]),
        "skew": fake.problem([32768, *[1024] * 31]),
        "wide": fake.problem([2048, *[1024] * 63]),
        "other_heads": fake.problem([4096, 64], heads=(8, 1)),
    }
    comparison = load([fake.write(tmp_path / "study", fake.gpu_records(cases))])
    assert [(pair.uneven, pair.even) for pair in pairs_of(comparison)] == [("skew", "even")]
    render_study([tmp_path / "study"])
    told = section(text_of(tmp_path / "study"), "Uneven batches")
    assert "figures/skew.png" in told
    assert "Without one in the study: `other_heads`, `wide`." in told, "16 sequences are too few beside 64"
    assert re.search(r"Uneven lengths cost `\S+` a factor of \d+\.\d", told)


def test_the_launch_floor_is_where_the_bound_ends_at_no_bytes(tmp_path: Path) -> None:
    comparison = load([fake.write(tmp_path / "study", fake.gpu_records(n=40))])
    assert launch_floor(comparison.bounds) == pytest.approx(2.0, abs=0.1), "what the model puts in"
    assert launch_floor(comparison.bounds.head(2)) is None


@pytest.mark.parametrize(("dtype", "places"), [("bfloat16", 8), ("float16", 11)])
def test_the_floor_of_a_dtype_is_what_rounding_costs(dtype: str, places: int) -> None:
    x = np.random.default_rng(0).normal(size=200_000)
    step = 2.0 ** (np.floor(np.log2(np.abs(x))) + 1 - places)
    rounded = np.round(x / step) * step
    assert rounding_floor(dtype) == pytest.approx(np.linalg.norm(rounded - x) / np.linalg.norm(x), rel=0.01)


def test_what_has_no_figure_says_so_where_one_looks_for_it(tmp_path: Path) -> None:
    folder = fake.write(tmp_path / "study", fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]}))
    render_study([folder])
    text = text_of(folder)
    for title, why in {
        "Split counts": "the study asks for no case at several fixed split counts",
        "Where the time goes": "no record says what a call consists of",
        "Batch size": "the study holds no length at 3 batch sizes or more with a time and the bound's",
        "Uneven batches": "the study times no batch of different lengths beside its bound",
    }.items():
        assert section(text, title).strip() == f"*No figure here: {why}.*"


# Links, gaps, several GPUs


def test_every_link_leads_to_a_line_and_from_there_to_its_record(splits: Path) -> None:
    text = text_of(splits)
    anchors = re.findall(r'<a id="(\w+)"></a>', text)
    assert len(anchors) == len(set(anchors))
    used = set(re.findall(r"\]\(#(\w+)\)", text))
    assert used <= set(anchors)
    assert {f"r{row.line}" for row in load([splits]).impls.itertuples()} <= used
    lines = (splits / "records.jsonl").read_text(encoding="utf-8").splitlines()
    for number in re.findall(r"\[\d+\]\(records\.jsonl#L(\d+)\)", text):
        assert '"kind":"measurement"' in lines[int(number) - 1]


def test_every_mark_of_a_figure_links_to_its_measurement(splits: Path) -> None:
    comparison = load([splits])
    shown = comparison.impls[comparison.impls["label"].isin(comparison.shown)]
    for name in ("share", "slowdown", "latency", "error", "support", "parts"):
        svg = (splits / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        linked = set(re.findall(r'<a xlink:href="\.\./README\.md#(r\d+)"', svg))
        assert linked == set(shown["anchor"]), name
    svg = (splits / "figures" / "splits.svg").read_text(encoding="utf-8")
    assert set(re.findall(r'"\.\./README\.md#(r\d+)"', svg)) == set(comparison.impls["anchor"])


def test_a_cell_without_a_finite_sample_is_a_gap_that_says_so(tmp_path: Path) -> None:
    records = fake.gpu_records({name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")})
    empty = next(r for r in records if r.get("impl") == "triton-splitkv" and r["case"] == "b1_8k")
    for sample in empty["timing"]["samples"]:
        sample["us"] = None
    folder = fake.write(tmp_path / "study", records)
    render_study([folder])
    assert re.search(r"\| `b1_8k` \|.*\[\*no finite sample\*\]\(#r\d+\)", text_of(folder))


def test_two_gpus_share_no_line_and_no_mean(two_gpus: Path) -> None:
    text = text_of(two_gpus)
    assert "On H200, against the best peer of each case" in text
    assert "On L4, against the best peer of each case" in text
    summary = section(text, "By implementation")
    assert summary.count("| `triton-splitkv` | H200 |") == summary.count("| `triton-splitkv` | L4 |") == 1
    assert "over 5 of 5" in summary
    comparison = load([two_gpus.parent / "h200", two_gpus.parent / "l4"])
    assert comparison.devices == ("H200", "L4")
    assert [sorted(set(sweep.rows["device"])) for sweep in sweeps_of(comparison)] == [["H200"], ["L4"]]
    for pair in pairs_of(comparison):
        assert pair.uneven.split("/")[0] == pair.even.split("/")[0]


def test_figures_of_two_gpus_have_a_panel_each_or_name_them(two_gpus: Path) -> None:
    comparison = load([two_gpus.parent / "h200", two_gpus.parent / "l4"])
    latency = FIGURES["latency"](comparison)
    batch = FIGURES["batch"](comparison)
    assert latency is not None
    assert batch is not None
    assert [ax.get_title() for ax in latency.axes] == ["H200", "L4"]
    assert [ax.get_title().split(", ")[-1] for ax in batch.axes] == ["H200", "L4"]
    assert all(label.endswith(("\nH200", "\nL4")) for label in looks.case_labels(comparison, comparison.cases))


def test_links_of_several_studies_lead_to_their_own_records(two_gpus: Path) -> None:
    text = text_of(two_gpus)
    assert re.search(r'<a id="s0r3"></a>\[3\]\(\.\./h200/records\.jsonl#L3\)', text)
    assert re.search(r'<a id="s1r3"></a>\[3\]\(\.\./l4/records\.jsonl#L3\)', text)


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one = {"b1_8k": fake.GPU_CASES["b1_8k"]}
    folders = [fake.write(tmp_path / p / "study", fake.gpu_records(one, run_id=f"run-{p}")) for p in ("a", "b")]
    assert load(folders).cases == ("a-study/b1_8k", "b-study/b1_8k")
    assert render_study(folders) == tmp_path / "a" / "a-study+b-study" / "README.md"
    with pytest.raises(ValueError, match="folders: expected each once"):
        load([folders[0], folders[0]])


# What a picture looks like


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of every implementation of the catalog, on cases for every figure, some of them faulty."""
    cases = SWEEP | {"skew_1x128k_31x1k": fake.problem([131072, *[1024] * 63]), "b8_8k": fake.problem([8192] * 8)}
    faults = {
        ("*", "torch-varlen"): ("unsupported", "expected head_dim 64, got 128"),
        ("b1_4k", "flash-attn-3"): ("unavailable", "not here"),
        ("b8_8k", "triton-splitkv"): ("wrong", "row 3"),
        ("b8_8k", "torch-sdpa"): ("wrong", "row 4"),
    }
    records = fake.with_everyone(fake.gpu_records(cases, faults=faults))
    folder = fake.write(tmp_path_factory.mktemp("reports") / "everyone", records)
    rec.append(folder / "records-kernels.jsonl", *fake.profiled(records, run_id="run-9"))
    return folder


@pytest.mark.parametrize(
    ("study", "name"), [("splits", "splits"), *(("everyone", name) for name in FIGURES if name != "splits")]
)
def test_no_text_overlaps_another_and_all_of_it_is_inside(
    study: str, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Asked of the texts that are drawn: ticks beyond an axis have a text too, but it never is."""
    drawn: dict[int, Text] = {}
    draw = Text.draw

    def remember(text: Text, *arguments: Any, **options: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            drawn[id(text)] = text
        draw(text, *arguments, **options)

    with style():
        figure = FIGURES[name](load([request.getfixturevalue(study)]))
        assert figure is not None
        monkeypatch.setattr(Text, "draw", remember)
        figure.draw_without_rendering()
        boxes = [(t.get_text(), t.get_window_extent().shrunk(0.96, 0.9)) for t in drawn.values()]
    assert len(boxes) > 5
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), f"{a!r} and {b!r}"
    for text, box in boxes:
        assert box.x0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
    assert figure.get_size_inches()[0] == WIDTH


@pytest.mark.parametrize("name", ["latency", "share"])
def test_our_kernels_lie_on_top(everyone: Path, name: str) -> None:
    comparison = load([everyone])
    figure = FIGURES[name](comparison)
    assert figure is not None
    marks = next(c for c in reversed(figure.axes[0].collections) if c.get_urls()[0] is not None)
    of_url = {looks.url_of(row.anchor): row.impl for row in comparison.impls.itertuples()}
    order = [of_url[url] for url in marks.get_urls()]
    ours = [impl for impl in order if impl in OURS]
    assert order[-len(ours) :] == ours
    assert order[-1] == OURS[0]


def test_marks_of_two_implementations_do_not_lie_on_each_other_in_the_error_figure(everyone: Path) -> None:
    comparison = load([everyone])
    with style():
        figure = FIGURES["error"](comparison)
        assert figure is not None
        figure.draw_without_rendering()
    for ax, column in zip(figure.axes, ("rel_l2", "worst_row"), strict=True):
        marks = ax.collections[0]
        shown = comparison.impls[comparison.impls[column].notna()]
        labels = list(shown["label"])
        places = ax.transData.transform(marks.get_offsets()) * 72 / figure.dpi
        assert len(places) == len(labels) > 20
        wide = math.sqrt(marks.get_sizes()[0])
        for (one, a), (other, b) in itertools.combinations(zip(places, labels, strict=True), 2):
            assert a == b or abs(one[0] - other[0]) >= 0.9 * wide or abs(one[1] - other[1]) >= 0.9 * wide, (a, b)


@pytest.fixture(scope="module")
def half_traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rendered report in which only one implementation was traced, and another is refused on one case."""
    cases = {name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k", "b64_4k")}
    records = fake.gpu_records(cases, faults={("b1_8k", "flash-attn-2"): ("unsupported", "not this one")})
    for r in records:
        if r.get("timing") and r["impl"] != "torch-varlen":
            r["timing"]["host"] = {"launch_us": 20.0, "end_to_end_us": 50.0}
        if r.get("impl") == "torch-varlen":
            r["plan_us"] = None
    folder = fake.write(tmp_path_factory.mktemp("reports") / "half", records)
    traced = [r for r in fake.profiled(records, run_id="run-9") if r.get("impl") in (None, "triton-splitkv")]
    rec.append(folder / "records-kernels.jsonl", *traced)
    render_study([folder])
    return folder


def test_what_was_not_traced_says_so_in_the_figure_its_caption_and_the_table(half_traced: Path) -> None:
    figure = FIGURES["parts"](load([half_traced]))
    assert figure is not None
    words = [[text.get_text() for text in ax.texts] for ax in figure.axes]
    order = ["tilelang-splitkv", "triton-splitkv", "flash-attn-2", "flash-attn-3", "torch-sdpa"]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == order
    assert words[0] == words[2] == ["not traced", "", *["not traced"] * 3]
    assert words[1] == ["not traced", "", "unsupported", "not traced", "not traced"]
    assert words[4] == ["", "", "unsupported", "", ""]
    assert words[3] == words[5] == [""] * 5
    told = section(text_of(half_traced), "Where the time goes")
    assert "Not traced, and drawn as one bar: `tilelang-splitkv` on 3 cases, `flash-attn-2` on 2 cases," in told
    assert re.search(r"\| `b1_1k` \| `tilelang-splitkv` \| .* \| not traced \| – \|", told)


def test_host_times_stand_beside_the_cpu_they_were_taken_on(half_traced: Path, tmp_path: Path) -> None:
    assert "Host: " not in text_of(half_traced)  # of before environments named it
    records = rec.read(half_traced / "records.jsonl")
    records[0]["env"] |= {"cpu": "Some CPU @ 2.0 GHz", "cpu_count": 16}
    folder = fake.write(tmp_path / "study", records)
    render_study([folder])
    told = section(text_of(folder), "Where the time goes")
    assert told.count("Host: Some CPU @ 2.0 GHz, 16 logical cores.") == 2  # under the figure, and over the table


@pytest.mark.parametrize("name", ["share", "latency", "splits", "error"])
def test_axes_say_what_they_show_and_in_what_unit(splits: Path, name: str) -> None:
    figure = FIGURES[name](load([splits]))
    assert figure is not None
    for ax in figure.axes:
        assert ax.get_xlabel()
    units = {"share": "%", "latency": "latency", "splits": "µs", "error": "error"}
    labels = [ax.get_xlabel() + ax.get_ylabel() for ax in figure.axes]
    assert any(units[name] in label for label in labels)
