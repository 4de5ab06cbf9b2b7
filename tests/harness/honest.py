"""Honest kernels, simulated in torch: the algorithm of split-KV decode with its unavoidable roundings.

They stand for every kernel that the check must let pass. ``truncate`` adds what a tensor core does to the
output accumulator: the products of 16 keys are added exactly and the sum is cut, not rounded, to float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs, DecodeOutput, empty_output

MMA_KEYS = 16


def honest(
    inputs: DecodeInputs, *, splits: int = 1, block: int = 64, reverse: bool = False, truncate: bool = False
) -> DecodeOutput:
    """Tiles of ``block`` keys, online softmax, P rounded to the input dtype, float32 partials and combine."""
    problem = inputs.problem
    output = empty_output(problem, inputs.device)
    bounds = problem.cu_seqlens
    for b, keys in enumerate(problem.kv_lens):
        q = inputs.q[b].float().reshape(problem.heads_kv, problem.group, problem.head_dim)
        partials = []
        for s in range(min(splits, max(keys, 1))):
            rows = slice(bounds[b] + keys * s // splits, bounds[b] + keys * (s + 1) // splits)
            if splits > keys:
                rows = slice(bounds[b] + s, bounds[b] + min(s + 1, keys))
            k, v = (t[rows].float().transpose(0, 1) for t in (inputs.k, inputs.v))  # [Hkv, n, D]
            partials.append(_split(q, k, v, problem, block, reverse, truncate))
        out, lse = combine([o for o, _ in partials], [x for _, x in partials])
        output.out[b] = out.flatten(0, 1)
        output.lse[b] = lse.flatten()  # type: ignore[index]
    return output


def _split(q, k, v, problem, block, reverse, truncate):
    dtype = TORCH_DTYPES[problem.dtype]
    scale = torch.tensor(problem.softmax_scale * math.log2(math.e), dtype=torch.float32)
    m = q.new_full((*q.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(m)
    acc = torch.zeros_like(q)
    starts = range(0, k.shape[1], block)
    for start in reversed(starts) if reverse else starts:
        s = q @ k[:, start : start + block].mT  # [Hkv, G, block]
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        alpha = torch.exp2((m - m_new) * scale)
        p = torch.exp2(s * scale - m_new * scale)
        total = total * alpha + p.sum(-1, keepdim=True)
        acc = _accumulate(acc * alpha, p.to(dtype).float(), v[:, start : start + block], truncate)
        m = m_new
    if k.shape[1] == 0:
        return acc, m[..., 0]
    return acc / total, (m * scale + total.log2())[..., 0] * math.log(2)


def _accumulate(acc: Tensor, p: Tensor, v: Tensor, truncate: bool) -> Tensor:
    if not truncate:
        return acc + p @ v
    for at in range(0, v.shape[1], MMA_KEYS):
        products = p[..., at : at + MMA_KEYS].double() @ v[:, at : at + MMA_KEYS].double()
        exact = acc.double() + products
        nearest = exact.float()
        overshot = nearest.double().abs() > exact.abs()
        acc = torch.where(overshot, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    return acc


def combine(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge normalised partials ``[Hkv, G, D]`` by their LSE ``[Hkv, G]``; splits without keys are skipped."""
    lse = torch.stack(lses)
    top = lse.amax(0)
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - top))
    total = weight.sum(0)
    out = (weight[..., None] * torch.stack(outs)).sum(0) / total.clamp(min=1.0)[..., None]
    return out, top + total.log()
