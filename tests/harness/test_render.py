import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness import record as rec
from harness.render import render_study
from harness.render.frame import NO_RECORD, Comparison, load
from harness.render.looks import MAX_CASES, STYLES, styles_of
from harness.render.text import escape
from impls.catalog import IMPLS
from tests.harness import fake_records as fake

FAULTS = {
    ("b1_1k", "triton-splitkv"): ("invalid", "0.2 µs a sample: faster than the memory can be read"),
    ("mha_b4_4k", "flash-attn-3"): ("failed", "RuntimeError: no kernel | image <for> this *device*\n  second line"),
    ("ratio7_b16_8k", "tilelang-splitkv"): ("wrong", "row (sequence 3, head 7): error 41x its budget (L2)"),
    ("b1_32k", "torch-varlen"): ("unsupported", "expected head_dim 64, got 128"),
    ("*", "torch-sdpa"): ("unavailable", "No module named 'torch'"),
}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rendered report of a GPU run in which every status occurs."""
    folder = fake.write(tmp_path_factory.mktemp("reports") / "h200-decode", fake.gpu_records(faults=FAULTS))
    render_study([folder])
    return folder


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rendered report of a CPU run."""
    folder = fake.write(tmp_path_factory.mktemp("reports") / "quick", fake.cpu_records())
    render_study([folder])
    return folder


def of(tmp_path: Path, records: Sequence[rec.Record]) -> Comparison:
    return load([fake.write(tmp_path / "study", records)])


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def row_of(comparison: Comparison, case: str, label: str) -> pd.Series:
    rows = comparison.rows
    return rows[(rows["case"] == case) & (rows["label"] == label)].iloc[0]


def tables_of(text: str) -> list[list[list[str]]]:
    """The cells of every table of a Markdown text."""
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE)
    return [[[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in b.splitlines()] for b in blocks]


# The frame


def test_a_row_is_a_median_its_rates_and_its_ratios(tmp_path: Path) -> None:
    comparison = of(tmp_path, fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]}))
    row, bound = row_of(comparison, "b1_8k", "triton-splitkv"), row_of(comparison, "b1_8k", rec.STREAM_READ)
    peer = row_of(comparison, "b1_8k", "flash-attn-3")
    assert row["us_low"] <= row["us"] <= row["us_high"]
    assert row["gbps"] == pytest.approx(33_570_816 / row["us"] / 1e3)
    assert row["tflops"] == pytest.approx(4 * 32 * 8192 * 128 / row["us"] / 1e6)
    assert bound["gbps"] == pytest.approx(33_554_432 / bound["us"] / 1e3)
    # Ratios are paired by round, so they are not exactly those of the medians.
    assert row["share"] == pytest.approx(100 * bound["us"] / row["us"], rel=0.005)
    assert row["slowdown"] == 1.0
    assert peer["slowdown"] == pytest.approx(peer["us"] / row["us"], rel=0.005)
    assert (row["peer"], row["ahead"]) == ("flash-attn-3", pytest.approx(peer["us"] / row["us"], rel=0.005))
    assert row["ahead_low"] < row["ahead"] < row["ahead_high"]
    assert row["share_low"] < row["share"] < row["share_high"]
    assert (row["verdict"], row["tied"], peer["tied"]) == ("faster", True, False)
    assert np.isnan(peer["ahead"])


def test_every_series_has_a_row_on_every_case(tmp_path: Path) -> None:
    records = fake.gpu_records(faults=FAULTS)
    dropped = next(r for r in records if r.get("case") == "b64_4k" and r["impl"] == "flash-attn-3")
    comparison = of(tmp_path, [r for r in records if r is not dropped])
    assert comparison.table("status").notna().all(axis=None)
    assert row_of(comparison, "b64_4k", "flash-attn-3")["status"] == NO_RECORD
    for (case, impl), (status, _) in FAULTS.items():
        assert row_of(comparison, "b16_8k" if case == "*" else case, impl)["status"] == status


def test_only_ok_has_a_time_and_a_ratio(gpu: Path) -> None:
    rows = load([gpu]).impls
    assert (rows["us"].notna() == (rows["status"] == "ok")).all()
    assert rows.loc[rows["status"] != "ok", ["share", "slowdown", "ahead", "gbps"]].isna().all(axis=None)


def test_cases_are_ordered_by_bytes_and_series_by_catalog(gpu: Path) -> None:
    comparison = load([gpu])
    sizes = comparison.impls.drop_duplicates("case").set_index("case")["kv_bytes"]
    assert list(comparison.cases) == list(sizes.sort_values(kind="stable").index)
    assert list(comparison.series) == [impl for impl in IMPLS if impl in fake.SPEEDS]


def test_the_newest_run_of_a_case_counts_and_is_never_mixed(tmp_path: Path) -> None:
    cases = {name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")}
    folder = tmp_path / "study"
    old = fake.gpu_records(cases, run_id="run-1")
    new = fake.gpu_records({"b1_8k": cases["b1_8k"]}, run_id="run-2")
    for record in old + [r for r in new if r.get("impl") != rec.STREAM_READ]:
        rec.append(folder / "records.jsonl", record)
    comparison = load([folder])
    assert dict(comparison.rows.groupby("case")["run_id"].first()) == {"b1_1k": "run-1", "b1_8k": "run-2"}
    assert [run["run_id"] for run in comparison.runs] == ["run-1", "run-2"]
    assert set(comparison.ceilings) == {"run-1", "run-2"}
    assert comparison.table("share").loc["b1_8k"].isna().all(), "run-2 has no bound, run-1's must not stand in"


@pytest.mark.parametrize("key", ["method", "cache"])
def test_different_methods_are_never_compared(key: str, tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    other = next(r for r in records if r.get("impl") == "triton-splitkv")
    other["timing"][key] = "other"
    row = row_of(of(tmp_path, records), "b1_8k", "triton-splitkv")
    assert np.isnan(row["share"])
    assert np.isnan(row["ahead"])
    assert row["slowdown"] == 1.0, "it is alone with its method"


def test_throttled_samples_are_counted_and_left_out(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    samples = next(r for r in records if r.get("impl") == "triton-splitkv")["timing"]["samples"]
    for sample in samples[:8]:
        sample.update(us=1000.0, throttled=True)
    row = row_of(of(tmp_path, records), "b1_8k", "triton-splitkv")
    assert (row["n"], row["n_throttled"]) == (len(samples) - 8, 8)
    assert row["us_high"] < 100


def test_a_difference_under_the_smallest_that_matters_is_a_tie(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    ours = next(r for r in records if r.get("impl") == "triton-splitkv")
    peer = next(r for r in records if r.get("impl") == "flash-attn-3")
    for sample, other in zip(ours["timing"]["samples"], peer["timing"]["samples"], strict=True):
        other["us"] = 1.02 * sample["us"]
    assert row_of(of(tmp_path / "a", records), "b1_8k", "triton-splitkv")["verdict"] == "faster"
    records[0]["smallest_effect"] = 0.03
    row = row_of(of(tmp_path / "b", records), "b1_8k", "triton-splitkv")
    assert (row["verdict"], row["ahead"]) == ("tie", pytest.approx(1.02))


def test_a_profile_is_joined_to_its_row_and_never_compared(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    folder = fake.write(tmp_path / "study", records)
    run, *profiled = fake.profiled(records, run_id="run-9")
    rec.append(folder / "records-kernels.jsonl", run | {"env": run["env"] | {"gpu": "NVIDIA L4"}}, *profiled)
    assert np.isnan(row_of(load([folder]), "b1_8k", "triton-splitkv")["main_us"]), "another GPU's"
    (folder / "records-kernels.jsonl").unlink()
    rec.append(folder / "records-kernels.jsonl", run, *profiled)
    row = row_of(load([folder]), "b1_8k", "triton-splitkv")
    assert (row["main_us"], row["others_us"], row["gap_us"], row["between_us"]) == (10.0, 2.0, 0.5, 1.0)
    assert (row["traced_us"], row["profiled_us"]) == (13.5, 13.4)
    assert (row["method"], row["run_id"]) == ("graph", "20261130T101500Z-3fa2")


def test_our_split_kernel_is_the_first_one_also_where_the_next_waits_longer_than_it_runs(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    folder = fake.write(tmp_path / "study", records)
    profiled = fake.profiled(records, run_id="run-9")
    kernels = [{"name": "split", "us": 10.0}, {"name": "combine", "us": 12.0}]
    for r in profiled[1:]:
        r["timing"]["breakdown"] = {**r["timing"]["breakdown"], "kernels": kernels, "gap_us": -9.0}
    rec.append(folder / "records-kernels.jsonl", *profiled)
    comparison = load([folder])
    ours, theirs = (row_of(comparison, "b1_8k", impl) for impl in ("triton-splitkv", "flash-attn-3"))
    assert (ours["main_net_us"], ours["others_net_us"]) == (10.0, 3.0)
    assert (theirs["main_net_us"], theirs["others_net_us"]) == (12.0, 1.0), "of others the longest is the main one"


def test_two_entries_of_one_implementation_are_two_series(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    entry = next(r for r in records if r.get("impl") == "triton-splitkv")
    for splits in (16, 8):
        records.append(entry | {"config": entry["config"] | {"asked": {"num_splits": splits}}})
    series = of(tmp_path, records).series
    assert [s for s in series if "triton" in s] == [
        "triton-splitkv",
        "triton-splitkv num_splits=8",
        "triton-splitkv num_splits=16",
    ]
    assert len({styles_of(series)[s] for s in series if "triton" in s}) == 1


def test_files_without_measurements_or_runs_are_named(tmp_path: Path) -> None:
    records = fake.gpu_records({"b1_8k": fake.GPU_CASES["b1_8k"]})
    path = tmp_path / "records.jsonl"
    with pytest.raises(rec.RecordError, match=r"records.jsonl: expected the records of a run, got no such file"):
        load([tmp_path])
    rec.append(path, records[0])
    with pytest.raises(rec.RecordError, match="expected measurements of a case, got 1 other records"):
        load([tmp_path])
    rec.append(path, records[1])  # the read ceiling: a run that was killed before its first case
    with pytest.raises(rec.RecordError, match="expected measurements of a case, got 2 other records"):
        load([tmp_path])
    path.unlink()
    rec.append(path, records[2])
    with pytest.raises(rec.RecordError, match="expected a run record of 20261130T101500Z-3fa2, got none"):
        load([tmp_path])
    with pytest.raises(ValueError, match="folders: expected at least one, got none"):
        load([])


# The report


def test_the_headline_is_the_answer_in_two_sentences(gpu: Path) -> None:
    first, second = text_of(gpu).splitlines()[4:6]
    assert first == (
        "`triton-splitkv` is the fastest, or ties with the fastest, on 14 of 15 cases (`tilelang-splitkv` on 1)."
    )
    assert re.fullmatch(
        r"Against the best peer of each case, in speed \(geometric mean\): `tilelang-splitkv`.* and"
        r" `triton-splitkv` 1\.\d{3}× \[1\.\d{3}, 1\.\d{3}\] over 14 of 15 \(14 faster, 0 tie, 0 slower\)\.",
        second,
    )


def test_all_pictures_are_there_as_png_and_svg(gpu: Path) -> None:
    pictures = re.findall(r"\[!\[([^\]]+)\]\((figures/\w+\.png)\)\]\((figures/\w+\.svg)\)", text_of(gpu))
    assert [Path(png).stem for _, png, _ in pictures] == [
        "share",
        "slowdown",
        "latency",
        "error",
        "skew",
        "support",
    ]
    for alt, png, svg in pictures:
        assert len(alt) > 20
        assert (gpu / png).read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (gpu / svg).read_text(encoding="utf-8")


def test_tables_are_whole(gpu: Path) -> None:
    tables = tables_of(text_of(gpu))
    assert len(tables) == 11
    for table in tables:
        assert {len(line) for line in table} == {len(table[0])}
    support = next(t for t in tables if t[0][0] == "case" and len(t[0]) == 1 + len(fake.SPEEDS))
    assert len(support) == 2 + len(fake.GPU_CASES)
    times = next(t for t in tables if "TFLOP/s" in t[0])
    assert len(times) == 2 + len(fake.GPU_CASES) * (1 + len(fake.SPEEDS))
    for name in ("µs", "GB/s", "method", "cache", "n", "% of bound"):
        assert name in times[0]


def test_gaps_are_visible_with_their_word_and_reason(gpu: Path) -> None:
    text = text_of(gpu)
    for (_, impl), (status, _) in FAULTS.items():
        assert f"[*{status}*](#r" in text
        assert re.search(rf"^- `{impl}` {status} \(", text, flags=re.MULTILINE)
    assert r"no kernel \| image \<for\> this \*device\* second line" in text


def test_a_baseline_that_cannot_split_says_so_at_its_number(gpu: Path) -> None:
    text = text_of(gpu)
    assert re.search(r"\| `mha_b4_4k` \|.*<sup>1</sup>", text)
    assert r"<sup>1</sup> does not split when heads\_q == heads\_kv" in text


def test_the_variables_of_the_run_are_stated(gpu: Path) -> None:
    text = text_of(gpu)
    for value in ("NVIDIA H200", "580.95.05", "2.11.0", "0123456789ab", "1980", "splitkv run reports/h200-decode"):
        assert value in text


def test_a_cpu_run_makes_no_speed_claim(cpu: Path) -> None:
    text = text_of(cpu)
    assert "makes no claim about speed" in text
    assert "of the bound" not in text
    for word in ("GB/s |", "TFLOP/s |", "× fastest", "faster than", "**1"):
        assert word not in text
    assert sorted(p.name for p in (cpu / "figures").iterdir()) == [
        f"{name}.{form}" for name in ("error", "latency", "support") for form in ("png", "svg")
    ]
    assert "Without keys, so not on a log axis: `all_empty`" in text


def test_a_report_in_which_everything_failed_renders(tmp_path: Path) -> None:
    records = [
        r
        for r in fake.gpu_records(faults={("*", impl): ("failed", "it hung") for impl in IMPLS})
        if r.get("role") != "bound"
    ]
    folder = fake.write(tmp_path / "study", records)
    text = render_study([folder]).read_text(encoding="utf-8")
    assert "No implementation succeeded on any of 15 cases" in text
    assert "Nothing was timed." in text
    assert "`triton-splitkv` failed (all cases): it hung" in text
    assert [p.name for p in sorted((folder / "figures").iterdir())] == ["support.png", "support.svg"]


def test_figures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    folder = fake.write(tmp_path / "quick", fake.cpu_records())
    (folder / "figures").mkdir()
    (folder / "figures" / "share.png").write_bytes(b"old")
    render_study([folder])
    assert not (folder / "figures" / "share.png").exists()


def test_an_implementation_that_the_catalog_does_not_know_renders(tmp_path: Path) -> None:
    records = fake.gpu_records({name: fake.GPU_CASES[name] for name in ("b1_1k", "b1_8k")})
    for record in records:
        if record.get("impl") == "torch-sdpa":
            record["impl"] = "long-gone"
    folder = fake.write(tmp_path / "study", records)
    assert "`long-gone`" in render_study([folder]).read_text(encoding="utf-8")
    series = load([folder]).series
    assert series[-1] == "long-gone"
    assert styles_of(series)["long-gone"] not in [STYLES[impl] for impl in series[:-1]]


def test_one_case_with_one_implementation_renders(tmp_path: Path) -> None:
    records = [r for r in fake.cpu_records({"one": fake.CPU_CASES["mqa"]}) if r.get("impl") in (None, "torch-sdpa")]
    assert "`torch-sdpa`" in render_study([fake.write(tmp_path / "study", records)]).read_text(encoding="utf-8")


def test_several_folders_make_one_comparison_beside_them(tmp_path: Path) -> None:
    one = {"b1_8k": fake.GPU_CASES["b1_8k"]}
    folders = [
        fake.write(tmp_path / name, fake.gpu_records(one, run_id=f"run-{name}", study=name)) for name in ("a", "b")
    ]
    readme = render_study(folders)
    assert readme == tmp_path / "a+b" / "README.md"
    assert load(folders).cases == ("a/b1_8k", "b/b1_8k")


def test_rendering_twice_gives_the_same_bytes(cpu: Path, tmp_path: Path) -> None:
    """In another process too: no hash order, clock or random id reaches the files."""
    again = tmp_path / "quick"
    again.mkdir()
    (again / "records.jsonl").write_bytes((cpu / "records.jsonl").read_bytes())
    program = (
        f"from pathlib import Path; from harness.render import render_study; render_study([Path({str(again)!r})])"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    files = sorted(p.relative_to(cpu) for p in cpu.rglob("*") if p.is_file())
    assert len(files) == 8
    for file in files:
        assert (again / file).read_bytes() == (cpu / file).read_bytes(), file


def test_pictures_carry_no_date_and_no_software(gpu: Path) -> None:
    for svg in gpu.glob("figures/*.svg"):
        assert not re.search(r"<dc:date>|Matplotlib v", svg.read_text(encoding="utf-8"))
    for png in gpu.glob("figures/*.png"):
        assert b"Software" not in png.read_bytes()


def test_many_cases_are_thinned_in_figures_and_whole_in_tables(tmp_path: Path) -> None:
    cases = {f"case_{i}": fake.problem([128 * (i + 1)]) for i in range(MAX_CASES + 12)}
    folder = fake.write(tmp_path / "many", fake.gpu_records(cases, n=5))
    text = render_study([folder]).read_text(encoding="utf-8")
    assert f"12 of {len(cases)} cases are not drawn; the tables have all." in text
    assert all(f"| `{case}` |" in text for case in cases)


def test_rendering_needs_no_gpu_library() -> None:
    program = (
        "import sys, harness.render.frame, harness.render.figures, harness.render.markdown, harness.render.tables;"
        "print([m for m in ('torch', 'triton', 'tilelang') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("raw", "escaped"),
    [
        ("a|b", r"a\|b"),
        ("<img>", r"\<img\>"),
        ("x\n  y", "x y"),
        ("__init__", r"\_\_init\_\_"),
        ("µs × 2", "µs × 2"),
    ],
)
def test_what_records_say_is_no_markup(raw: str, escaped: str) -> None:
    assert escape(raw) == escaped
