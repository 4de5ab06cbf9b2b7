"""A second run of a study: what its report says of the differences from run to run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from harness import record as rec
from harness.compare import CompareError
from harness.export import to_pandas
from harness.render import render_study
from harness.render.frame import load
from harness.render.repeats import read_repeat
from tests.harness import fake_records as fake
from tests.harness.test_report import section, text_of

CASES = {name: fake.GPU_CASES[name] for name in ("b1_8k", "b16_8k")}
TWO: Mapping[tuple[str, str], float] = {("b1_8k", "tilelang-splitkv"): 1.05, ("b16_8k", "triton-splitkv"): 0.96}


def timed(records: Sequence[rec.Record], times: Mapping[tuple[str, str], float]) -> list[rec.Record]:
    """The records, with times of exactly 100 µs, or that many times as long; with host times of 50 and 80 µs."""
    for record in records:
        if record["kind"] == "measurement" and record["timing"] is not None:
            factor = times.get((record["case"], record["impl"]), 1.0)
            for sample in record["timing"]["samples"]:
                sample["us"] = 100 * factor * (1 + 1e-5 * (sample["round"] % 3))
            record["timing"]["host"] = {"launch_us": 50.0, "end_to_end_us": 80.0}
    return list(records)


def study(
    tmp_path: Path,
    *,
    first: Sequence[rec.Record] | None = None,
    second: Sequence[rec.Record] | None = None,
    times: Mapping[tuple[str, str], float] = TWO,
) -> Path:
    """A folder with two runs."""
    folder = fake.write(tmp_path / "study", first or timed(fake.gpu_records(CASES, run_id="run-a"), {}))
    again = second or timed(fake.gpu_records(CASES, run_id="run-b"), times)
    rec.replace_cases(folder / rec.REPEAT_FILE, again)
    return folder


def rendered(folder: Path) -> Path:
    render_study([folder])
    return folder


def line_of(folder: Path, case: str, impl: str) -> int:
    """The line of a measurement in the second run's file."""
    [number] = [
        number
        for number, r in rec.read_numbered(folder / rec.REPEAT_FILE)
        if (r.get("case"), r.get("impl")) == (case, impl)
    ]
    return number


def test_each_implementation_has_its_mean_its_extremes_and_its_verdicts(tmp_path: Path) -> None:
    folder = study(tmp_path)
    render_study([folder])
    told = section(text_of(folder), "From run to run")
    up, down = line_of(folder, "b1_8k", "tilelang-splitkv"), line_of(folder, "b16_8k", "triton-splitkv")
    tilelang = f"| `tilelang-splitkv` | 1.025× over 2 of 2 | [+5.0 %](#p{up}) (`b1_8k`) | – | 1.025× over 2 of 2 |"
    assert (
        f"{tilelang} [100.0](#r{up}) → [105.0](#p{up}), +5.0 % (`b1_8k`) | – | 0 faster, 1 tie, 1 slower |" in told
    )
    triton = (
        f"| `triton-splitkv` | 0.980× over 2 of 2 | – | [-4.0 %](#p{down}) (`b16_8k`) | 0.980× over 2 of 2 | – |"
    )
    assert f"{triton} [100.0](#r{down}) → [96.0](#p{down}), -4.0 % (`b16_8k`) | 1 faster, 1 tie, 0 slower |" in told
    assert "| `stream-read` | – | – | – | 1.000× over 2 of 2 | – | – | – |" in told
    assert (
        "The study was run a second time, as `run-b` ([repeat.jsonl](repeat.jsonl)); the report is of `run-a`."
        in told
    )
    assert "The two runs had the same GPU, versions and settings." in told


def test_what_all_share_is_in_the_times_and_not_in_those_over_the_bound(tmp_path: Path) -> None:
    everyone = {(case, impl): 1.03 for case in CASES for impl in (rec.STREAM_READ, *fake.SPEEDS)}
    folder = study(tmp_path, times=everyone)
    render_study([folder])
    told = section(text_of(folder), "From run to run")
    assert "| `triton-splitkv` | 1.000× over 2 of 2 |" in told
    assert "| 1.030× over 2 of 2 |" in told
    assert "0 faster, 2 tie, 0 slower" in told


def test_a_bound_that_moved_is_told_with_what_it_moves(tmp_path: Path) -> None:
    assert "The bound itself" not in section(
        text_of(rendered(study(tmp_path / "same", times={}))), "From run to run"
    )
    folder = rendered(study(tmp_path / "moved", times={("b1_8k", rec.STREAM_READ): 0.98}))
    line = line_of(folder, "b1_8k", rec.STREAM_READ)
    assert (
        f"The bound itself differs most on `b1_8k`, [100.0](#r{line}) → [98.0](#p{line}) µs (-2.0 %), which every"
        " time ÷ bound of that case has in it: 6 of 6 implementations differ most there."
        in section(text_of(folder), "From run to run")
    )


def test_what_to_run_points_to_the_largest_difference_of_our_kernels(tmp_path: Path) -> None:
    folder = study(tmp_path)
    up, down = line_of(folder, "b1_8k", "tilelang-splitkv"), line_of(folder, "b16_8k", "triton-splitkv")
    render_study([folder])
    text = text_of(folder)
    told = section(text, "What to run")
    assert "what differs from run to run is not in them" not in told
    assert "what differs [from run to run](#run-to-run) comes on top:" in told
    assert (
        f"`tilelang-splitkv` differs by at most 5.0 % over the bound ([`b1_8k`](#p{up})) and 5.0 % in µs"
        f" ([`b1_8k`](#p{up})); `triton-splitkv` differs by at most 4.0 % over the bound ([`b16_8k`](#p{down}))"
        in told
    )
    assert re.search(
        r"how much slower `triton-splitkv` is than `tilelang-splitkv` changes by at most [\d.]+ points"
        r" \(\[`b1_8k`\]\(#p\d+\), -?[\d.]+ % and -?[\d.]+ %\)",
        told,
    )
    assert '<a id="run-to-run"></a>' in text
    (folder / rec.REPEAT_FILE).unlink()
    render_study([folder])
    text = text_of(folder)
    assert "what differs from run to run is not in them." in section(text, "What to run")
    assert "From run to run" not in text
    assert rec.REPEAT_FILE not in text


def test_every_link_into_the_second_run_leads_to_its_line(tmp_path: Path) -> None:
    folder = study(tmp_path)
    render_study([folder])
    text = text_of(folder)
    linked, anchors = set(re.findall(r"\(#(p\d+)\)", text)), re.findall(r'<a id="(p\d+)"></a>', text)
    assert linked
    assert linked <= set(anchors)
    lines = (folder / rec.REPEAT_FILE).read_text(encoding="utf-8").splitlines()
    table = re.findall(r'<a id="p(\d+)"></a>\[(\d+)\]\(repeat\.jsonl#L(\d+)\) \| `(\w+)` \| `([^`]+)` \|', text)
    assert len(table) == len(anchors) == len(CASES) * (1 + len(fake.SPEEDS))
    for anchor, shown, number, case, label in table:
        assert anchor == shown == number
        assert f'"case":"{case}","impl":"{label}"' in lines[int(number) - 1]


@pytest.mark.parametrize(("factor", "remarked"), [(1.2, False), (1.5, True), (0.6, True)])
def test_host_times_that_differ_are_put_down_to_the_cpu(factor: float, remarked: bool, tmp_path: Path) -> None:
    second = timed(fake.gpu_records(CASES, run_id="run-b"), {})
    for r in second:
        if r.get("impl") == "flash-attn-2":
            r["timing"]["host"]["launch_us"] *= factor
    second[0]["env"] = {**second[0]["env"], "cpu": "Another CPU", "cpu_count": 8}
    folder = study(tmp_path, second=second)
    render_study([folder])
    told = section(text_of(folder), "From run to run")
    assert re.search(
        rf"\| `flash-attn-2` \| [^|]+ \| 50\.0 → {50 * factor:.1f} \({factor:.2f}×\) \| 80\.0 → 80\.0", told
    )
    most = f"{max(factor, 1 / factor):.2f}× (host launch of `flash-attn-2`)"
    cpus = "(first run: a CPU that was not recorded; second: Another CPU, 8 logical cores)"
    assert (f"They differ by up to {most}: host times depend on the machine's CPU" in told) == remarked
    assert cpus in told
    assert (f"They differ by at most {most} (first run" in told) != remarked


def test_another_commit_or_gpu_is_said_as_compare_says_it(tmp_path: Path) -> None:
    second = fake.on_gpu(timed(fake.gpu_records(CASES, run_id="run-b"), {}), "NVIDIA H100")
    second[0]["env"] |= {"git": "fedcba98" * 5}
    folder = study(tmp_path, second=second)
    render_study([folder])
    told = section(text_of(folder), "A second run, not alike")
    assert (
        "| variable | old | new |\n|:---|:---|:---|\n| gpu | NVIDIA H200 | NVIDIA H100 |\n| git | 0123456789abcdef"
        in told
    )
    assert "The two runs had the same GPU, versions and settings." not in told


OTHER = "fedcba98" * 5


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"git": OTHER}, "of another commit (`0123456789ab` → `fedcba98fedc`)"),
        ({"dirty": True}, "of another commit (`0123456789ab` → `0123456789ab` with local changes)"),
        ({"git": None}, "of another commit (`0123456789ab` → not recorded)"),
        ({"gpu": "NVIDIA H100"}, "on another GPU (NVIDIA H200 → NVIDIA H100)"),
        (
            {"gpu": "NVIDIA H100", "git": OTHER, "triton": "9.9"},
            "of another commit (`0123456789ab` → `fedcba98fedc`),",
        ),
        ({"cpu": "Another CPU", "clocks": {"sm_mhz": 345}}, ""),
    ],
)
def test_what_may_be_due_to_other_code_or_another_gpu_is_not_called_from_run_to_run(
    env: Mapping[str, object], told: str, tmp_path: Path
) -> None:
    second = timed(fake.gpu_records(CASES, run_id="run-b"), TWO)
    second[0]["env"] = {**second[0]["env"], **env}
    text = text_of(rendered(study(tmp_path, second=second)))
    alike = "what differs [from run to run](#run-to-run) comes on top:" in section(text, "What to run")
    assert alike == (not told)
    assert ("\n## From run to run\n" in text) == (not told)
    if told:
        decisions, mine = section(text, "What to run"), section(text, "A second run, not alike")
        assert "what differs from run to run is not in them. A [second run](#run-to-run) is " in decisions
        assert f"is {told}" in decisions
        assert f"The second is {told}" in mine
        assert "cannot be told from them. Between the two runs `tilelang-splitkv` differs by at most" in " ".join(
            mine.split("\n")
        )
    if "triton" in env:
        assert "on another GPU (NVIDIA H200 → NVIDIA H100) and with another triton (3.6.0 → 9.9)" in text


def test_code_with_local_changes_may_be_other_code_both_times(tmp_path: Path) -> None:
    runs = [timed(fake.gpu_records(CASES, run_id=f"run-{name}"), {}) for name in "ab"]
    for records in runs:
        records[0]["env"] = {**records[0]["env"], "dirty": True}
    told = section(text_of(rendered(study(tmp_path, first=runs[0], second=runs[1]))), "A second run, not alike")
    assert (
        "The second is perhaps of other code (`0123456789ab` with local changes both times): what differs" in told
    )


def test_what_one_run_alone_has_is_listed(tmp_path: Path) -> None:
    faults = {("*", "flash-attn-2"): ("failed", "it hung")}
    second = timed(fake.gpu_records({"b1_8k": CASES["b1_8k"]}, faults=faults, run_id="run-b"), {})
    folder = study(tmp_path, second=second)
    render_study([folder])
    told = section(text_of(folder), "From run to run")
    assert "- `flash-attn-2`: ok in the first run, failed in the second, on `b1_8k`\n" in told
    assert "- `triton-splitkv`: ok in the first run, no record in the second, on `b16_8k`\n" in told
    assert "| `triton-splitkv` | 1.000× over 1 of 2 |" in told
    assert "| `flash-attn-2` | – | – | – | – | – | – | – |" in told


def test_a_run_on_a_cpu_is_not_compared(tmp_path: Path) -> None:
    folder = study(tmp_path, first=fake.cpu_records(run_id="run-a"), second=fake.cpu_records(run_id="run-b"))
    render_study([folder])
    told = section(text_of(folder), "From run to run")
    assert "*No comparison: a run on a CPU makes no claim about speed.*" in told
    assert "×" not in told


def test_fixed_split_counts_are_left_to_the_table(tmp_path: Path) -> None:
    again = [r | {"run_id": "run-b"} for r in fake.split_records()]
    folder = study(tmp_path, first=fake.split_records(), second=again)
    render_study([folder])
    text = text_of(folder)
    assert "num_splits=8" not in section(text, "From run to run")
    assert "Fixed split counts are in the [table of all measurements](#measurements)." in text
    assert re.search(r'<a id="p\d+"></a>.*`triton-splitkv num_splits=8`', text)


def test_what_is_no_second_run_of_the_study_is_refused(tmp_path: Path) -> None:
    records = timed(fake.gpu_records(CASES, run_id="run-a"), {})
    with pytest.raises(rec.RecordError, match=r"expected a second run, got run-a, which records\.jsonl holds"):
        render_study([study(tmp_path / "same", second=records)])
    other = timed(fake.gpu_records(CASES, run_id="run-b"), {})
    seeds = [r | {"seed": 7} if r.get("case") == "b16_8k" else r for r in other]
    with pytest.raises(
        rec.RecordError, match=r"repeat\.jsonl: b16_8k: expected seed 0 as in records\.jsonl, got 7"
    ):
        render_study([study(tmp_path / "seed", second=seeds)])
    for r in other:
        if r.get("timing"):
            r["timing"] = r["timing"] | {"method": "events"}
    with pytest.raises(CompareError, match="method: expected one on both sides, got graph"):
        render_study([study(tmp_path / "method", second=other)])


def test_a_comparison_of_several_studies_has_no_second_run(tmp_path: Path) -> None:
    one, two = (study(tmp_path / name) for name in ("a", "b"))
    target = render_study([one, two]).parent
    assert read_repeat(load([one, two]), target) is None
    assert "From run to run" not in text_of(target)


def test_an_exported_study_is_one_run_and_its_repeat_is_asked_for_by_name(tmp_path: Path) -> None:
    folder = study(tmp_path)
    assert set(to_pandas(folder)["run_id"]) == {"run-a"}
    both = to_pandas(folder, folder / rec.REPEAT_FILE)
    assert set(both["run_id"]) == {"run-a", "run-b"}


@pytest.mark.pinned
def test_the_page_of_a_study_with_two_runs_holds_both(tmp_path: Path) -> None:
    folder = study(tmp_path)
    page = render_study([folder], page=True).with_name("report.html").read_text(encoding="utf-8")
    number = line_of(folder, "b1_8k", "tilelang-splitkv")
    assert '<h2 id="section-from-run-to-run">' in page
    assert f'href="#p{number}"' in page
    assert f'id="p{number}"' in page
