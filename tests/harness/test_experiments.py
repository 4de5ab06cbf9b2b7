"""The experiments themselves, on a CPU: what they compare and record, with stand-ins for what needs a GPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import experiments
from harness.selftest import EXPERIMENTS, LIARS
from harness.study import Case
from impls.catalog import OURS
from impls.contract import DecodeInputs, DecodePlan, ImplUnavailable
from impls.problem import DecodeProblem
from tests.harness import fakes

CPU = torch.device("cpu")
CASE = Case(
    name="case",
    problem=DecodeProblem(kv_lens=(70, 33), heads_q=4, heads_kv=2, head_dim=64, dtype="float16"),
    seed=1,
)


class Timer(fakes.Timer):
    renews = False

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> fakes.Lap:
        return Lap(plan, sets)


class Lap(fakes.Lap):
    def sample(self) -> float:
        return 20.0 + getattr(self.plan, "cycles", 0) / 1000

    def breakdown(self) -> Mapping[str, Any]:
        return {"traced_us": 21.0, "total_us": 20.5}


class Warm(Timer):
    method = "graph-warm"


class Events(Timer):
    method = "events"


class Kernels(Timer):
    method = "kernels"


class Spinning(fakes.Plan):
    def __init__(self, problem: DecodeProblem, device: torch.device, cycles: int) -> None:
        super().__init__(problem, None)
        self.cycles = cycles


class Profilers:
    """``triton.testing`` and ``tilelang.profiler``: every timer notes how it was called, and one fails."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def do_bench(self, call: Callable[[], object], **options: Any) -> float:
        call()
        self.asked.append(("do_bench", options))
        return 0.03

    def do_bench_cudagraph(self, call: Callable[[], object], **options: Any) -> float:
        raise RuntimeError("no graph here")


@pytest.fixture
def profilers(monkeypatch: pytest.MonkeyPatch) -> Profilers:
    made = Profilers()

    def load(name: str) -> fakes.Right:
        if name == "flash-attn-2":
            raise ImplUnavailable("not here")
        return fakes.Unsupported() if name == "flash-attn-3" else fakes.Right()

    monkeypatch.setattr(experiments, "load", load)
    monkeypatch.setattr(experiments, "import_module", lambda name: made)
    monkeypatch.setattr(experiments, "SpinningRead", Spinning)
    monkeypatch.setattr(experiments, "cycles_per_us", lambda device: 1000.0)
    for name, timer in {
        "GraphTimer": Timer,
        "GraphWarmTimer": Warm,
        "EventsTimer": Events,
        "KernelsTimer": Kernels,
    }.items():
        monkeypatch.setattr(experiments, name, timer)
    return made


def test_every_experiment_but_the_liars_is_here() -> None:
    assert set(experiments.EXPERIMENTS) == set(EXPERIMENTS) - {LIARS}


def test_identical_compares_each_of_ours_with_itself(profilers: Profilers) -> None:
    trials = list(experiments.identical(CASE, CPU))
    assert [(t["impl"], t["trial"]) for t in trials] == [(n, i) for n in OURS for i in range(experiments.PAIRS)]
    assert all(t["a"] == t["b"] == [20.0] * 4 for t in trials)
    assert {(t["case"], t["kv_bytes"]) for t in trials} == {("case", CASE.problem.kv_bytes)}


def test_sensitivity_puts_the_slowed_kernel_on_the_other_side(profilers: Profilers) -> None:
    trials = list(experiments.sensitivity(CASE, CPU))
    assert len(trials) == experiments.TRIALS * len(experiments.EFFECTS)
    for trial in trials:
        assert trial["a"] == [20.0] * 4
        assert trial["b"] == pytest.approx([20.0 * (1 + trial["effect"])] * 4)
        assert trial["spin_us"] == pytest.approx(20.0 * trial["effect"])


def test_timers_of_others_stand_beside_ours_or_say_why_not(profilers: Profilers) -> None:
    trials = list(experiments.timers(CASE, CPU))
    found = {t["timer"]: t for t in trials if t["impl"] == OURS[0]}
    assert {t["impl"] for t in trials} == set(OURS)
    assert {name: t["us"] for name, t in found.items()} == {
        **{"fake": 20.0, "graph-warm": 20.0, "events": 20.0},
        **{"triton do_bench": 30.0, "triton do_bench_cudagraph": None, "tilelang do_bench": 30.0},
    }
    assert {name: t["of_calls"] for name, t in found.items() if "of_calls" in t} == {"events": "median"}
    assert found["triton do_bench_cudagraph"]["reason"] == "RuntimeError: no graph here"


def test_the_example_is_timed_by_its_own_protocol(profilers: Profilers) -> None:
    trials = list(experiments.example(CASE, CPU))
    assert [(t["impl"], t["timer"], t["us"]) for t in trials] == [
        (name, timer, us)
        for name in OURS
        for timer, us in (("events", 20.0), ("tilelang do_bench(warmup=500)", 30.0))
    ]
    assert profilers.asked == [("do_bench", {"warmup": 500})] * 2
    assert trials[0]["samples"] == [20.0] * Events.max_rounds
    assert [t.get("of_calls") for t in trials] == ["median", None] * len(OURS)


def test_an_example_that_is_wrong_is_not_timed(profilers: Profilers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "load", lambda name: fakes.Wrong())
    trials = list(experiments.example(CASE, CPU))
    assert [t["us"] for t in trials] == [None, None]
    assert all(t["reason"].startswith("wrong: ") for t in trials)
    assert profilers.asked == []


def test_a_profile_gives_the_kernels_alone_and_with_their_gaps(profilers: Profilers) -> None:
    trials = [t for t in experiments.profilers(CASE, CPU) if t["impl"] == OURS[0]]
    assert {t["timer"]: t["us"] for t in trials} == {
        **{"kernels": 20.0, "kernels and gaps": 21.0, "tilelang do_bench, cupti": 30.0}
    }
    assert trials[1]["untraced_us"] == 20.5


class Nvbench:
    """``cuda.bench``, as far as it is called: it writes its results where it was told to."""

    def __init__(self) -> None:
        self.runs: dict[str, Callable[[Any], None]] = {}
        self.launched: list[object] = []

    def register(self, run: Callable[[Any], None]) -> Any:
        return SimpleNamespace(set_name=lambda name: self.runs.__setitem__(name, run))

    def run_all_benchmarks(self, arguments: Sequence[str]) -> None:
        chosen = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--benchmark"]
        for name in chosen:

            def execute(launch: Callable[[object], object], batched: bool) -> None:
                assert not batched
                self.launched.append(launch(None))

            self.runs[name](SimpleNamespace(get_stream=lambda: SimpleNamespace(addressof=lambda: 0), exec=execute))
        Path(arguments[list(arguments).index("--json") + 1]).write_text(json.dumps(chosen))

    class BenchmarkResult:
        @staticmethod
        def from_json(path: Path) -> dict[str, list[Any]]:
            mean = SimpleNamespace(value=25e-6)
            state = SimpleNamespace(summaries={"nv/cold/time/gpu/mean": mean})
            return {name: [state] for name in json.loads(path.read_text())}


def test_nvbench_gives_seconds_of_each_implementation(
    profilers: Profilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Nvbench()
    monkeypatch.setattr(experiments, "import_module", lambda name: library)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address: address)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    trials = list(experiments.nvbench(CASE, CPU))
    assert [(t["impl"], t["timer"]) for t in trials] == [(name, "nvbench") for name in OURS]
    assert [t["us"] for t in trials] == pytest.approx([25.0, 25.0])
    assert len(library.launched) == 2


def test_without_nvbench_the_reason_is_recorded(profilers: Profilers, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(experiments, "import_module", missing)
    (trial,) = experiments.nvbench(CASE, CPU)
    assert (trial["us"], trial["reason"]) == (None, "ImportError: no cuda.bench")
