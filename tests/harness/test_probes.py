"""Probes: what each of them sees that the others do not."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from harness.check import same_bits, ulp_distance
from harness.families import FAMILY_NAMES
from harness.inputs import FAMILIES, GUARD_ROWS, guarded_buffer, make_inputs
from harness.probes import VIEWS, Examination, determinism, hidden_sequences, probes, worst
from impls.contract import DecodeOutput, InputError
from impls.problem import DecodeProblem
from impls.torch_attention import TorchSdpa
from tests.harness.honest import honest
from tests.impostors import ImpostorPlan, simulated

CPU = torch.device("cpu")
P = DecodeProblem(kv_lens=(70, 0, 9), heads_q=4, heads_kv=2, head_dim=16)


def found(kernel, **options):
    """Probe title -> its results, for one kernel as a plan."""
    plan = ImpostorPlan(P, CPU, kernel)
    results: dict[str, list] = {}
    for probe in probes(P, 0, CPU, **options):
        results.setdefault(probe.title, []).append(probe.apply(plan))
    return results


def test_the_families_have_names_without_torch():
    assert tuple(FAMILIES) == FAMILY_NAMES


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 8, 13])
def test_every_sequence_is_hidden_while_each_other_is_not(batch):
    runs = hidden_sequences(batch)
    assert runs[0] == [False] * batch
    assert len(runs) <= 1 + 2 * math.ceil(math.log2(max(batch, 1)))
    for hidden, seen in permutations(range(batch), 2):
        assert any(run[hidden] and not run[seen] for run in runs)


def test_an_honest_kernel_passes_every_probe():
    results = found(simulated)
    assert list(results) == [
        "normal",
        "normal again",
        "normal memory",
        "normal layout",
        "normal repeat",
        *FAMILY_NAMES[1:],
    ]
    assert all(seen.result.ok for of_probe in results.values() for seen in of_probe)
    assert results["normal repeat"][0].spread == 0


def test_the_first_family_serves_the_other_probes():
    assert list(found(simulated, families=("exact", "equal"))) == [
        "exact",
        "exact again",
        "exact memory",
        "exact layout",
        "exact repeat",
        "equal",
    ]


def test_a_kernel_that_reads_another_sequence_is_told_by_memory_alone():
    def reads(inputs, output):
        simulated(inputs, output)
        output.out[2] += 0 * inputs.v[0, 0]

    results = found(reads)
    assert {title for title, seen in results.items() if not all(s.result.ok for s in seen)} == {"normal memory"}
    reasons = [seen.result.reason for seen in results["normal memory"] if not seen.result.ok]
    assert all("other sequences and around: row (sequence 2, head 0)" in reason for reason in reasons)


def test_bits_that_depend_on_other_sequences_are_told():
    """Within its budget, but not the same: the result of the last sequence follows the first one's keys."""

    def depends(inputs, output):
        simulated(inputs, output)
        if inputs.k[0, 0, 0].isnan():
            output.out[2, 0, 0] = torch.nextafter(output.out[2, 0, 0], torch.tensor(9.0).bfloat16())

    reasons = {seen.result.reason for seen in found(depends)["normal memory"]} - {None}
    assert reasons == {"memory: expected the same bits whatever lies in other sequences, got others"}


@pytest.mark.parametrize("fill", [math.nan, 1024.0])
def test_rows_around_hold_nan_and_then_large_numbers(fill):
    """Every row that is no visible sequence's, guard rows included, is seen with both."""
    seen = []

    def looks(inputs, output):
        simulated(inputs, output)
        if inputs.k.storage_offset():  # between guard rows
            seen.append((guarded_buffer(inputs.k).clone(), guarded_buffer(inputs.v).clone()))

    assert all(of.result.ok for of in found(looks, families=("normal",))["normal memory"])
    (first, last) = P.cu_seqlens[2] + GUARD_ROWS, P.cu_seqlens[3] + GUARD_ROWS  # of the sequence of index 2
    alone = 0
    for k, v in seen:
        around = [torch.cat([t[:first], t[last:]]).float() for t in (k, v)]
        if math.isnan(fill):
            alone += all(t.isnan().all() for t in around)
        else:
            alone += all((t.abs() == fill).all() for t in around)
    assert alone >= 1


def test_a_layout_that_is_refused_by_name_is_no_fault():
    def refuses(inputs, output):
        if not all(t.is_contiguous() for t in (inputs.q, inputs.k, inputs.v)):
            raise InputError("k: expected contiguous")
        simulated(inputs, output)

    results = found(refuses)
    assert len(results["normal layout"]) == len(VIEWS)
    assert all(seen.result.ok for of_probe in results.values() for seen in of_probe)


def test_a_kernel_that_takes_keys_to_be_contiguous_is_told_by_layout_alone():
    def ignores(inputs, output):
        k = inputs.k
        simulated(replace(inputs, k=k.as_strided(k.shape, (2 * 16, 16, 1), k.storage_offset())), output)

    results = found(ignores)
    assert {title for title, seen in results.items() if not all(s.result.ok for s in seen)} == {"normal layout"}
    reasons = [seen.result.reason for seen in results["normal layout"] if not seen.result.ok]
    assert [reason.split(":")[0] for reason in reasons] == [
        "K interleaved, V interleaved",
        "K heads-first, V interleaved",
    ]


def test_answers_that_vary_by_themselves_do_not_depend_on_other_sequences():
    """Every third call is off by a bit: beside NaN now and then, and beside values now and then."""
    calls = []

    def varies(inputs, output):
        simulated(inputs, output)
        calls.append(None)
        if len(calls) % 3 == 0:
            output.out[2, 0, 0] = torch.nextafter(output.out[2, 0, 0], torch.tensor(9.0).bfloat16())

    assert all(seen.result.ok for seen in found(varies)["normal memory"])


def test_a_kernel_of_two_answers_is_no_fault_but_a_fact():
    calls = []

    def wavers(inputs, output):
        calls.append(None)
        answer = honest(inputs, splits=1 + len(calls) % 3, block=16)
        output.out.copy_(answer.out)
        output.lse.copy_(answer.lse)

    (seen,) = found(wavers, families=("normal",), repeat_outputs=5000)["normal repeat"]
    assert seen.result.ok
    assert seen.spread > 0


@pytest.mark.parametrize("modifies_last", [False, True])
def test_inputs_that_a_plan_modified_are_put_back_for_the_next(modifies_last):
    """For the next plan in a probe, and for all plans in the next probe."""

    def modifies(inputs, output):
        simulated(inputs, output)
        inputs.q.mul_(2)

    bad, good = (ImpostorPlan(P, CPU, kernel) for kernel in (modifies, simulated))
    for probe in probes(P, 0, CPU, families=("normal", "exact")):
        if not modifies_last:
            probe.apply(bad)
        assert probe.apply(good).result.ok, probe.title
        if modifies_last:
            probe.apply(bad)


def test_an_examination_names_the_first_probe_that_caught_a_fault():
    def no_needles(inputs, output):
        simulated(inputs, output)
        if inputs.q.abs().max() == 0:
            output.out[0, 0, 0] += 1

    plan = ImpostorPlan(P, CPU, no_needles)
    examination = Examination()
    for probe in probes(P, 0, CPU):
        examination.add(probe, probe.apply(plan))
    assert examination.caught == "exact"
    assert "row (sequence 0, head 0)" in examination.reason
    told = examination.to_dict()
    assert (told["family"], told["same_input_ulp"]) == ("exact", 0)
    assert [p["family"] for p in told["probes"] if not p["ok"]] == ["exact"]
    assert told["worst_row"] == max(p["worst_row"] for p in told["probes"]) > 1


def test_the_worst_of_several_results_is_none_where_one_is_unknown():
    (seen,) = found(simulated)["normal"]
    unknown = replace(seen.result, lse_err=None, finite=False)
    merged = worst([seen.result, unknown])
    assert (merged["lse_err"], merged["finite"], merged["rel_l2"]) == (None, False, seen.result.rel_l2)
    assert worst([])["rel_l2"] is None


@pytest.mark.parametrize("kv_lens", [(70, 0, 9), (40,), (0, 0), ()])
def test_determinism_of_a_kernel_without_splits(kv_lens):
    problem = replace(P, kv_lens=kv_lens)
    impl = TorchSdpa()
    facts = determinism(impl, {}, impl.plan(problem, CPU), make_inputs(problem, 0, CPU))
    assert facts == {"other_batch_ulp": 0 if sum(kv_lens) else None, "one_split_ulp": None}


def test_ulp_distance_counts_representable_values():
    one = torch.tensor([1.0, 0.0]).bfloat16()
    above = torch.nextafter(one, torch.full((2,), 2.0).bfloat16())
    assert ulp_distance(one, above) == 1
    assert ulp_distance(-above, above) == 2 * (0x3F80 + 1)
    assert ulp_distance(torch.tensor([0.0]), torch.tensor([-0.0])) == 0
    assert ulp_distance(one, one * math.nan) is None
    assert ulp_distance(one[:0], one[:0]) == 0


def test_same_bits_tells_zeros_apart_and_takes_nan_as_it_is():
    a = DecodeOutput(torch.tensor([[[math.nan, 0.0]]]), None)
    assert same_bits(a, DecodeOutput(a.out.clone(), torch.zeros(1, 1)))
    assert not same_bits(a, DecodeOutput(torch.tensor([[[math.nan, -0.0]]]), None))
