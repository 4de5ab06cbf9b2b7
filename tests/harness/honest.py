"""Honest kernels, simulated in torch: the algorithm of split-KV decode with its unavoidable roundings.

They stand for every kernel that the check must let pass. ``truncate`` adds what a tensor core does to the
output accumulator: the products of 16 keys are aligned to the largest of them and the accumulator, cut two bits
below its last place, added, and the sum is cut, not rounded, to float32. ``lanes`` keeps the sum of the weights
in so many accumulators from the first key to the last, as kernels do that add up their threads' sums at the end.
The steps of the algorithm are in :class:`Steps`, so that an impostor can replace one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs, DecodeOutput, empty_output

MMA_KEYS = 16


def cut(keys: int, splits: int) -> list[tuple[int, int]]:
    """The ranges of a sequence's splits: in proportion, and no more than it has keys."""
    splits = min(splits, max(keys, 1))
    return [(keys * s // splits, keys * (s + 1) // splits) for s in range(splits)]


def combine(outs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge normalised partials ``[S, Hkv, G, D]`` by their LSE ``[S, Hkv, G]``, splits without keys skipped."""
    top = lse.amax(0)
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - top))
    total = weight.sum(0)
    out = (weight[..., None] * outs).sum(0) / total.clamp(min=1.0)[..., None]
    return out, top + total.log()


def unchanged(x: Tensor) -> Tensor:
    """What an honest kernel does between two steps."""
    return x


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What the simulated kernel does at each step.

    Args:
        cut: ``(keys, splits)`` to ranges of keys, relative to the sequence's first.
        combine: partials and their LSE to the output and its LSE.
        lowest: the running maximum's first value.
        scores: between the first product and the softmax.
        weights: P, after it was rounded to the input's dtype.
        rescale_acc: what the output accumulator is rescaled by, from the right factor.
        rescale_sum: likewise the denominator.
        partials: normalised partials, on their way to the combine step.
    """

    cut: Callable[[int, int], list[tuple[int, int]]] = cut
    combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = combine
    lowest: float = -math.inf
    scores: Callable[[Tensor], Tensor] = unchanged
    weights: Callable[[Tensor], Tensor] = unchanged
    rescale_acc: Callable[[Tensor], Tensor] = unchanged
    rescale_sum: Callable[[Tensor], Tensor] = unchanged
    partials: Callable[[Tensor], Tensor] = unchanged


HONEST = Steps()


def honest(
    inputs: DecodeInputs,
    *,
    splits: int = 1,
    block: int = 64,
    reverse: bool = False,
    truncate: bool = False,
    lanes: int | None = None,
    steps: Steps = HONEST,
) -> DecodeOutput:
    """Tiles of ``block`` keys, online softmax, P rounded to the input dtype, float32 partials and combine."""
    problem = inputs.problem
    output = empty_output(problem, inputs.device)
    assert output.lse is not None
    for b, (first, keys) in enumerate(zip(problem.cu_seqlens, problem.kv_lens, strict=False)):
        q = inputs.q[b].float().reshape(problem.heads_kv, problem.group, problem.head_dim)
        partials = []
        for start, stop in steps.cut(keys, splits):
            rows = slice(first + start, first + stop)
            k, v = (t[rows].float().transpose(0, 1) for t in (inputs.k, inputs.v))  # [Hkv, n, D]
            partials.append(_split(q, k, v, problem, block, reverse, truncate, lanes, steps))
        outs, lses = (torch.stack(parts) for parts in zip(*partials, strict=True))
        out, lse = steps.combine(steps.partials(outs), lses)
        output.out[b] = out.flatten(0, 1)
        output.lse[b] = lse.flatten()
    return output


def _split(q, k, v, problem, block, reverse, truncate, lanes, steps):
    dtype = TORCH_DTYPES[problem.dtype]
    scale = torch.tensor(problem.softmax_scale * math.log2(math.e), dtype=torch.float32)
    m = q.new_full((*q.shape[:2], 1), steps.lowest)
    total = torch.zeros_like(m) if lanes is None else m.new_zeros(*q.shape[:2], lanes)
    acc = torch.zeros_like(q)
    starts = range(0, k.shape[1], block)
    for start in reversed(starts) if reverse else starts:
        s = steps.scores(q @ k[:, start : start + block].mT)  # [Hkv, G, block]
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        alpha = torch.exp2((m - m_new) * scale)
        p = torch.exp2(s * scale - m_new * scale)
        total = _add_weights(total * steps.rescale_sum(alpha), p, lanes)
        rounded = steps.weights(p.to(dtype).float())
        acc = _accumulate(acc * steps.rescale_acc(alpha), rounded, v[:, start : start + block], truncate)
        m = m_new
    total = total.sum(-1, keepdim=True)
    if k.shape[1] == 0:
        return acc, m[..., 0]
    return acc / total, (m * scale + total.log2())[..., 0] * math.log(2)


def _add_weights(total: Tensor, p: Tensor, lanes: int | None) -> Tensor:
    """The sum of the weights, tile by tile; or key by key, every lane its own ones."""
    if lanes is None:
        return total + p.sum(-1, keepdim=True)
    padded = torch.nn.functional.pad(p, (0, -p.shape[-1] % lanes))
    for of_lanes in padded.unflatten(-1, (-1, lanes)).unbind(-2):
        total = total + of_lanes
    return total


def _accumulate(acc: Tensor, p: Tensor, v: Tensor, truncate: bool) -> Tensor:
    if not truncate:
        return acc + p @ v
    for at in range(0, v.shape[1], MMA_KEYS):
        products = p[..., at : at + MMA_KEYS, None].double() * v[:, None, at : at + MMA_KEYS].double()
        acc = _cut_sum(acc, products)
    return acc


def _cut_sum(acc: Tensor, products: Tensor) -> Tensor:
    """Accumulator ``[Hkv, G, D]`` plus products ``[Hkv, G, keys, D]``, aligned, cut and added."""
    largest = torch.maximum(acc.abs().double(), products.abs().amax(-2))
    last_place = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 24)
    unit = (last_place / 4).unsqueeze(-2)
    exact = acc.double() + ((products / unit).trunc() * unit).sum(-2)
    nearest = exact.float()
    overshot = nearest.double().abs() > exact.abs()
    return torch.where(overshot, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
