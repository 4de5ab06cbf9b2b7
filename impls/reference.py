"""The float64 oracle, and the error that rounding makes unavoidable at each of its elements.

The oracle works from the rounded inputs, sequence by sequence, on whatever device they are on. It never
looks at the output of an implementation. K and V are read in pieces, so memory stays bounded: a few
float64 copies of one piece and the scores of one sequence.

The same pass measures how far an honest kernel may stray, because only here are all scores and weights in
hand. An honest split-KV kernel computes scores in float32, rounds the weights ``P = exp(s - max)`` to the
input dtype for the second matrix product, and accumulates in float32. :class:`Reference` holds the size
that each of these has on the data at hand; :mod:`harness.check` adds them up to a budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs

CHUNK = 1024
"""Keys after which partial sums are observed (``swing``)."""

PIECE = 1 << 24
"""Elements of K or V that are held in float64 at once (128 MiB)."""

EXACT_SUM = 2**24
"""Integers up to this are exact in float32, and so are sums that stay below it, in any order."""

FP32_UNIT = 2.0**-24
"""Unit roundoff of float32: the largest relative error of one rounding to nearest."""

ROUNDING_RMS = 0.4247
"""Root-mean-square error of one rounding to nearest, in unit roundoffs.

Within a binade the error is uniform over half a spacing, so its rms is ``u / sqrt(3)`` of the power of two
below the value; over a log-uniform mantissa ``m`` in [1, 2) that is ``u / sqrt(3) * rms(1/m)``, and
``rms(1/m) = sqrt(3 / (8 ln 2)) = 0.7355``.
"""


@dataclass(frozen=True)
class Reference:
    """What is right, and what moves it. Everything is float64 on the inputs' device.

    A sequence without keys has ``out`` 0, ``lse`` and ``top`` minus infinity, and zeros elsewhere.

    Args:
        out: ``[B, Hq, D]``: the output.
        lse: ``[B, Hq]``: natural logarithm of the sum of exponentials.
        top: ``[B, Hq]``: the largest score.
        p_rms: ``[B, Hq, D]``: standard deviation of ``out`` when each ``P`` is rounded to the input dtype,
            ``sqrt(sum_j r_j^2 v_jd^2)``, where ``r_j`` is the rms rounding error of ``p_j``. Zero for
            float32, where ``P`` is not rounded again.
        bias: ``[B, Hq, D]``: the most that errors shared by many keys can do to ``out``: equal scores have
            equal errors and their weights are rounded alike, and float16 weights under ``2^-25`` of the
            largest all vanish.
        normalised: ``[B, Hq, D]``: the error of ``out`` where a kernel rounds *normalised* weights
            ``p_j / sum(p)`` instead of ``p_j``: known exactly, as the weights are. Zero for float32.
        s_rms: ``[B, Hq, D]``: standard deviation of ``out`` when each score has its float32 error
            ``e_j``, ``sqrt(sum_j p_j^2 e_j^2 (v_jd - out_d)^2)``. See :func:`reference` for ``e_j``.
        s_lse: ``[B, Hq]``: standard deviation of ``lse`` from the same errors, ``sqrt(sum_j p_j^2 e_j^2)``,
            plus the shared errors of equal scores.
        swallowed: ``[B, Hq]``: the most that keys of little weight can be off by, together, in a float32 sum
            that holds all others: those under the sum's last place are lost or rounded up to it, each off by its
            own weight or by half a last place; relative to the sum. Heavier keys round at random.
        tied: ``[B, Hq]``: share of the keys whose score another key has too, the largest score left out.
            Adding equal terms to a sum rounds the same way at every step, instead of at random.
        swing: ``[B, Hq, D]``: the largest value that a running sum ``sum_{j <= t} p_j v_jd`` takes, or
            would typically take in random order; accumulation errors are relative to it.
        exact: ``[B, Hq, D]`` bool: all scores are equal, so that every weight is 1, and V holds integers
            whose sums are exact in float32: accumulating them makes no error at all, in any order.
    """

    out: Tensor
    lse: Tensor
    top: Tensor
    p_rms: Tensor
    bias: Tensor
    normalised: Tensor
    s_rms: Tensor
    s_lse: Tensor
    swallowed: Tensor
    tied: Tensor
    swing: Tensor
    exact: Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to ``dtype``: 2^-11 float16, 2^-8 bfloat16, 2^-24 float32."""
    return torch.finfo(dtype).eps / 2


def half_subnormal(dtype: torch.dtype) -> float:
    """Half the smallest positive subnormal: no rounding to ``dtype`` has a smaller error bound than this."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps / 2


def reference(inputs: DecodeInputs) -> Reference:
    """Compute a problem in float64, with the sizes of its unavoidable errors.

    The float32 error of a score is taken as ``e_j = u32 * (scale * sum_d |q_d k_jd| + |s_j| + (max - s_j) + 4)``:
    the dot product (rounding to nearest makes a random walk over ``D`` steps, of about ``0.4 sqrt(D)``
    times a typical partial sum, and ``sum_d |q_d k_d|`` is ``0.64 sqrt(D)`` times the typical score),
    the scaling, the subtraction of the maximum, and the exponential (two units in the last place).

    Args:
        inputs: validated tensors; NaN in one sequence reaches only that sequence's rows.

    Returns:
        The oracle's values for all rows.
    """
    problem = inputs.problem
    shape = (problem.batch, problem.heads_q, problem.head_dim)

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device=inputs.device)

    result = Reference(
        out=zeros(*shape),
        lse=zeros(*shape[:2]) - torch.inf,
        top=zeros(*shape[:2]) - torch.inf,
        p_rms=zeros(*shape),
        bias=zeros(*shape),
        normalised=zeros(*shape),
        s_rms=zeros(*shape),
        s_lse=zeros(*shape[:2]),
        swallowed=zeros(*shape[:2]),
        tied=zeros(*shape[:2]),
        swing=zeros(*shape),
        exact=zeros(*shape).bool(),
    )
    bounds = problem.cu_seqlens
    for b, keys in enumerate(problem.kv_lens):
        if keys:
            _fill_sequence(result, b, inputs, slice(bounds[b], bounds[b + 1]))
    return result


def _fill_sequence(result: Reference, b: int, inputs: DecodeInputs, rows: slice) -> None:
    problem = inputs.problem
    dtype = TORCH_DTYPES[problem.dtype]
    q = inputs.q[b].double().reshape(problem.heads_kv, problem.group, problem.head_dim)
    s, magnitude = _scores(q, inputs.k[rows], problem.softmax_scale)  # [Hkv, G, n]

    top = s.amax(-1, keepdim=True)  # [Hkv, G, 1]
    p = torch.exp(s - top)  # relative to the largest, as a kernel holds it
    total = p.sum(-1, keepdim=True)
    s_error = FP32_UNIT * (magnitude + s.abs() + (top - s) + 4) * p  # p_j e_j
    p_error, p_lost = _weight_rounding(p, dtype)
    p_normalised = _rounding(p / total, dtype) * total
    equal = _equal(s)
    tied = equal & (p < 1 - 1e-9)
    # Equal scores have their error in common. At the maximum it leaves the weights as they are, but not the LSE.
    shared = torch.where(tied, s_error, 0.0)
    shared_lse = torch.where(equal, s_error, 0.0).sum(-1, keepdim=True) / total
    if dtype != torch.float32:
        shared += torch.where(tied, torch.minimum(unit_roundoff(dtype) * p, 1 - p), 0.0)
    any_tied = bool(tied.any())
    uniform = p.amin(-1) == 1  # [Hkv, G]: every weight is exactly 1
    any_uniform = bool(uniform.any())

    linear = torch.cat([p, s_error.square(), p_lost, p_normalised], dim=1)  # [Hkv, 4G, n], to meet V
    square = torch.cat([p.square(), s_error.square(), p_error.square()], dim=1)  # to meet V squared
    sums = q.new_zeros(problem.heads_kv, 4 * problem.group, problem.head_dim)
    squares = q.new_zeros(problem.heads_kv, 3 * problem.group, problem.head_dim)
    swing, bias = torch.zeros_like(q), torch.zeros_like(q)
    mass = q.new_zeros(problem.heads_kv, problem.head_dim)  # sum of |v|, infinite where v is no integer
    chunk = min(CHUNK, len(s[0, 0]))
    step = _keys_per_piece(inputs.v, chunk)
    for start in range(0, len(s[0, 0]), step):
        piece = slice(start, start + step)
        vd = _in_chunks(inputs.v[rows][piece].double().permute(1, 2, 0), chunk).mT  # [Hkv, chunks, chunk, D]
        parts = _in_chunks(linear[..., piece], chunk) @ vd  # [Hkv, chunks, 4G, D]
        running = sums[:, None, : problem.group] + parts[:, :, : problem.group].cumsum(1)
        swing = torch.maximum(swing, running.abs().amax(1))
        sums += parts.sum(1)
        squares += (_in_chunks(square[..., piece], chunk) @ vd.square()).sum(1)
        if any_tied:
            bias += (_in_chunks(shared[..., piece], chunk) @ vd.abs()).sum(1)
        if any_uniform:
            mass += torch.where(vd == vd.round(), vd.abs(), torch.inf).sum((1, 2))

    out, s_cross, lost, normalised = (part / total for part in sums.chunk(4, dim=1))
    walk, s_square, p_square = (part / total.square() for part in squares.chunk(3, dim=1))
    s_weight = s_error.square().sum(-1, keepdim=True) / total.square()
    # sum_j w_j (v_j - o)^2 = sum w v^2 - 2 o sum w v + o^2 sum w, where w_j = (p_j e_j)^2
    s_variance = s_square - 2 * out * (s_cross / total) + out.square() * s_weight

    result.out[b] = out.flatten(0, 1)
    result.lse[b] = (top + total.log()).flatten()
    result.top[b] = top.flatten()
    result.p_rms[b] = p_square.sqrt().flatten(0, 1)
    result.bias[b] = (lost.abs() + bias / total).flatten(0, 1)
    result.normalised[b] = normalised.abs().flatten(0, 1)
    result.s_rms[b] = s_variance.clamp(min=0).sqrt().flatten(0, 1)
    result.s_lse[b] = (s_weight.sqrt() + shared_lse).flatten()
    result.swallowed[b] = _swallowed(p / total).flatten()
    result.tied[b] = tied.double().mean(-1).flatten()
    result.swing[b] = torch.maximum(swing / total, walk.sqrt()).flatten(0, 1)
    result.exact[b] = (uniform[..., None] & (mass < EXACT_SUM)[:, None]).flatten(0, 1)


def _keys_per_piece(kv: Tensor, chunk: int) -> int:
    """Keys of a piece of K or V ``[n, Hkv, D]``: whole chunks, at least one."""
    return max(1, PIECE // (chunk * kv.shape[1] * kv.shape[2])) * chunk


def _in_chunks(values: Tensor, chunk: int) -> Tensor:
    """``[Hkv, rows, m]`` as ``[Hkv, chunks, rows, chunk]``, the last chunk filled up with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % chunk))
    return padded.reshape(*padded.shape[:2], -1, chunk).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scores, and the sums of absolute products behind them, both ``[Hkv, G, n]`` and scaled."""
    scores, magnitudes = [], []
    for part in torch.split(k, _keys_per_piece(k, CHUNK)):
        kd = part.double().permute(1, 2, 0)  # [Hkv, D, m]
        scores.append(q @ kd)
        magnitudes.append(q.abs() @ kd.abs())
    return torch.cat(scores, dim=-1) * scale, torch.cat(magnitudes, dim=-1) * scale


def _weight_rounding(p: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounding ``p`` in (0, 1] to ``dtype``: its rms error, and the part that has one sign for all keys.

    A kernel holds ``p`` relative to a running maximum, which is never above the final one, so its ``p`` is
    never smaller than this one and its error relative to ``p`` never larger. The largest weight is 1 and
    has no error; weights just below it cannot be off by more than their distance to 1.
    """
    if dtype == torch.float32:
        return torch.zeros_like(p), torch.zeros_like(p)
    lost = torch.where(p < torch.finfo(dtype).tiny, p.clamp(max=half_subnormal(dtype)), 0.0)
    error = torch.minimum(torch.maximum(ROUNDING_RMS * unit_roundoff(dtype) * p, lost), 1 - p)
    return error, lost


def _swallowed(weights: Tensor) -> Tensor:
    """What light keys can be off by in a sum of 1: ``[Hkv, G]`` from normalised weights ``[Hkv, G, n]``."""
    return torch.where(weights < 2 * FP32_UNIT, weights.clamp(max=FP32_UNIT), 0.0).sum(-1)


def _rounding(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of rounding normalised weights to ``dtype``; zero for float32."""
    return torch.zeros_like(weights) if dtype == torch.float32 else weights.to(dtype).double() - weights


def _equal(s: Tensor) -> Tensor:
    """Which keys share their score with another one; bool ``[Hkv, G, n]``.

    Equal rows of K give scores that differ in the last bits of float64, by where they fell in a piece.
    """
    ordered, order = s.sort(dim=-1)
    same = ordered.diff(dim=-1) <= 1e-12 * (1 + ordered[..., 1:].abs())
    neighbour = torch.zeros_like(ordered, dtype=torch.bool)
    neighbour[..., 1:] |= same
    neighbour[..., :-1] |= same
    return torch.zeros_like(neighbour).scatter(-1, order, neighbour)
