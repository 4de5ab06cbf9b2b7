"""The conformance cases: small problems, each of which covers a branch of a kernel or a promise of the contract.

Shapes are tiny because two of the kernels are interpreted or compiled to C on a CPU, and few, because each
(heads, head dim, dtype) is a compilation; on a GPU the same cases run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from harness.inputs import make_inputs
from impls.contract import DecodeInputs, Scalar
from impls.problem import DecodeProblem

Draw = Callable[[DecodeProblem, torch.device], DecodeInputs]


def _normal(problem: DecodeProblem, device: torch.device) -> DecodeInputs:
    return make_inputs(problem, 7, device)


def _equal_keys(problem: DecodeProblem, device: torch.device) -> DecodeInputs:
    """All keys of all sequences are the same vector, and q is its negative: scores all equal and negative."""
    inputs = make_inputs(problem, 7, device)
    k = torch.ones_like(inputs.k)
    return replace(inputs, q=-torch.ones_like(inputs.q), k=k)


def _one_key(problem: DecodeProblem, device: torch.device) -> DecodeInputs:
    """The last key of each sequence but one takes all the weight: it points along q, the others are small."""
    inputs = make_inputs(problem, 7, device)
    q = torch.ones_like(inputs.q)
    k = inputs.k * 0.01
    for start, stop in zip(problem.cu_seqlens, problem.cu_seqlens[1:], strict=False):
        k[max(start, stop - 2)] = 16
    return replace(inputs, q=q, k=k)


@dataclass(frozen=True, kw_only=True)
class ConformanceCase:
    """One problem with the inputs to run it on.

    Args:
        name: short and unique.
        covers: the branch or promise that nothing else covers.
        problem: what is computed.
        num_splits: asked of our kernels; the baselines choose for themselves.
        draw: makes the inputs.
    """

    name: str
    covers: str
    problem: DecodeProblem
    num_splits: int | str = "auto"
    draw: Draw = _normal

    @property
    def tuning(self) -> dict[str, Scalar]:
        """What our kernels are asked for."""
        return {"num_splits": self.num_splits}


EDGE_LENS = (1, 2, 5, 63, 64, 65, 127, 128, 129, 1001)
"""Around powers of two, around tile edges, and indivisible."""


def problem(
    *kv_lens: int,
    heads: tuple[int, int] = (4, 1),
    head_dim: int = 64,
    dtype: str = "float16",
    scale: float | None = None,
) -> DecodeProblem:
    """A problem with small defaults; ``heads`` is (query, KV)."""
    return DecodeProblem(
        kv_lens=kv_lens, heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim, dtype=dtype, scale=scale
    )


def _cases() -> list[ConformanceCase]:
    case = ConformanceCase
    return [
        # Empty
        case(name="no-sequences", covers="a batch of none: shapes (0, Hq, D), no launch", problem=problem()),
        case(name="no-keys", covers="total_kv = 0: nothing to read at all", problem=problem(0, 0, 0)),
        case(name="one-empty", covers="an item of no keys among others", problem=problem(5, 0, 70, 0)),
        case(
            name="empty-split",
            covers="an empty sequence among split ones: direct item beside partials",
            problem=problem(0, 130, 0, 7),
            num_splits=4,
        ),
        # Any length, any split count
        *(
            case(
                name=f"edges-{splits}",
                covers=f"lengths at tile edges and indivisible ones in {splits} splits, more than keys included",
                problem=problem(*EDGE_LENS),
                num_splits=splits,
            )
            for splits in (1, 3, 4, 8, 16, 64)
        ),
        case(name="auto", covers="split counts in proportion to length", problem=problem(3, 2000, 400)),
        case(
            name="many-splits",
            covers="more splits than the combine kernel merges at a time",
            problem=problem(300),
            num_splits=130,
        ),
        # Heads
        *(
            case(
                name=f"ratio-{ratio}",
                covers=f"{ratio} query heads on each of two KV heads: padding rows and the head map",
                problem=problem(70, 9, heads=(2 * ratio, 2)),
                num_splits=2,
            )
            for ratio in (1, 2, 4, 5, 6, 7, 8, 16, 24)
        ),
        case(
            name="ratio-70",
            covers="a group larger than the largest tile: two head tiles on one KV head",
            problem=problem(70, 9, heads=(70, 1)),
            num_splits=2,
        ),
        # Head dims and dtypes
        *(
            case(
                name=f"dim-{dim}",
                covers=f"head dim {dim}, padded to a power of two where it is none, with its own scale",
                problem=problem(70, 129, head_dim=dim, dtype="bfloat16"),
                num_splits=2,
            )
            for dim in (64, 80, 96, 128, 192, 256)
        ),
        *(
            case(
                name=f"float32-{dim}",
                covers="IEEE products of float32, without TF32",
                problem=problem(70, 129, head_dim=dim, dtype="float32"),
                num_splits=2,
            )
            for dim in (64, 256)
        ),
        # Whole pages, which the paged functions read where the rows lie
        *(
            case(
                name=f"pages-{ratio}",
                covers=f"lengths of whole pages, an empty one among them, {ratio} query heads a KV head",
                problem=problem(256, 0, 768, heads=(2 * ratio, 2)),
                num_splits=2,
            )
            for ratio in (1, 7)
        ),
        *(
            case(
                name=f"pages-dim-{dim}",
                covers=f"lengths of whole pages with head dim {dim}",
                problem=problem(512, 256, head_dim=dim, dtype="bfloat16"),
                num_splits=2,
            )
            for dim in (64, 128, 256)
        ),
        case(name="scale", covers="a scale that is not the default", problem=problem(70, scale=0.05)),
        # Large and extreme scores
        *(
            case(
                name=f"below-sentinels-{splits}",
                covers="scores of -6e33, below every finite 'very negative' constant, all equal",
                problem=problem(5, 300, dtype="bfloat16", scale=1e32),
                num_splits=splits,
                draw=_equal_keys,
            )
            for splits in (1, 3)
        ),
        case(
            name="large-scores",
            covers="scores of about +-1e4: exponents far outside float32 without the running maximum",
            problem=problem(5, 300, scale=1250.0),
            num_splits=3,
        ),
        case(
            name="equal-keys",
            # Powers of two, so that weights normalised before they are rounded (torch) stay exact as well.
            covers="all weights equal",
            problem=problem(4, 256),
            num_splits=3,
            draw=_equal_keys,
        ),
        case(
            name="one-key",
            covers="one key takes all the weight: the splits without it count for nothing",
            problem=problem(5, 300, 1),
            num_splits=4,
            draw=_one_key,
        ),
    ]


CASES = _cases()
