"""What tests do with a plan on a GPU, over and over."""

from __future__ import annotations

import torch

from harness.check import compare, same_bits
from impls.contract import DecodeInputs, DecodePlan
from impls.reference import reference


def right_and_equal_in_bits(plan: DecodePlan, inputs: DecodeInputs, runs: int) -> None:
    """So many launches, each put in place while the one before runs, into outputs of their own."""
    outputs = [plan.new_output() for _ in range(runs)]
    first = outputs[0]
    assert first is not None
    for output in outputs:
        plan.run(inputs, output)
    torch.cuda.synchronize()
    assert all(same_bits(first, output) for output in outputs[1:] if output is not None)
    result = compare(first, reference(inputs), inputs.problem)
    assert result.ok, result.reason
