"""What a tuner may try: the space of an implementation's own choices, as far as it declares one.

Standard library only, for the process that leads a tuning works with configurations too. A kernel file declares its
tiles in a ``SPACE`` beside its ``TUNING``; how sequences are split is the same for both of our kernels and declared
here. A configuration is one tile with one way to split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from impls.contract import Scalar
    from impls.problem import DecodeProblem

Space: TypeAlias = Sequence[Mapping[str, Sequence["Scalar"]]]
"""A union of grids: in each, every choice of one key with every choice of the others."""

SPLIT_SPACE: Space = (
    {"waves": (None, 1, 2)},
    {"num_splits": (1, 2, 4, 8, 16, 32)},
)
"""Ways to split: our rule, one or two rounds of CTAs, and the same count for every sequence."""


@dataclass(frozen=True)
class Configuration:
    """One point of a space.

    Args:
        tile: the part of the tuning that decides what is compiled; empty for the implementation's own choice.
        splits: the rest of it.
        refusal: the rule by which this cannot run on the device, or None.
        kernel: what is compiled for it, in the implementation's own words: configurations with the same, for the
            same heads, head dim and dtype, run the same compiled kernels.
    """

    tile: Mapping[str, Scalar]
    splits: Mapping[str, Scalar]
    refusal: str | None = None
    kernel: str = ""

    @property
    def tuning(self) -> dict[str, Scalar]:
        """What :meth:`impls.contract.DecodeImpl.plan` takes."""
        return {**self.tile, **self.splits}


@runtime_checkable
class Tunable(Protocol):
    """An implementation that says what may be tried in place of its own choices, beside what all promise."""

    def configurations(self, problem: DecodeProblem, device: torch.device) -> Sequence[Configuration]:
        """All of the space, the implementation's own choice (an empty tuning) first."""
        ...


def expand(space: Space) -> list[dict[str, Scalar]]:
    """Every point of a space, in the order in which it is written."""
    return [dict(zip(grid, point, strict=True)) for grid in space for point in product(*grid.values())]


def configurations(
    tiles: Space,
    refusal: Callable[[Mapping[str, Scalar]], str | None],
    kernel: Callable[[Mapping[str, Scalar]], str],
) -> list[Configuration]:
    """The own choice, then every tile with every way to split.

    Args:
        tiles: the space.
        refusal: of a tile that cannot run, asked once for each.
        kernel: what is compiled for a tuning; a ``ValueError`` of it is the refusal.
    """
    found = [Configuration({}, {}, kernel="own choice")]
    for tile in expand(tiles):
        why = refusal(tile)
        for splits in expand(SPLIT_SPACE):
            compiled, no = "", why
            if no is None:
                try:
                    compiled = kernel({**tile, **splits})
                except ValueError as error:  # a plan refused is one
                    no = str(error)
            found.append(Configuration(tile, splits, no, compiled))
    return found


def too_large(need: int, most: int) -> str | None:
    """The refusal of a tile that needs more bytes of shared memory than a CTA may have, else None."""
    return f"shared memory: expected <= {most} bytes a CTA, got {need}" if need > most else None
