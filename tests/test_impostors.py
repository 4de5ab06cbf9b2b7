"""Every wrong kernel whose error is visible is caught, at every length; every right one passes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from harness.probes import probes
from impls.catalog import OURS, load
from impls.contract import DecodeInputs, DecodeOutput
from tests.impostors import (
    IMPOSTORS,
    LENGTHS,
    RACE_OUTPUTS,
    ImpostorPlan,
    Kernel,
    Verdict,
    around,
    judge_all,
    problem_of,
    simulated,
    write,
)

CPU = torch.device("cpu")

LIGHT = "weights under 2^-10 of the running maximum dropped"

WITHOUT_EFFECT = {
    1: {"every eighth key dropped", "partials in bfloat16", "partials in float16", LIGHT},
    63: {LIGHT},
    200: {LIGHT},
    4096: set(),
    131072: set(),
}
"""Impostors that are right at a length, or as good as right: an answer of one key needs no partials."""

ONE_TILE = {"accumulator not rescaled", "denominator not rescaled", "only the last 1024 keys"}
"""Impostors that are right until a split has more than one tile."""


def check(verdicts: list[Verdict]) -> None:
    missed = [f"{v.impostor}: {v.excess:.3g} times the honest error in {v.visible}" for v in verdicts]
    missed = [line for line, v in zip(missed, verdicts, strict=True) if v.counts and not v.caught]
    assert missed == []


def test_there_are_enough_and_they_have_names_of_their_own():
    assert len(IMPOSTORS) >= 30
    assert Counter(impostor.name for impostor in IMPOSTORS).most_common(1)[0][1] == 1


@pytest.mark.parametrize("length", [length for length in LENGTHS if length <= 4096])
def test_every_visible_impostor_is_caught(length):
    verdicts = list(judge_all(length, CPU))
    check(verdicts)
    unseen = {v.impostor for v in verdicts if not v.counts} - {"row index of 16 bits"}
    assert unseen == WITHOUT_EFFECT[length] | (ONE_TILE if length < 4096 else set())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_visible_impostor_is_caught_in_other_dtypes(dtype):
    check(list(judge_all(200, CPU, dtype=dtype)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_visible_impostor_is_caught_at_long_context(device):
    verdicts = list(judge_all(131072, device))
    check(verdicts)
    assert {v.impostor for v in verdicts if not v.counts} == WITHOUT_EFFECT[131072]


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_visible_impostor_around_a_real_kernel_is_caught(length, name):
    impostors = [impostor for impostor in IMPOSTORS if not impostor.simulated]
    check(list(judge_all(length, torch.device("cuda"), right=around(load(name)), impostors=impostors)))


# --- impostors that only a graph shows --------------------------------------------------------------------


def launches_nothing_in_a_graph(inputs: DecodeInputs, output: DecodeOutput) -> None:
    if torch.cuda.is_current_stream_capturing():
        output.out.mul_(1)  # but for this, of which an empty graph is warned
    else:
        simulated(inputs, output)


def remembers_in_a_graph() -> Kernel:
    held: list[DecodeOutput] = []

    def kernel(inputs: DecodeInputs, output: DecodeOutput) -> None:
        if not torch.cuda.is_current_stream_capturing():
            simulated(inputs, output)
            held[:] = [DecodeOutput(output.out.clone(), output.lse.clone())]
        write(output, held[0])

    return kernel


def works_once_in_a_graph(right: Kernel) -> Kernel:
    fresh: list[torch.Tensor] = []

    def kernel(inputs: DecodeInputs, output: DecodeOutput) -> None:
        if not fresh:
            fresh.append(torch.ones((), device=inputs.device))
        mine = DecodeOutput(output.out.clone(), output.lse.clone())
        right(inputs, mine)
        output.out.copy_(torch.where(fresh[0] > 0, mine.out, output.out))
        output.lse.copy_(mine.lse)
        if torch.cuda.is_current_stream_capturing():
            fresh[0].zero_()  # on replay: the second finds it so

    return kernel


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["launches nothing", "remembers", "works once"])
def test_a_replayed_graph_gives_them_away(fault):
    device = torch.device("cuda")
    problem = problem_of(200)
    right = around(load("triton-splitkv"))
    kernel = {
        "launches nothing": launches_nothing_in_a_graph,
        "remembers": remembers_in_a_graph(),
        "works once": works_once_in_a_graph(right),
    }[fault]
    found = {}
    for probe in probes(problem, 0, device, families=("normal",), repeat_outputs=1):
        found[probe.name] = probe.apply(ImpostorPlan(problem, device, kernel)).result
        assert probe.name == "graph" or fault != "launches nothing" or found[probe.name].ok
    assert not found["graph"].ok
    assert "replayed from a CUDA graph: " in found["graph"].reason


def test_a_race_is_judged_over_a_million_outputs():
    problem = problem_of(1)
    *_, probe = probes(problem, 0, CPU, families=("normal",), repeat_outputs=RACE_OUTPUTS)
    seen = []

    def count(inputs: DecodeInputs, output: DecodeOutput) -> None:
        simulated(inputs, output)
        seen.append(output.out.numel())

    assert probe.apply(ImpostorPlan(problem, CPU, count)).result.ok
    assert sum(seen) >= RACE_OUTPUTS
