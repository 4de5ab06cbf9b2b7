"""Which tile and which splits a plan of the Triton kernels takes: host values only.

Needs neither Triton nor the device, of which it knows what :class:`impls.triton_tile.Machine` says.
"""

from __future__ import annotations

from collections.abc import Mapping

from impls.contract import Scalar
from impls.problem import DecodeProblem
from impls.splitkv_plan import (
    AMPLE,
    BUDGET,
    TRITON_WHOLE,
    WORK,
    Splitting,
    decide_splitting,
    leaves_plan,
    positive,
    rounds_splits,
    split_limits,
    stand_alone,
    stays_whole,
    work_of,
)
from impls.triton_tile import Machine, Tile, at_once, can_exchange, choose_tile


def refused_problem(problem: DecodeProblem) -> str | None:
    """Refuses head dims over 256, on any device."""
    return f"head_dim: expected <= 256, got {problem.head_dim}" if problem.head_dim > 256 else None


def tiles_of(problem: DecodeProblem, machine: Machine, choice: Mapping[str, Scalar]) -> Mapping[str, Tile]:
    """The tile of each kind of work, whatever the lengths."""
    return {work: choose_tile(problem, machine, choice, work=work) for work in WORK}


def choose_plan(
    problem: DecodeProblem, machine: Machine, choice: Mapping[str, Scalar], tiles: Mapping[str, Tile]
) -> tuple[Tile, Splitting]:
    """The tile that is taken, of those of each kind of work, and the splits; host values only.

    The kind of work says which, but for what the plan itself shows (measured: ``reports/NOTES.md``):

    - a few unlike sequences, of the kind ``short``, whose CTAs have an SM to themselves want the long tile
      (:func:`impls.splitkv_plan.stand_alone`); up to head dim 64 two rounds instead, with the tile of rounds, where
      they would merge by exchange on more CTAs than SMs, though the more splits mostly take a combine kernel;
    - up to head dim 64, steady work of more CTAs than SMs wants the tile of rounds;
    - packed work of over two and a half CTAs an SM wants a longer one, of which three fit, up to head dim 64 the
      long one and up to three: where more fit than come, how they are laid out is luck.

    A kind stands for its tile here: on an H200 ``long`` for 128 keys in three stages, ``spill``, and ``rounds`` up
    to head dim 64, for 64 in three (:func:`impls.triton_tile.choose_tile`).
    """
    sms = machine.sms
    work = work_of(problem, sms)
    budget, ample = positive(choice, BUDGET), {**choice, BUDGET: AMPLE}
    tile, splitting = tiles[work], decide(problem, machine, ample, tiles[work])
    if leaves_plan(choice):
        instead, waves = _instead(problem, work, splitting, sms)
        if tiles[instead] != tile or waves is not None:
            other = decide(problem, machine, {**ample, "waves": waves}, tiles[instead])
            if waves is None or other.ctas > splitting.ctas:
                tile, splitting, ample = tiles[instead], other, {**ample, "waves": waves}
    if splitting.workspace_bytes > budget:
        splitting = decide(problem, machine, {**ample, BUDGET: budget}, tile)
    return tile, splitting


def _instead(problem: DecodeProblem, work: str, splitting: Splitting, sms: int) -> tuple[str, int | None]:
    """The kind of work whose tile is wanted in place of this one's, and for how many rounds, or None."""
    small, ctas = problem.head_dim <= 64, splitting.ctas
    if work == "short" and small:
        return ("rounds", 2) if ctas > sms and splitting.exchange else (work, None)
    if work == "short" and stand_alone(problem, splitting, sms):
        return "long", None
    if work == "steady" and small and ctas > sms:
        return "rounds", None
    if work == "packed" and problem.head_dim <= 128 and 2 * ctas > 5 * sms:
        if not small:
            return "spill", None
        return ("long" if ctas <= 3 * sms else work), None
    return work, None


def decide(problem: DecodeProblem, machine: Machine, choice: Mapping[str, Scalar], tile: Tile) -> Splitting:
    """Splits and the way to merge them; host values only.

    Raises:
        PlanRefused: if the workspace would exceed its budget.
        ValueError: for a choice out of range.
    """
    sms, tiles, ctas = machine.sms, problem.tiles_per_split(tile.block_h), places(problem, machine, tile)
    whole = stays_whole(problem, choice, sms=sms, tiles_per_split=tiles, at_once=ctas, kinds=TRITON_WHOLE)
    return decide_splitting(
        problem,
        choice,
        sm_count=sms,
        tiles_per_split=tiles,
        limits=split_limits(sms, problem, block_n=tile.block_n, num_stages=tile.num_stages, tma=False),
        num_splits=1 if whole else rounds_splits(problem, choice, sms=sms, tiles_per_split=tiles),
        at_once=ctas,
    )


def places(problem: DecodeProblem, machine: Machine, tile: Tile) -> int:
    """CTAs that may merge by exchange: those surely on the device at once, 0 where there is no such kernel."""
    return at_once(problem, tile, machine) if not machine.interprets and can_exchange(problem) else 0
