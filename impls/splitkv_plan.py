"""What the plans of our two kernels share: the split table on the device, the workspace, the launch order.

The kernels are ports of each other, so they use one split rule, one table layout and one workspace layout.
Those are decided and allocated here; a kernel file adds its tile and its launches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from impls.contract import DecodeInputs, DecodeOutput, PlanRefused, Scalar, empty_output
from impls.problem import DecodeProblem
from impls.splits import balanced_counts, equal_counts, make_table, proportional_counts

SPLIT_TUNING: Mapping[str, Scalar] = {
    "num_splits": "auto",
    "waves": None,
    "workspace_budget_bytes": 2 << 30,
}
"""What a caller may choose about splits: an integer or ``"auto"``; the rounds of CTAs that ``auto`` plans for,
None for whichever ends first; and the largest workspace allowed."""

CTA_OVERHEAD_BYTES = 136 << 10
"""What starting and ending a CTA costs, as bytes that an SM could have read meanwhile: about 4 µs on an H200."""


def positive(choice: Mapping[str, Scalar], key: str, default: int | None = None) -> int:
    """The integer that was chosen for ``key``, or ``default`` where the choice is None.

    Raises:
        ValueError: if that is not an integer of at least 1.
    """
    value = choice[key] if choice[key] is not None else default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: expected an integer >= 1, got {value!r}")
    return value


class SplitKVPlan:
    """The part of a plan that does not depend on the kernel language; see :class:`impls.contract.DecodePlan`.

    Args:
        problem: what is to be computed.
        device: where.
        choice: the tuning, complete; of it :data:`SPLIT_TUNING` is read here.
        sm_count: SMs of the device, or what stands in for them.
        tiles_per_split: CTAs that one split launches: KV heads times head tiles.
        min_keys: ``auto`` plans no split shorter than this.

    Attributes:
        split_counts: ``[B]`` splits of each sequence, from which a check knows where the edges are.

    Raises:
        PlanRefused: if the workspace would exceed ``workspace_budget_bytes``.
        ValueError: for a choice out of range.
    """

    config: Mapping[str, Scalar]

    def __init__(
        self,
        problem: DecodeProblem,
        device: torch.device,
        choice: Mapping[str, Scalar],
        *,
        sm_count: int,
        tiles_per_split: int,
        min_keys: int,
    ) -> None:
        if choice["num_splits"] != "auto":
            counts = equal_counts(problem.kv_lens, positive(choice, "num_splits"))
        elif choice["waves"] is not None:
            counts = proportional_counts(
                problem.kv_lens,
                tiles_per_split=tiles_per_split,
                slots=sm_count * positive(choice, "waves"),
                min_keys=min_keys,
            )
        else:
            counts = balanced_counts(
                problem.kv_lens,
                tiles_per_split=tiles_per_split,
                ctas=sm_count,
                min_keys=min_keys,
                overhead=CTA_OVERHEAD_BYTES // (2 * problem.head_dim * problem.element_bytes),
            )
        table = make_table(problem.kv_lens, counts)
        workspace_bytes = table.workspace_bytes(problem.heads_q, problem.head_dim)
        budget = positive(choice, "workspace_budget_bytes")
        if workspace_bytes > budget:
            raise PlanRefused(
                f"workspace: expected <= {budget} bytes (workspace_budget_bytes), got {workspace_bytes}"
            )
        self.split_counts: tuple[int, ...] = tuple(counts.tolist())
        self._problem = problem
        self._total_kv = problem.total_kv  # a sum over all lengths: not in every launch
        self._device = device
        self._items = torch.from_numpy(table.items).to(device)  # [splits, 4]
        self._merges = torch.from_numpy(table.merges).to(device)  # [merged sequences, 4]
        rows = (table.slots, problem.heads_q)
        self._partial = torch.empty((*rows, problem.head_dim), dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
        self._split_config: Mapping[str, Scalar] = {
            "num_splits": choice["num_splits"],
            "splits_max": table.splits_max,
            "work_items": len(table.items) * tiles_per_split,
            "workspace_bytes": workspace_bytes,
        }

    def new_output(self) -> DecodeOutput:
        """Fresh output tensors."""
        return empty_output(self._problem, self._device)

    def workspaces(self) -> tuple[Tensor, ...]:
        """The partials ``[slots, Hq, D]`` and their LSE ``[slots, Hq]``, both float32."""
        return self._partial, self._partial_lse

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Launch the split kernel and, where a sequence has several splits, the combine kernel."""
        out = out or self.new_output()
        assert out.lse is not None, "out.lse: expected a tensor, as new_output() makes it, got None"
        if not self._total_kv:  # nothing to read: no kernel is needed to say so
            out.out.zero_()
            out.lse.fill_(float("-inf"))
            return out
        self.launch_split(inputs, out.out, out.lse)
        if len(self._merges):
            self.launch_combine(out.out, out.lse)
        return out

    def launch_split(self, inputs: DecodeInputs, out: Tensor, lse: Tensor) -> None:
        """Launch the split kernel over every item; never called for a batch without keys."""
        raise NotImplementedError

    def launch_combine(self, out: Tensor, lse: Tensor) -> None:
        """Launch the combine kernel over every merge; called only if there is one."""
        raise NotImplementedError
