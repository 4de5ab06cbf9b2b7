"""Inputs: seeded tensors of one problem, in families and memory layouts that each expose a kind of fault.

Values are drawn on the device in float32 and rounded to the problem's dtype, in pieces, so that the largest
problem needs little more memory than its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs
from impls.problem import DecodeProblem

PIECE = 1 << 24
"""Elements that are drawn in float32 at once (64 MiB)."""

_T = TypeVar("_T")

EXACT_SIZE = 16
"""Standard deviation of V in the exact family: sums stay exact in float32 up to a million keys."""

NEEDLE_SPLITS = (*range(1, 17), 32, 64, 128)
"""Split counts whose edges :func:`needle_keys` marks."""

GUARD_ROWS = 64
"""Rows put before and after K and V by :func:`guard`: half a tile of the usual kernel."""

Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""``q [B, Hq, D]``, ``k`` and ``v`` ``[total_kv, Hkv, D]``, in the problem's dtype."""

Family: TypeAlias = Callable[[DecodeProblem, torch.Generator], Tensors]
"""Draws the tensors of a problem on the generator's device."""


def make_inputs(
    problem: DecodeProblem,
    seed: int,
    device: torch.device | str,
    *,
    family: str = "normal",
    layout: str = "packed",
    split_counts: Sequence[Sequence[int]] = (),
) -> DecodeInputs:
    """Inputs of a problem; the same arguments give the same values on the same kind of device.

    Args:
        problem: what is to be computed.
        seed: of the random generator.
        device: where the tensors are made.
        family: a key of :data:`FAMILIES`.
        layout: a key of :data:`LAYOUTS`.
        split_counts: how plans cut the sequences, ``[B]`` counts each: the needles family marks their edges too.

    Raises:
        KeyError: for an unknown family or layout; the message lists the known ones.
    """
    draw = _known("family", FAMILIES, family)
    arrange = _known("layout", LAYOUTS, layout)
    generator = torch.Generator(device=device).manual_seed(seed)
    if split_counts and draw is _needles:
        draw = partial(_needles, split_counts=split_counts)
    q, k, v = draw(problem, generator)
    k, v = arrange(k, v)
    return DecodeInputs(problem=problem, q=q, k=k, v=v, cu_seqlens_k=_cu_seqlens(problem, device))


def input_sets(
    problem: DecodeProblem, seed: int, device: torch.device | str, count: int
) -> tuple[DecodeInputs, ...]:
    """Independent normal input sets, for rotation in cold-cache timing.

    The first is that of ``make_inputs(problem, seed, device)``. All q, k and v differ; nothing is shared.

    Args:
        problem: what is to be computed.
        seed: of the first set; the others' seeds follow from it.
        device: where the tensors are made.
        count: sets to make, at least 1.
    """
    if count < 1:
        raise ValueError(f"count: expected >= 1, got {count}")
    # A large odd stride keeps the sets of neighbouring seeds apart; generators take 63 bits.
    return tuple(make_inputs(problem, (seed + i * 0x9E3779B97F4A7C15) % 2**63, device) for i in range(count))


def _known(what: str, table: Mapping[str, _T], name: str) -> _T:
    if name not in table:
        raise KeyError(f"{what}: expected one of {', '.join(table)}, got {name!r}")
    return table[name]


def _cu_seqlens(problem: DecodeProblem, device: torch.device | str) -> Tensor:
    return torch.tensor(problem.cu_seqlens, dtype=torch.int32, device=device)


def _randn(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Standard normal values, drawn in float32 and rounded to ``dtype``."""
    out = torch.empty(tuple(shape), dtype=dtype, device=generator.device)
    for piece in torch.split(out.view(-1), PIECE):
        piece.copy_(torch.randn(piece.shape, generator=generator, device=generator.device))
    return out


# --- families -------------------------------------------------------------------------------------------


def _shapes(problem: DecodeProblem) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of q, and of k and v."""
    return (
        (problem.batch, problem.heads_q, problem.head_dim),
        (problem.total_kv, problem.heads_kv, problem.head_dim),
    )


def _sequences(problem: DecodeProblem) -> list[slice]:
    """The rows of packed K and V that belong to each sequence."""
    return [slice(start, stop) for start, stop in pairwise(problem.cu_seqlens)]


def _normal(problem: DecodeProblem, generator: torch.Generator) -> Tensors:
    """Zero-mean, unit-variance q, k and v: scores are about standard normal, no key stands out."""
    dtype = TORCH_DTYPES[problem.dtype]
    q_shape, kv_shape = _shapes(problem)
    q = _randn(q_shape, dtype, generator)
    return q, _randn(kv_shape, dtype, generator), _randn(kv_shape, dtype, generator)


def needle_keys(keys: int, counts: Iterable[int] = ()) -> list[int]:
    """The keys of a sequence that carry its weight in the needles family.

    The first and the last, and both sides of every edge ``keys * s // S`` for the split counts of
    :data:`NEEDLE_SPLITS` and those of ``counts``.
    """
    edges = {keys * s // count for count in {*NEEDLE_SPLITS, *counts} for s in range(count + 1)}
    return sorted({k for edge in edges for k in (edge - 1, edge) if 0 <= k < keys})


def _needles(
    problem: DecodeProblem, generator: torch.Generator, split_counts: Sequence[Sequence[int]] = ()
) -> Tensors:
    """Nearly all weight on the keys at split edges, so that losing or doubling any one of them shows.

    Query heads that share a KV head point roughly the same way, and a needle's key points there too.
    """
    q, k, v = _normal(problem, generator)
    shared = _share_direction(problem, q, generator)
    # Other keys' scores keep a deviation of about 1 whatever the scale.
    k *= min(1.0, 1 / (problem.softmax_scale * math.sqrt(problem.head_dim)))
    for b, rows in enumerate(_sequences(problem)):
        needles = needle_keys(problem.kv_lens[b], {counts[b] for counts in split_counts})
        if needles:
            # e^4 times the weight of all others together
            score = 4 + math.log(problem.kv_lens[b] / len(needles))
            at = torch.tensor(needles, device=k.device) + rows.start
            _pull(problem, k, at, score, shared[b])
    return q, k, v


def _share_direction(problem: DecodeProblem, q: Tensor, generator: torch.Generator) -> Tensor:
    """Turns query heads that share a KV head roughly one way: ``[B, Hkv, D]`` float32, which is returned."""
    shared = _randn((problem.batch, problem.heads_kv, problem.head_dim), torch.float32, generator)
    q.copy_(shared.repeat_interleave(problem.group, dim=1) + q.float() / 4)
    return shared


def _pull(problem: DecodeProblem, k: Tensor, at: Tensor, score: float, direction: Tensor) -> None:
    """Gives the keys ``at`` about this score with queries of one direction ``[Hkv, D]``."""
    pull = score / (problem.softmax_scale * problem.head_dim) * direction
    k[at] = (pull + k[at].float() / 4).to(k.dtype)


def _tagged(problem: DecodeProblem, generator: torch.Generator) -> Tensors:
    """V marks where it belongs: a pattern of +-4 for each sequence and KV head, plus unit noise.

    The first key weighs about as much as all others together, each of which is light beside it: they count, so a
    kernel that leaves out whatever is far below the running maximum loses the mark on them.
    """
    q, k, v = _normal(problem, generator)
    shared = _share_direction(problem, q, generator)
    k *= min(1.0, 1 / (problem.softmax_scale * math.sqrt(problem.head_dim)))
    # Its length is only about sqrt(D), which is too far from it for a weight that is exponential in its square.
    direction = shared / shared.square().mean(-1, keepdim=True)
    tags = 4 * _randn((problem.batch, *v.shape[1:]), torch.float32, generator).sign()
    for b, rows in enumerate(_sequences(problem)):
        v[rows] += tags[b].to(v.dtype)
        if keys := problem.kv_lens[b]:
            first = torch.tensor([rows.start], device=k.device)
            _pull(problem, k, first, 0.5 + math.log(keys), direction[b])  # e^0.5: the mean of exp(s) of the others
    return q, k, v


def _exact(problem: DecodeProblem, generator: torch.Generator) -> Tensors:
    """q = 0 and integer V that nearly cancels: every weight is 1 and every sum is exact in float32.

    Values come in pairs of opposite sign at random places, so that a sequence's sum is a small integer, while
    the sum over any part of it is not. What is left of an honest kernel's error is the rounding of the output
    and of the splits' weights, both tiny beside a single value: partials of low precision show, and so does
    any one key that is lost, doubled or taken from elsewhere, at any length.
    """
    q, k, v = _normal(problem, generator)
    device = generator.device
    v.mul_(EXACT_SIZE).round_().clamp_(-127, 127)
    for rows in _sequences(problem):
        keys = rows.stop - rows.start
        if not keys:
            continue
        at = rows.start + torch.randperm(keys, generator=generator, device=device)
        half = keys // 2
        v[at[half : 2 * half]] = -v[at[:half]]
        # The last in the order: alone where the number is odd, else one of a pair.
        size = torch.randint(1, 5, v.shape[1:], generator=generator, device=device)
        sign = 2 * torch.randint(0, 2, v.shape[1:], generator=generator, device=device) - 1
        rest = (size * sign).to(v.dtype)
        v[at[-1]] = rest if keys % 2 else v[at[-1]] + rest
    return q.zero_(), k, v


def _extreme(problem: DecodeProblem, generator: torch.Generator) -> Tensors:
    """Scores of +-10^4 and more: in most rows one key takes all the weight, from a sum no sentinel bounds."""
    q, k, v = _normal(problem, generator)
    size = math.sqrt(1e4 / (problem.softmax_scale * math.sqrt(problem.head_dim)))
    return q.mul_(size), k.mul_(size), v


def _buried(problem: DecodeProblem, generator: torch.Generator) -> Tensors:
    """All scores equal, from -10^6 to -2 * 10^6: below every usual finite mask value, -10^6 among them."""
    q, k, v = _normal(problem, generator)
    # Powers of two, so that every product and sum is exact and the scores are equal in any order.
    exponent = math.ceil(math.log2(1e6 / (problem.softmax_scale * problem.head_dim)))
    return q.fill_(2.0 ** (exponent // 2)), k.fill_(-(2.0 ** (exponent - exponent // 2))), v


def _equal(problem: DecodeProblem, generator: torch.Generator) -> Tensors:
    """All keys of a sequence the same: the output is the mean of V."""
    q, k, v = _normal(problem, generator)
    for rows in _sequences(problem):
        k[rows] = k[rows.start : rows.start + 1]
    return q, k, v


FAMILIES: Mapping[str, Family] = {
    "normal": _normal,
    "needles": _needles,
    "tagged": _tagged,
    "exact": _exact,
    "extreme": _extreme,
    "buried": _buried,
    "equal": _equal,
}
"""Family name -> how its tensors are drawn."""


# --- layouts --------------------------------------------------------------------------------------------


def _packed(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two contiguous tensors."""
    return k, v


def _interleaved(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of one buffer ``[total, 2, Hkv, D]``: rows of K and V alternate."""
    fused = torch.stack([k, v], dim=1)
    return fused[:, 0], fused[:, 1]


def _interleaved_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of one buffer ``[total, Hkv, 2, D]``: K and V alternate from head to head."""
    fused = torch.stack([k, v], dim=2)
    return fused[:, :, 0], fused[:, :, 1]


def _heads_first(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of ``[Hkv, total, D]``: a head's rows are adjacent, the head stride is the large one."""
    return k.transpose(0, 1).contiguous().transpose(0, 1), v.transpose(0, 1).contiguous().transpose(0, 1)


def _sliced(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Heads cut out of a wider buffer whose other heads are NaN: row pitch and start differ from the packed one."""
    views = []
    for t in (k, v):
        wide = t.new_full((t.shape[0], t.shape[1] + 2, t.shape[2]), torch.nan)
        wide[:, 1:-1] = t
        views.append(wide[:, 1:-1])
    return views[0], views[1]


LAYOUTS: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "packed": _packed,
    "interleaved": _interleaved,
    "interleaved-heads": _interleaved_heads,
    "heads-first": _heads_first,
    "sliced": _sliced,
}
"""Layout name -> how packed K and V are laid out in memory; values never change."""


# --- what must not be read ------------------------------------------------------------------------------


def guard(inputs: DecodeInputs, *, fill: float = math.nan, rows: int = GUARD_ROWS) -> DecodeInputs:
    """The same inputs, with K and V as views between guard rows of ``fill`` that no kernel may read.

    Args:
        inputs: what to copy.
        fill: NaN or an infinity.
        rows: guard rows before and after, at least 1.
    """
    views = []
    for t in (inputs.k, inputs.v):
        buffer = t.new_full((len(t) + 2 * rows, *t.shape[1:]), fill)
        buffer[rows : rows + len(t)] = t
        views.append(buffer[rows : rows + len(t)])
    return DecodeInputs(
        problem=inputs.problem, q=inputs.q, k=views[0], v=views[1], cu_seqlens_k=inputs.cu_seqlens_k
    )


def guarded_buffer(view: Tensor) -> Tensor:
    """All of the buffer behind K or V of :func:`guard`, with its default number of guard rows on either side."""
    rows, pitch = len(view) + 2 * GUARD_ROWS, view.stride(0)
    return view.as_strided((rows, *view.shape[1:]), view.stride(), view.storage_offset() - GUARD_ROWS * pitch)


def isolate(inputs: DecodeInputs, sequence: int, *, fill: float = math.nan) -> DecodeInputs:
    """The same inputs, where everything of K and V but one sequence is ``fill``: guard rows and all others.

    The output of that sequence must be bit-identical to the one from ``inputs``.

    Args:
        inputs: what to copy.
        sequence: index of the sequence that keeps its keys and values.
        fill: NaN or an infinity.
    """
    isolated = guard(inputs, fill=fill)
    start, stop = inputs.problem.cu_seqlens[sequence : sequence + 2]
    for t in (isolated.k, isolated.v):
        t[:start] = fill
        t[stop:] = fill
    return isolated
