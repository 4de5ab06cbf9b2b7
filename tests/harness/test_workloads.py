"""Length grammar, distributions, trace snapshots and model heads (behaviour 18: errors name the key)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.workloads import (
    MAX_SEQUENCES,
    MODELS,
    WorkloadError,
    draw_lengths,
    make_lengths,
    model_heads,
    parse_lengths,
    trace_snapshot,
)


@pytest.mark.parametrize(
    ("text", "lens"),
    [
        ("1x8192", (8192,)),
        ("2x7,1x9", (7, 7, 9)),
        (" 1x131072 , 2x1024 ", (131072, 1024, 1024)),
        ("5, 0, 3x1", (5, 0, 1, 1, 1)),
    ],
)
def test_grammar(text: str, lens: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lens


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**6)), min_size=1, max_size=6))
def test_grammar_gives_back_what_was_written(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}x{length}" for count, length in runs)
    assert parse_lengths(text) == tuple(length for count, length in runs for _ in range(count))


@pytest.mark.parametrize(
    "text", ["", "8x", "x8", "0x8", "-1x8", "2x-8", "1x8,,1x9", "1x8;1x9", "8.5", "1X8", "٣x8"]
)
def test_grammar_names_the_item_at_fault(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"^kv_lens: expected COUNTxLENGTH .* got "):
        parse_lengths(text)


def test_grammar_refuses_a_batch_that_cannot_be_meant() -> None:
    with pytest.raises(WorkloadError, match=f"at most {MAX_SEQUENCES} sequences, got 2000001"):
        parse_lengths("2000000x1,1x5")


DRAWS: dict[str, dict[str, Any]] = {
    "constant": {"length": 77},
    "uniform": {"low": 10, "high": 20},
    "longtail": {"low": 512, "high": 32768, "alpha": 1.1},
    "bimodal": {"low": 100, "high": 8000, "share_high": 0.25},
    "skew": {"low": 1024, "high": 131072},
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_depend_on_their_seed_alone(name: str) -> None:
    draws = [draw_lengths(name, {"batch": 500, "seed": seed, **DRAWS[name]}) for seed in (3, 3, 5)]
    assert draws[0] == draws[1]
    assert len(draws[0]) == 500
    assert all(isinstance(n, int) for n in draws[0])
    assert (draws[0] == draws[2]) == (name == "constant")


def test_draws_are_the_same_on_every_machine() -> None:
    """Written-out values: a change of Python, or of the code, must not change a study's lengths."""
    parameters = {"batch": 6, "seed": 0, **DRAWS["longtail"]}
    assert draw_lengths("longtail", parameters) == (2644, 1806, 835, 670, 972, 815)


def test_draws_have_the_shape_they_are_named_for() -> None:
    draw = {name: draw_lengths(name, {"batch": 4000, "seed": 1, **DRAWS[name]}) for name in DRAWS}
    assert set(draw["constant"]) == {77}
    assert set(draw["uniform"]) == set(range(10, 21))
    longtail = sorted(draw["longtail"])
    assert (longtail[0], 950 < longtail[2000] < 970) == (
        512,
        True,
    )  # the median of this law is 512 * 2 ** (1 / 1.1)
    assert 20000 < longtail[-1] <= 32768
    high = [n for n in draw["bimodal"] if n > 1000]
    assert 0.23 < len(high) / 4000 < 0.27
    assert (min(high) >= 7200, max(high) <= 8800) == (True, True)
    assert all(90 <= n <= 110 for n in draw["bimodal"] if n <= 1000)
    assert sorted(draw["skew"])[-2:] == [1024, 131072]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"distribution": "normal"}, r"kv_lens.distribution: expected one of constant, .*, got 'normal'"),
        ({"distribution": ["uniform"]}, r"kv_lens.distribution: expected one of"),
        ({"mean": 4}, r"kv_lens.mean: expected the keys of a uniform distribution: batch, low, high, seed; got"),
        ({"name": "x"}, r"kv_lens.name: expected the keys of"),
        ({"low": None}, r"kv_lens.low: expected a length in tokens, an integer >= 0, got None"),
        ({"low": -1}, r"kv_lens.low: .* got -1"),
        ({"low": 21}, r"kv_lens.low: expected at most high = 20, got 21"),
        ({"high": 20.5}, r"kv_lens.high: .* got 20.5"),
        ({"batch": 0}, r"kv_lens.batch: expected an integer from 1 to \d+, got 0"),
        ({"batch": True}, r"kv_lens.batch: .* got True"),
        ({"seed": -1}, r"kv_lens.seed: expected an integer >= 0, got -1"),
        ({"distribution": "longtail", "alpha": 0}, r"kv_lens.alpha: expected a number > 0, got 0"),
        ({"distribution": "longtail", "alpha": 1.0, "low": 0}, r"kv_lens.low: .*an integer >= 1, got 0"),
        ({"distribution": "bimodal", "share_high": 1.5}, r"kv_lens.share_high: expected a number from 0 to 1, got"),
    ],
)
def test_distribution_errors_name_the_key(change: dict[str, Any], message: str) -> None:
    table = {"distribution": "uniform", "batch": 4, "low": 10, "high": 20} | change
    with pytest.raises(WorkloadError, match=message):
        make_lengths(table, seed=0, folder=Path())


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"kv_lens.batch: expected an integer from 1 to \d+, got nothing"):
        make_lengths({"distribution": "constant", "length": 4}, seed=0, folder=Path())


TRACE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,100,50
2023-11-16 18:00:01.0000000,200,25
2023-11-16 18:00:01.0000001,300,1000
2023-11-16 18:00:02.0000000,400,1
2023-11-16 18:00:02.5000000,500,0
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("at_s", "lens"),
    [
        (0, (100,)),  # in flight from its very arrival, with no token generated yet
        (0.03, (100,)),  # a token counts when it is complete ...
        (0.04, (101,)),  # ... and not before
        (1, (125, 200)),
        # Row 1 ended at 0 + 50 * 0.04 s = 2, row 2 at 1 + 25 * 0.04 s = 2: both are out at 2 itself.
        # Row 3 is 0.9999999 s old, a tenth of a microsecond short of its 25th token; row 4 has just come.
        (2, (324, 400)),
        (2.0000001, (325, 400)),
        (2.5, (337,)),  # row 4 is over after one token; row 5 generates none and is never in flight
    ],
)
def test_trace_rule(trace: Path, at_s: float, lens: tuple[int, ...]) -> None:
    assert trace_snapshot(trace, at_s=at_s, ms_per_token=40) == lens


def test_trace_time_counts_from_the_first_row_across_midnight(tmp_path: Path) -> None:
    path = tmp_path / "night.csv"
    rows = ["2023-12-31 23:59:59.5,10,100", "2024-01-01 00:00:00.25,20,100", "2024-01-01 00:00:09,1,9"]
    # Other columns may stand around the three, in any order.
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,Model\n" + "".join(f"{row},m\n" for row in rows))
    assert trace_snapshot(path, at_s=1, ms_per_token=12.5) == (10 + 80, 20 + 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A,B\n1,2\n", r"trace.csv: expected the columns TIMESTAMP, .*, got no TIMESTAMP, ContextTokens"),
        ("", r"expected the columns"),
        (TRACE + "today,1,2\n", r"trace.csv, line 7: TIMESTAMP: expected a time as in .*, got 'today'"),
        (TRACE + "2023-11-16 18:00:03.x,1,2\n", r"line 7: TIMESTAMP: .* got '2023-11-16 18:00:03.x'"),
        (TRACE + "2023-11-16 18:00:03+01:00,1,2\n", r"line 7: TIMESTAMP"),
        (TRACE + "2023-11-16 18:00:03,-1,2\n", r"line 7: ContextTokens: expected an integer >= 0, got '-1'"),
        (TRACE + "2023-11-16 18:00:03,1\n", r"line 7: GeneratedTokens: expected an integer >= 0, got ''"),
    ],
)
def test_trace_errors_name_the_line(trace: Path, text: str, message: str) -> None:
    trace.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match=message):
        trace_snapshot(trace, at_s=1, ms_per_token=40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at_s": -1}, r"kv_lens.at_s: expected a number >= 0, got -1"),
        ({"at_s": float("nan")}, r"kv_lens.at_s: .* got nan"),
        ({"at_s": 5000}, r"kv_lens.at_s: expected a moment with requests in flight, got 5000 s of"),
        ({"ms_per_token": 0}, r"kv_lens.ms_per_token: expected a number > 0, got 0"),
        ({"trace": 5}, r"kv_lens.trace: expected a string, got 5"),
        ({"trace": "none.csv"}, r"kv_lens.trace: expected a readable CSV file, got .*none.csv"),
        ({"distribution": "uniform"}, r'kv_lens: expected .* either "distribution" or "trace"'),
        ({"rate": 5}, r"kv_lens.rate: expected the keys of a trace: trace, at_s, ms_per_token; got 'rate'"),
    ],
)
def test_trace_table_errors_name_the_key(trace: Path, change: dict[str, Any], message: str) -> None:
    table = {"trace": "trace.csv", "at_s": 1, "ms_per_token": 40} | change
    with pytest.raises(WorkloadError, match=message):
        make_lengths(table, seed=0, folder=trace.parent)


def test_generated_lengths_say_where_they_came_from(trace: Path) -> None:
    folder = trace.parent
    assert make_lengths([3, 4], seed=0, folder=folder) == ((3, 4), None)
    assert make_lengths("2x3", seed=0, folder=folder) == ((3, 3), None)
    table: dict[str, Any] = {"trace": "trace.csv", "at_s": 1, "ms_per_token": 40}
    assert make_lengths(table, seed=0, folder=folder) == ((125, 200), "trace.csv at 1 s, 40 ms per token")
    table = {"distribution": "constant", "batch": 2, "length": 5}
    source = "constant distribution, seed 7, batch 2, length 5"
    assert make_lengths(table, seed=7, folder=folder) == ((5, 5), source)
    uniform = {"distribution": "uniform", "batch": 9, "low": 0, "high": 99}
    own_seed, _ = make_lengths(uniform | {"seed": 1}, seed=7, folder=folder)
    assert own_seed == make_lengths(uniform, seed=1, folder=folder)[0]
    assert own_seed != make_lengths(uniform, seed=7, folder=folder)[0]


@pytest.mark.parametrize(
    ("model", "tp", "heads"),
    [
        ("Llama-3.1-8B", 1, (32, 8, 128)),
        ("Llama-3.1-70B", 8, (8, 1, 128)),
        ("Llama-3.1-405B", 16, (8, 1, 128)),  # more GPUs than KV heads: each holds a replica
        ("Llama-3.2-1B", 1, (32, 8, 64)),
        ("Qwen2.5-0.5B", 2, (7, 1, 64)),
        ("Qwen2.5-7B", 1, (28, 4, 128)),
        ("Qwen2.5-7B", 28, (1, 1, 128)),
        ("Gemma-2-9B", 4, (4, 2, 256)),
    ],
)
def test_model_heads(model: str, tp: int, heads: tuple[int, int, int]) -> None:
    assert model_heads(model, tp) == heads


def test_every_model_has_a_source_and_heads_that_divide() -> None:
    for name, model in MODELS.items():
        assert model.heads_q % model.heads_kv == 0, name
        assert "arXiv:" in model.source or "config.json" in model.source, name


@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        ("GPT-5", 1, r"model: expected one of Llama-2-7B, .*, got 'GPT-5'"),
        (["GPT-5"], 1, r"model: expected one of"),
        ("Qwen2.5-7B", 8, r"tp: expected .* heads of Qwen2.5-7B \(28 query, 4 KV\), one of 1, 2, 4, 28, got 8"),
        ("Qwen2.5-7B", 7, r"tp: .* got 7"),  # a GPU's 4 query heads would need parts of two KV heads
        ("Llama-3.1-8B", 0, r"tp: .* got 0"),
        ("Llama-3.1-8B", 2.0, r"tp: .* got 2.0"),
        ("Llama-3.1-8B", True, r"tp: .* got True"),
    ],
)
def test_model_errors_name_what_would_do(model: object, tp: object, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        model_heads(model, tp)
