"""Every branch of both of our kernels once, on small problems: what to run under ``compute-sanitizer``.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.sanitize

Without PyTorch's caching allocator each tensor is an allocation of its own, so that one element too far is
outside of it. Inputs are drawn and answers judged on the CPU: hardly any kernel but ours runs on the GPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace

import torch

from harness.check import compare
from harness.inputs import make_inputs
from impls.catalog import OURS, load
from impls.contract import DecodeOutput, Scalar
from impls.problem import DecodeProblem
from impls.reference import reference


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A small problem, and the branch that it is there for.

    Args:
        covers: the branch.
        kv_lens: keys of each sequence.
        shape: ``(heads_q, heads_kv, head_dim, dtype)``.
        tuning: of the plan; two splits unless it says otherwise.
        layout: of K and V.
    """

    covers: str
    kv_lens: tuple[int, ...]
    shape: tuple[int, int, int, str] = (8, 2, 128, "bfloat16")
    tuning: dict[str, Scalar] = field(default_factory=lambda: {"num_splits": 2})
    layout: str = "packed"

    @property
    def problem(self) -> DecodeProblem:
        """What is computed."""
        heads_q, heads_kv, head_dim, dtype = self.shape
        return DecodeProblem(
            kv_lens=self.kv_lens, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, dtype=dtype
        )


BRANCHES = (
    Branch(covers="no combine; full tiles, tails, one key", kv_lens=(256, 300, 1), tuning={"num_splits": 1}),
    Branch(
        covers="a combine; an empty sequence beside it",
        kv_lens=(700, 0, 33),
        tuning={"num_splits": 3, "merge": "combine"},
    ),
    Branch(covers="an exchange; an empty sequence beside it", kv_lens=(700, 0, 33), tuning={"num_splits": 3}),
    Branch(covers="counts in proportion to length", kv_lens=(1500, 40), tuning={}),
    Branch(
        covers="more splits than are merged at a time",
        kv_lens=(300,),
        tuning={"num_splits": 140, "merge": "combine"},
    ),
    Branch(
        covers="many splits of a head dim that 32 does not divide",
        kv_lens=(300, 20),
        shape=(6, 2, 80, "bfloat16"),
        tuning={"num_splits": 20, "merge": "combine"},
    ),
    Branch(covers="tens of splits", kv_lens=(300,), tuning={"num_splits": 40, "merge": "combine"}),
    Branch(covers="more splits than an exchange reads at a time", kv_lens=(300,), tuning={"num_splits": 40}),
    Branch(covers="clusters that merge by themselves", kv_lens=(300, 310, 4), tuning={"num_splits": 4}),
    Branch(covers="the ring goes round more than once", kv_lens=(1300,), tuning={"num_splits": 1}),
    Branch(covers="the long tile", kv_lens=(520, 130), tuning={"num_splits": 2, "block_n": 128}),
    Branch(covers="a short tile", kv_lens=(200, 31), tuning={"num_splits": 2, "block_n": 32}),
    Branch(covers="one query head a KV head", kv_lens=(150,), shape=(2, 2, 64, "float16")),
    Branch(covers="a padded group and head dim", kv_lens=(150, 9), shape=(14, 2, 80, "bfloat16")),
    Branch(covers="a head dim of three quarters", kv_lens=(150,), shape=(4, 2, 96, "float16")),
    Branch(covers="the widest head dim", kv_lens=(150,), shape=(8, 1, 256, "float16")),
    Branch(covers="a tile of 32 rows", kv_lens=(150,), shape=(24, 1, 128, "float16")),
    Branch(covers="64 rows, and a second head tile", kv_lens=(300, 70), shape=(70, 1, 128, "bfloat16")),
    Branch(
        covers="a cluster of 16 for each of two head tiles",
        kv_lens=(300,),
        shape=(70, 1, 128, "bfloat16"),
        tuning={"num_splits": 16},
    ),
    Branch(covers="float32", kv_lens=(150, 9), shape=(8, 2, 64, "float32")),
    Branch(covers="views of a fused buffer", kv_lens=(150, 9), layout="interleaved"),
)


def run(name: str, branch: Branch, device: torch.device) -> str | None:
    """Run one branch of one kernel.

    Returns:
        Why its answer is wrong, or the rule by which it is refused, or None.
    """
    impl = load(name)
    problem = branch.problem
    if rule := impl.unsupported(problem, device):
        return f"unsupported: {rule}"
    inputs = make_inputs(problem, 0, "cpu", layout=branch.layout)
    there = replace(
        inputs,
        q=inputs.q.to(device),
        k=_moved(inputs.k, device),
        v=_moved(inputs.v, device),
        cu_seqlens_k=inputs.cu_seqlens_k.to(device),
    )
    plan = impl.plan(problem, device, branch.tuning)
    output = plan.run(there, plan.new_output())
    assert output.lse is not None
    result = compare(DecodeOutput(output.out.cpu(), output.lse.cpu()), reference(inputs), problem)
    return result.reason


def _moved(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A view on the device with the same strides, in an allocation that ends where the view does."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    flat = torch.as_strided(view, (size,), (1,)).to(device, copy=True)
    return torch.as_strided(flat, view.shape, view.stride(), 0)


def main() -> int:
    """The command line; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__.partition("\n")[0])
    parser.add_argument("--impls", default=",".join(OURS))
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    wrong = 0
    for name in asked.impls.split(","):
        for branch in BRANCHES:
            reason = run(name, branch, torch.device(asked.device))
            wrong += reason is not None and not reason.startswith("unsupported: ")
            print(f"{name}: {branch.covers}: {reason or 'ok'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
