"""The advice for a batch, from records whose truth is known: shares, distances, splits, and how sure it is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from harness import record
from harness.cli import main
from harness.recommend import (
    Advice,
    bound_us,
    coverage,
    distance,
    read_cases,
    recommend,
    skew,
    splits_of,
    tile_of,
)
from harness.record import RecordError
from impls import triton_splitkv
from impls.catalog import OURS
from impls.problem import DecodeProblem
from impls.splitkv_plan import SPLIT_TUNING, WORK, Limits, Splitting, choose_splits, work_of
from impls.triton_tile import Machine
from tests.harness.fake_records import (
    CEILING_GBPS,
    GPU_CASES,
    SPEEDS,
    cpu_records,
    gpu_records,
    on_gpu,
    problem,
    write,
)
from tests.harness.fake_trials import trial

ROOT = Path(__file__).parents[2]
RUN_ID = "20261130T101500Z-3fa2"


def with_tiles(records: list[record.Record]) -> list[record.Record]:
    return [r | {"config": r["config"] | {"block_h": 16}} if r.get("role") == "impl" else r for r in records]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("h200"), with_tiles(gpu_records()))


def model_us(impl: str, p: DecodeProblem) -> float:
    """What the model behind the fake records says."""
    return SPEEDS[impl].launch_us + p.kv_bytes / CEILING_GBPS / 1e3 / SPEEDS[impl].share


@pytest.mark.parametrize(
    "batch",
    [
        problem([8192] * 8),
        problem([4096] * 40),
        problem([65536]),
        problem([2048] * 100),
        problem([20000, 9000, 7000]),
    ],
    ids=lambda p: f"{p.batch}x{p.max_kv}",
)
def test_expected_times_are_the_bound_and_what_the_nearest_cases_take_beyond_it(
    folder: Path, batch: DecodeProblem
) -> None:
    advice = recommend(batch, folder)
    seen = read_cases(folder)
    for made in advice.ranking:
        assert made.us == pytest.approx(advice.bound_us / made.share)
        near = sorted(seen, key=lambda case: distance(batch, case.problem))[:3]
        assert [case.name for case in made.cases] == [case.name for case in near]
        beyond = [case.rows[made.impl]["us"] - case.bound_us for case in near]
        assert min(beyond) <= made.us - advice.bound_us <= max(beyond)
        assert made.low < made.us < made.high
        assert made.miss is not None
        assert made.high == pytest.approx(made.us * (1 + made.miss))
    assert advice.bound_us == pytest.approx(2.0 + batch.kv_bytes / CEILING_GBPS / 1e3, rel=0.02)
    for impl in ("tilelang-splitkv", "triton-splitkv"):
        made = next(made for made in advice.ranking if made.impl == impl)
        assert made.us == pytest.approx(model_us(impl, batch), rel=0.1)


def test_the_miss_is_that_of_the_nearest_cases_each_left_out(folder: Path) -> None:
    batch = problem([8192] * 8)
    made = recommend(batch, folder).ranking[0]
    seen = read_cases(folder)
    errors = []
    for case in made.cases:
        others = [other for other in seen if other.name != case.name]
        near = sorted(others, key=lambda other: distance(case.problem, other.problem))[:3]
        weights = [(distance(case.problem, other.problem) + 0.25) ** -2 for other in near]
        beyond = [other.rows[made.impl]["us"] - other.bound_us for other in near]
        mean = sum(w * us for w, us in zip(weights, beyond, strict=True)) / sum(weights)
        guess = bound_us(case.problem.kv_bytes, others) + mean
        errors.append(abs(math.log(case.rows[made.impl]["us"] / guess)))
    assert made.miss == pytest.approx(math.exp(max(errors)) - 1)


def test_a_recorded_batch_is_answered_by_its_record(folder: Path) -> None:
    advice = recommend(GPU_CASES["b16_8k"], folder)
    assert advice.ranking[0].impl == "triton-splitkv"
    for made in advice.ranking:
        (case,) = made.cases
        assert (case.name, made.miss) == ("b16_8k", None)
        assert made.us == case.rows[made.impl]["us"]
        assert made.low <= made.us <= made.high
    assert advice.far == ()


def test_splits_are_those_that_the_plan_would_make(folder: Path) -> None:
    batch = problem([65536, 700, 700, 20000])
    advice = recommend(batch, folder)
    table = choose_splits(batch, SPLIT_TUNING, sm_count=132, tiles_per_split=8, limits=Limits(128))
    assert advice.splits["triton-splitkv"] == dict(zip(batch.kv_lens, table.counts.tolist(), strict=True))
    assert list(advice.splits["triton-splitkv"]) == [65536, 20000, 700]
    assert advice.ctas["triton-splitkv"] == 8 * table.splits
    assert advice.sm_count == 132


def test_equal_first_places_are_ties(tmp_path: Path) -> None:
    records = with_tiles(gpu_records())
    twins = [r for r in records if r.get("impl") != "tilelang-splitkv"]
    twins += [r | {"impl": "tilelang-splitkv"} for r in records if r.get("impl") == "triton-splitkv"]
    advice = recommend(problem([8192] * 8), write(tmp_path, twins))
    assert {advice.ranking[0].impl, *advice.ties} == {"triton-splitkv", "tilelang-splitkv"}
    assert set(advice.splits) == {"triton-splitkv", "tilelang-splitkv"}


def test_a_clear_first_place_is_no_tie(folder: Path) -> None:
    advice = recommend(problem([8192] * 8), folder)
    assert (advice.ranking[0].impl, advice.ties) == ("triton-splitkv", ())


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (problem([8192] * 15), []),
        (problem([8192] * 15, head_dim=256), ["head_dim 256 is none of theirs (128)"]),
        (problem([8192] * 15, dtype="float16"), ["dtype float16 is none of theirs (bfloat16)"]),
        (problem([131072] * 64), ["doublings away", "lie outside theirs by more than twofold"]),
        (problem([16]), ["doublings away", "lie outside theirs by more than twofold"]),
        (problem([8192] * 16, heads=(24, 8)), ["query heads a KV head 3 is none of theirs"]),
    ],
    ids=["near", "dim", "dtype", "large", "small", "group"],
)
def test_far_evidence_is_called_an_extrapolation(folder: Path, batch: DecodeProblem, parts: list[str]) -> None:
    far = recommend(batch, folder).far
    assert bool(far) == bool(parts)
    for part in parts:
        assert any(part in text for text in far), far


def test_distance_counts_doublings() -> None:
    one = problem([4096] * 8)
    assert distance(one, one) == 0
    assert distance(one, problem([8192] * 8)) == pytest.approx(1.0)
    assert distance(one, problem([4096] * 16)) == pytest.approx(1.5)  # bytes, and half of the CTAs
    assert distance(one, problem([8192] * 4)) == pytest.approx(0.5)  # CTAs alone
    assert distance(one, problem([4096] * 8, dtype="float16")) == pytest.approx(0.25)
    assert distance(one, problem([4096] * 8, heads=(64, 8))) == pytest.approx(0.25)
    assert distance(one, problem([2048] * 8, heads=(32, 8), head_dim=256)) == pytest.approx(0.5)
    assert skew(problem([3000, 1000])) == pytest.approx(1.5)
    assert distance(problem([2000, 2000]), problem([3000, 1000])) == pytest.approx(math.log2(1.5))


def test_the_bound_lies_on_straight_lines_through_the_recorded_ones(folder: Path) -> None:
    seen = read_cases(folder)
    for case in seen:
        same = [other.bound_us for other in seen if other.problem.kv_bytes == case.problem.kv_bytes]
        assert bound_us(case.problem.kv_bytes, seen) == pytest.approx(sum(same) / len(same))
    sizes = sorted({case.problem.kv_bytes for case in seen})
    middle = bound_us((sizes[2] + sizes[3]) // 2, seen)
    assert middle == pytest.approx((bound_us(sizes[2], seen) + bound_us(sizes[3], seen)) / 2)
    ends = [bound_us(size, seen) for size in (sizes[-2], sizes[-1], 2 * sizes[-1] - sizes[-2])]
    assert ends[2] - ends[1] == pytest.approx(ends[1] - ends[0])


def test_coverage_counts_the_cases_left_out(folder: Path) -> None:
    hits, tried = coverage("triton-splitkv", read_cases(folder))
    assert tried == len(GPU_CASES)
    assert tried // 2 <= hits <= tried


def test_what_is_wrong_or_asked_for_otherwise_is_no_evidence(tmp_path: Path) -> None:
    faults = {("*", "triton-splitkv"): ("wrong", "row 1")}
    records = with_tiles(gpu_records(faults=faults))
    fixed = [
        r | {"config": r["config"] | {"asked": {"num_splits": 8}}}
        for r in records
        if r.get("impl") == "flash-attn-3"
    ]
    records = [r for r in records if r.get("impl") != "flash-attn-3"] + fixed
    advice = recommend(problem([8192] * 8), write(tmp_path, records))
    assert {made.impl for made in advice.ranking} == set(SPEEDS) - {"triton-splitkv", "flash-attn-3"}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (cpu_records(), "expected records of one GPU, got Some CPU"),
        (gpu_records({"b1_8k": GPU_CASES["b1_8k"]}), "expected at least 5 cases with a bound, got 1"),
        (
            [
                *gpu_records(),
                *on_gpu(gpu_records({"more": GPU_CASES["b1_8k"]}, run_id="20261201T101500Z-0000"), "NVIDIA H100"),
            ],
            "expected records of one GPU, got H100, H200",
        ),
    ],
    ids=["cpu", "few", "two"],
)
def test_records_that_tell_nothing_are_refused(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        recommend(problem([8192]), write(tmp_path, records))


def test_no_records_no_advice(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="expected the records of a run on a GPU, got no such file"):
        recommend(problem([8192]), tmp_path)
    with pytest.raises(ValueError, match="expected at least one key"):
        recommend(problem([0, 0]), tmp_path)


# --- the command ------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["recommend", *arguments])
    assert isinstance(caught.value.code, int)
    return (caught.value.code, *capsys.readouterr())


def study_folder(folder: Path) -> str:
    (folder / "study.toml").write_text("", encoding="utf-8")
    return str(folder)


def test_the_command_says_what_to_run_what_to_expect_and_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(
        capsys, "--kv-lens", "1x65536,12x700", "--heads", "32/8", "--records", study_folder(folder)
    )
    assert (code, err) == (0, "")
    advice: Advice = recommend(problem([65536, *[700] * 12]), folder)
    first = advice.ranking[0]
    lines = out.splitlines()
    assert lines[0] == (
        "13 sequences (1 of 65,536, 12 of 700 keys), 32/8 heads, head_dim 128, bfloat16: 302.8 MB of K and V, "
        "longest over mean 11.5"
    )
    assert lines[1] == "records of H200, 132 SMs"
    by_word = {line[:9].strip(): line[10:] for line in lines[3:8]}
    splits = advice.splits["triton-splitkv"]
    assert by_word["run"].startswith(
        f"triton-splitkv, num_splits auto: {splits[65536]} of 65,536 keys, {splits[700]} of 700 keys; "
    )
    assert by_word["expect"] == f"{first.us:.4g} µs ({first.low:.4g} to {first.high:.4g})"
    assert by_word["because"].startswith(
        f"reading K and V alone takes {advice.bound_us:.4g} µs, and it should reach "
    )
    assert "predicted from all others" in by_word["how sure"]
    assert by_word["BUT"].startswith("this is an extrapolation")
    for case in first.cases:
        row = case.rows["triton-splitkv"]
        assert any(
            line.startswith(case.name) and f"[{row['share_low']:.1f}, {row['share_high']:.1f}]" in line
            for line in lines
        )
    assert [line.split()[0] for line in lines[-len(SPEEDS) :]] == [made.impl for made in advice.ranking]


@pytest.mark.parametrize(
    ("us", "text"),
    [(10.0, "block_n=64 num_splits=8 was 10.0 % faster"), (12.0, "nothing tried was faster")],
)
def test_a_tuning_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str], us: float, text: str) -> None:
    write(tmp_path, with_tiles(gpu_records()))
    record.append(
        tmp_path / "tuning.jsonl",
        record.run_record("r1", "h200-decode", {}),
        trial("final", {}, [11.0] * 20),
        trial("final", {"block_n": 64, "num_splits": 8}, [us] * 20),
    )
    code, out, _ = told(capsys, "--kv-lens", "8192", "--heads", "32/8", "--records", study_folder(tmp_path))
    assert code == 0
    assert f"; tuned on b1_8k, {text}\n" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-lens", "64y8", "--heads", "32/8"], "kv_lens: expected COUNTxLENGTH or LENGTH, separated by commas"),
        (["--kv-lens", "0", "--heads", "32/8"], "--kv-lens: expected at least one key, got '0'"),
        (["--kv-lens", "8", "--heads", "32"], "--heads: expected query heads over KV heads as in 32/8, got '32'"),
        (["--kv-lens", "8", "--heads", "32/5"], "heads_q: expected a multiple of heads_kv = 5, got 32"),
        (["--kv-lens", "8", "--heads", "8/8", "--dtype", "int8"], "dtype: expected one of float16, bfloat16"),
        (["--kv-lens", "8", "--heads", "8/8", "--records", "nowhere"], "study: expected a TOML file"),
    ],
)
def test_a_bad_request_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = told(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")


def test_the_committed_records_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = told(capsys, "--kv-lens", "64x4096", "--heads", "32/8")
    assert (code, err) == (0, "")
    assert "this batch was recorded, as b64_4k" in out


@pytest.mark.parametrize("name", OURS)
def test_on_recorded_cases_the_advice_is_what_ran(name: str) -> None:
    """The rule that the advice repeats on the host is the one by which the recorded plans were made."""
    folder = ROOT / "reports" / "h200-decode"
    ran = [r for r in record.read(folder / "records.jsonl") if r["kind"] == "measurement" and r["impl"] == name]
    told = 0
    for row in ran:
        shape = {**row["problem"], "kv_lens": tuple(row["problem"]["kv_lens"])}
        advice = recommend(DecodeProblem(**shape), folder)
        if name not in advice.splits:  # only of what is fastest or ties with it
            continue
        told += 1
        assert max(advice.splits[name].values()) == row["config"]["splits_max"], row["case"]
        assert advice.ctas[name] == row["config"]["work_items"], row["case"]
    assert told


@pytest.mark.parametrize("name", OURS)
def test_the_rule_on_the_host_is_that_of_every_recorded_plan(name: str) -> None:
    """Also where another implementation is ahead, and nothing is advised."""
    folder = ROOT / "reports" / "h200-decode"
    seen = read_cases(folder)
    sms = int(seen[0].run["env"]["sm_count"])
    assert seen
    assert all(name in case.rows for case in seen)
    for case in seen:
        tile, sure = tile_of(case.problem, name, seen, sms)
        assert sure
        counts, ctas, exact = splits_of(case.problem, tile.configs[name], sms, "H200")
        assert exact
        ran = case.configs[name]
        assert (max(counts.values()), ctas) == (ran["splits_max"], ran["work_items"]), case.name


def drawn(random: Random, work: str) -> DecodeProblem:
    """A batch of this kind of work on 132 SMs."""
    while True:
        batch, longest = random.randint(1, 200), int(2 ** random.uniform(0, 16))
        least = random.choice([longest, longest, longest * 9 // 10, 1])
        heads_kv = random.choice([1, 2, 4, 8])
        shape = DecodeProblem(
            kv_lens=tuple(random.randint(least, longest) for _ in range(batch)),
            heads_q=heads_kv * random.choice([1, 4, 7, 16, 64]),
            heads_kv=heads_kv,
            head_dim=random.choice([64, 96, 128, 256]),
            dtype=random.choice(["bfloat16", "float16", "float32"]),
        )
        if work_of(shape, 132) == work:
            return shape


@pytest.mark.parametrize("work", WORK)
def test_tritons_splits_are_those_that_a_plan_on_an_h200_would_make(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this process does with kernels, and whichever recorded tile stands in."""
    h200 = Machine(sms=132, shared_bytes=232448, registers=65536, capability=(9, 0))
    monkeypatch.setattr(triton_splitkv, "machine_of", lambda device: h200)
    monkeypatch.setattr(triton_splitkv, "_compile", lambda *what: None)
    made: list[Splitting] = []
    monkeypatch.setattr(triton_splitkv, "TritonPlan", lambda *what: made.append(what[-1]))
    impl, random = triton_splitkv.TritonSplitKV(), Random(work)
    config = read_cases(ROOT / "reports" / "h200-decode")[0].configs["triton-splitkv"]
    for _ in range(40):
        shape = drawn(random, work)
        impl.plan(shape, torch.device("cuda", 0))
        table = made[-1].table
        counts, ctas, exact = splits_of(shape, config, 132, "H200")
        assert exact
        assert counts == dict(zip(shape.kv_lens, table.counts.tolist(), strict=True))
        assert ctas == made[-1].ctas


@pytest.mark.parametrize(
    ("device", "exact"),
    [("H100 80GB HBM3", True), ("GH200 480GB", True), ("A100-SXM4-80GB", False), ("B200", False), ("H2000", False)],
)
def test_tritons_rule_is_asked_about_gpus_that_it_is_known_of(device: str, exact: bool) -> None:
    case = read_cases(ROOT / "reports" / "h200-decode")[0]
    assert splits_of(case.problem, case.configs["triton-splitkv"], 132, device)[-1] is exact


@pytest.mark.parametrize(
    ("gpu", "words"),
    [("NVIDIA H200", "by its rule"), ("NVIDIA L40", "tile as on b16_8k")],
)
def test_it_is_said_whether_the_tile_is_the_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, words: str
) -> None:
    library = {"library": "triton", "num_stages": 3}
    records = [
        r | {"config": r["config"] | library} if r.get("impl") == "triton-splitkv" else r
        for r in with_tiles(on_gpu(gpu_records(), gpu))
    ]
    code, out, _ = told(
        capsys, "--kv-lens", "16x8192", "--heads", "32/8", "--records", study_folder(write(tmp_path, records))
    )
    assert code == 0
    (line,) = [line for line in out.splitlines() if "triton-splitkv, num_splits auto: " in line]
    assert line.endswith(f" CTAs ({words})")


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float32"}, {"head_dim": 112}, {"head_dim": 2048}],
    ids=lambda change: str(*change.values()),
)
@pytest.mark.parametrize("name", OURS)
def test_where_an_implementation_would_refuse_its_rule_is_not_asked(name: str, change: dict[str, Any]) -> None:
    folder = ROOT / "reports" / "h200-decode"
    case = read_cases(folder)[0]
    shape = replace(case.problem, **change)
    counts, ctas, exact = splits_of(shape, case.configs[name], 132, "H200")
    assert exact == (name == "triton-splitkv" and shape.head_dim <= 256)
    assert min(counts.values()) >= 1
    assert ctas >= shape.batch * shape.heads_kv
