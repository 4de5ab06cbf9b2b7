"""What a report tells: its decisions, its figures and their captions, its links, and what it says is missing."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import style as mpl_style
from matplotlib.text import Text

from harness import record as rec
from harness.render import looks, render_study
from harness.render.captions import CAPTIONS
from harness.render.decisions import decide
from harness.render.figures import FIGURES
from harness.render.frame import load
from harness.render.groups import MAX_PANELS, curves_of, launch_floor, pairs_of, sweeps_of
from harness.render.looks import RC, SPARE, STYLES, WIDTH
from harness.render.plots_detail import rounding_floor
from harness.render.text import percent_text
from impls.catalog import DESCRIPTIONS, IMPLS
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
    assert "| `triton-splitkv` | [1 of 1](#measurements) | 1 of 1 | 0 of 1 |" in text
    assert "Fastest by median, of 1 case: `triton-splitkv` on 1." in text
    assert re.search(r"\*\*\[10\.0\]\(#r\d+\)\*\*", section(text, "Latency"))


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
    assert f"\nRight in the check before each timing; {told}\n" in text
    assert '<a id="deep"></a>\n\n## Checked in depth' in text
    assert re.search(r"\| `triton-splitkv` \| \[2 of 2\]\(#measurements\) \| \*\*\[1 of 2\]\(#deep\)\*\* \|", text)
    assert re.search(r"\| `flash-attn-3` \| \[2 of 2\]\(#measurements\) \| \[2 of 2\]\(#deep\) \|", text)
    assert re.search(r"\| `torch-sdpa` \| \[2 of 2\]\(#measurements\) \| – \|", text), "which was not tried"
    assert len(re.findall(r"\[ok\]\(#r\d+\)†", section(text, "Support"))) == 1
    assert "| `triton-splitkv`† |" in section(text, "What to run")
    assert section(text, "What to run").endswith("† not right in the [deeper check](#deep).\n\n")


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
    assert ", its longest kernel 10.0 µs against 10.0 |" in row, "too few, explained by the profile"
    assert ", its other kernels 2.00 µs against 2.00 |" in row, "too many, explained by the profile"


def test_without_a_profile_the_work_items_explain_too_few_and_too_many(tmp_path: Path) -> None:
    folder = fake.write(tmp_path / "study", fake.split_records({"b1_8k": fake.GPU_CASES["b1_8k"]}))
    render_study([folder])
    told = section(text_of(folder), "Split counts")
    assert ", 8 CTAs for 132 SMs |" in told
    assert ", 1,024 CTAs and up to 128 partial results a row to merge |" in told


def test_a_profile_is_a_figure_with_its_sums(splits: Path) -> None:
    told = section(text_of(splits), "Where the time goes")
    assert "figures/parts.png" in told
    assert "The parts add up to the untraced time within 5 % or 1 µs on all of 81 bars." in told


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

    with mpl_style.context(["default", RC]):
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


def test_marks_of_two_implementations_do_not_lie_on_each_other_in_the_error_figure(everyone: Path) -> None:
    comparison = load([everyone])
    with mpl_style.context(["default", RC]):
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
