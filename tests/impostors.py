"""Impostors: kernels that are wrong, each in one way that somebody has met or could meet.

An impostor is a few lines around a right kernel, simulated or real: it changes what goes in (``before``), what
comes out (``after``), one step of the algorithm (``inside``, simulated kernels alone), or it remembers
something that it should not (``state``). The check has to catch every one whose error is visible at all:
:func:`judge_all` decides that with the plain float64 error, without the check's budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from harness.check import CheckResult
from harness.probes import Probe, probes, title
from impls.contract import DecodeImpl, DecodeInputs, DecodeOutput, DecodePlan, empty_output
from impls.problem import DecodeProblem
from tests.harness.honest import Steps, combine, cut, honest

LENGTHS = (1, 63, 200, 4096, 131072)
"""Keys of the sequences that impostors are tried on."""

VISIBLE = 4.0
"""An impostor counts where its float64 error is more than so many times the honest kernels'."""

SPLITS, BLOCK, TILES = 4, 512, 64
"""Of the simulated kernel that impostors are built around: splits, keys of a tile, and the most tiles."""

RACE = 1e-5
"""The share of output elements that the race corrupts."""

RACE_OUTPUTS = 1_000_000
"""Output elements over which it is judged."""

Kernel = Callable[[DecodeInputs, DecodeOutput], None]
"""Writes the answer to the inputs into the output."""


@dataclass(frozen=True)
class Impostor:
    """A wrong kernel.

    Args:
        name: what it does wrong, in a few words.
        build: makes it, with a state of its own, around a right kernel.
        simulated: whether it is a simulated kernel whatever it is built around.
    """

    name: str
    build: Callable[[Kernel], Kernel]
    simulated: bool = False


def simulated(inputs: DecodeInputs, output: DecodeOutput, steps: Steps | None = None, **form: object) -> None:
    """The right kernel, in torch."""
    block = max(BLOCK, inputs.problem.max_kv // TILES)  # a tile is a few launches, whatever its size
    write(output, honest(inputs, **{"splits": SPLITS, "block": block, "steps": steps or Steps(), **form}))


def around(impl: DecodeImpl) -> Kernel:
    """A real implementation as a right kernel, with a plan for whatever comes."""
    plans: dict[DecodeProblem, DecodePlan] = {}

    def kernel(inputs: DecodeInputs, output: DecodeOutput) -> None:
        if inputs.problem not in plans:
            plans[inputs.problem] = impl.plan(inputs.problem, inputs.device)
        write(output, plans[inputs.problem].run(inputs, output))

    return kernel


def write(output: DecodeOutput, answer: DecodeOutput) -> None:
    """Write an answer into the output."""
    output.out.copy_(answer.out)
    output.lse.copy_(answer.lse)


IMPOSTORS: list[Impostor] = []


# --- wrong on the way out -------------------------------------------------------------------------------


def after(name: str):
    """An impostor that spoils a right output, ``(inputs, output)``, in place."""

    def register(spoil: Callable[[DecodeInputs, DecodeOutput], None]):
        def build(right: Kernel) -> Kernel:
            def kernel(inputs: DecodeInputs, output: DecodeOutput) -> None:
                right(inputs, output)
                spoil(inputs, output)

            return kernel

        IMPOSTORS.append(Impostor(name, build))
        return spoil

    return register


@after("zeros")
def _(inputs, output):
    output.out.zero_()


@after("LSE in base 2")
def _(inputs, output):
    output.lse.div_(math.log(2))


@after("LSE in float16")
def _(inputs, output):
    output.lse.copy_(output.lse.half())


@after("LSE of unscaled scores")
def _(inputs, output):
    output.lse.div_(inputs.problem.softmax_scale)


@after("LSE +inf for an empty sequence")
def _(inputs, output):
    output.lse.abs_().copy_(torch.where(output.lse == torch.inf, torch.inf, output.lse))


@after("an output of 1 for an empty sequence")
def _(inputs, output):
    output.out[[b for b, n in enumerate(inputs.problem.kv_lens) if n == 0]] = 1


@after("output in float8")
def _(inputs, output):
    output.out.copy_(output.out.to(torch.float8_e4m3fn))


@after("outputs of the batch in reverse order")
def _(inputs, output):
    write(output, DecodeOutput(output.out.flip(0), output.lse.flip(0)))


@after("right only for the first sequence")
def _(inputs, output):
    output.out[1:] = output.out[:1]


@after("right only for power-of-two lengths")
def _(inputs, output):
    output.out[[b for b, n in enumerate(inputs.problem.kv_lens) if n & (n - 1)]] *= 0.9


@after("heads of a group in reverse order")
def _(inputs, output):
    groups = output.out.unflatten(1, (inputs.problem.heads_kv, inputs.problem.group))
    output.out.copy_(groups.flip(2).flatten(1, 2))


@after("head dim rotated by one")
def _(inputs, output):
    output.out.copy_(output.out.roll(1, -1))


@after("writes past the end of its output")
def _(inputs, output):
    out = output.out
    end = out.storage_offset() + out.numel()
    if (end + 8) * out.element_size() <= out.untyped_storage().nbytes():
        torch.as_strided(out, (8,), (1,), end).zero_()


# --- wrong on the way in --------------------------------------------------------------------------------


def before(name: str):
    """An impostor that gives a right kernel other inputs."""

    def register(change: Callable[[DecodeInputs], DecodeInputs]):
        def build(right: Kernel) -> Kernel:
            return lambda inputs, output: right(change(inputs), output)

        IMPOSTORS.append(Impostor(name, build))
        return change

    return register


def pick(inputs: DecodeInputs, rows: Callable[[int, int], Sequence[Tensor]]) -> DecodeInputs:
    """The inputs with other keys: ``rows(first, keys)`` are each sequence's rows of packed K and V, in pieces."""
    problem = inputs.problem
    of_all = [
        torch.cat(tuple(rows(first, keys)))
        for first, keys in zip(problem.cu_seqlens, problem.kv_lens, strict=False)
    ]
    fewer = replace(problem, kv_lens=tuple(map(len, of_all)))
    index = torch.cat(of_all).to(inputs.device)
    cu_seqlens = torch.tensor(fewer.cu_seqlens, dtype=torch.int32, device=inputs.device)
    return DecodeInputs(fewer, inputs.q, inputs.k[index], inputs.v[index], cu_seqlens)


def span(start: int, stop: int) -> Tensor:
    """Rows from ``start`` to before ``stop``; none where that is not after it."""
    return torch.arange(start, max(start, stop))


def with_scale(inputs: DecodeInputs, scale: float) -> DecodeInputs:
    """The inputs with another softmax scale."""
    return replace(inputs, problem=replace(inputs.problem, scale=scale))


def with_heads(inputs: DecodeInputs, kv_head: Callable[[int], int]) -> DecodeInputs:
    """The inputs where query head ``h`` uses KV head ``kv_head(h)``."""
    problem = inputs.problem
    index = torch.tensor([kv_head(h) for h in range(problem.heads_q)], device=inputs.device)
    k, v = inputs.k[:, index], inputs.v[:, index]
    return replace(inputs, problem=replace(problem, heads_kv=problem.heads_q), k=k, v=v)


@before("mean of V")
def _(inputs):
    return replace(inputs, q=torch.zeros_like(inputs.q))


@before("V of the last key")
def _(inputs):
    return pick(inputs, lambda first, n: [span(first + n - 1, first + n)[:n]])


@before("last key dropped")
def _(inputs):
    return pick(inputs, lambda first, n: [span(first, first + n - 1)])


@before("first key dropped")
def _(inputs):
    return pick(inputs, lambda first, n: [span(first + 1, first + n)])


@before("one key in the middle dropped")
def _(inputs):
    return pick(inputs, lambda first, n: [span(first, first + n // 3), span(first + n // 3 + 1, first + n)])


@before("last key counted twice")
def _(inputs):
    return pick(inputs, lambda first, n: [span(first, first + n), span(first + n - 1, first + n)[:n]])


@before("neighbour sequence's key read")
def _(inputs):
    total = inputs.problem.total_kv
    return pick(inputs, lambda first, n: [span(first, min(first + n + (n > 0), total))])


@before("16 keys of another sequence read")
def _(inputs):
    total = inputs.problem.total_kv
    return pick(inputs, lambda first, n: [span(first, first + n - 16), span(first + n, min(first + n + 16, total))])


@before("every eighth key dropped")
def _(inputs):
    return pick(inputs, lambda first, n: [first + torch.arange(n)[torch.arange(n) % 8 != 7]])


@before("last tile dropped unless it is full")
def _(inputs):
    return pick(inputs, lambda first, n: [span(first, first + n // 64 * 64)])


@before("only the last 1024 keys")
def _(inputs):
    return pick(inputs, lambda first, n: [span(first + max(0, n - 1024), first + n)])


@before("row index of 16 bits")
def _(inputs):
    return pick(inputs, lambda first, n: [span(first, first + n) % 2**16])


@before("padding of the last tile counted")
def _(inputs):
    last = inputs.problem.total_kv
    k, v = (torch.cat([t, torch.zeros_like(t[:1])]) for t in (inputs.k, inputs.v))
    longer = replace(inputs.problem, kv_lens=(*inputs.problem.kv_lens[:-1], inputs.problem.kv_lens[-1] + 1))
    cu_seqlens = torch.tensor(longer.cu_seqlens, dtype=torch.int32, device=inputs.device)
    padded = DecodeInputs(longer, inputs.q, k, v, cu_seqlens)

    def rows(first: int, n: int) -> list[Tensor]:
        n -= first + n == last + 1  # the row of zeros is nobody's key
        return [span(first, first + n), torch.full((-n % 64,), last)]

    return pick(padded, rows)


@before("V of 16 keys swapped")
def _(inputs):
    def rows(first: int, n: int) -> list[Tensor]:
        return [span(first, first + min(n, 16)).flip(0), span(first + min(n, 16), first + n)]

    return replace(inputs, v=pick(inputs, rows).v)


@before("K and V swapped")
def _(inputs):
    return replace(inputs, k=inputs.v, v=inputs.k)


@before("K in float8")
def _(inputs):
    return replace(inputs, k=inputs.k.to(torch.float8_e4m3fn).to(inputs.k.dtype))


@before("V in float8")
def _(inputs):
    return replace(inputs, v=inputs.v.to(torch.float8_e4m3fn).to(inputs.v.dtype))


@before("query of another sequence")
def _(inputs):
    return replace(inputs, q=inputs.q.roll(1, 0))


@before("head dim cut to a multiple of 64")
def _(inputs):
    q = inputs.q.clone()
    q[..., inputs.problem.head_dim // 64 * 64 :] = 0
    return replace(inputs, q=q)


@before("head map tiled instead of interleaved")
def _(inputs):
    return with_heads(inputs, lambda h: h % inputs.problem.heads_kv)


@before("head tile crossing a KV-head border")
def _(inputs):
    return with_heads(inputs, lambda h: h // 4 * 4 // inputs.problem.group)


@before("scale missing")
def _(inputs):
    return with_scale(inputs, 1.0)


@before("scale of the padded head dim")
def _(inputs):
    return with_scale(inputs, (1 << (inputs.problem.head_dim - 1).bit_length()) ** -0.5)


@before("scale applied twice")
def _(inputs):
    return with_scale(inputs, inputs.problem.softmax_scale**2)


@before("scale off by 5 %")
def _(inputs):
    return with_scale(inputs, 1.05 * inputs.problem.softmax_scale)


def viewed(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor read by other strides, from where it starts; as it is where that would leave its memory."""
    end = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, stride, strict=True)) + 1
    inside_memory = t.numel() and end * t.element_size() <= t.untyped_storage().nbytes()
    return t.as_strided(t.shape, stride, t.storage_offset()) if inside_memory else t


def packed(t: Tensor) -> tuple[int, int, int]:
    """The strides of a contiguous tensor of three dimensions."""
    return t.shape[1] * t.shape[2], t.shape[2], 1


@before("K taken to be contiguous")
def _(inputs):
    return replace(inputs, k=viewed(inputs.k, packed(inputs.k)))


@before("V read with the strides of K")
def _(inputs):
    return replace(inputs, v=viewed(inputs.v, inputs.k.stride()))


@before("Q taken to be contiguous")
def _(inputs):
    return replace(inputs, q=viewed(inputs.q, packed(inputs.q)))


# --- wrong in one step ----------------------------------------------------------------------------------


def inside(name: str, **steps: object) -> None:
    """An impostor that is a simulated kernel with other steps."""
    IMPOSTORS.append(Impostor(name, lambda right: partial(simulated, steps=Steps(**steps)), simulated=True))


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Rounding to a dtype on the way."""
    return lambda x: x.to(dtype).float()


def _without_a_key_at_the_edges(keys: int, splits: int) -> list[tuple[int, int]]:
    return [(start + (start > 0), stop) for start, stop in cut(keys, splits)]


def _with_a_key_twice_at_the_edges(keys: int, splits: int) -> list[tuple[int, int]]:
    return [(start - (start > 0), stop) for start, stop in cut(keys, splits)]


def _in_equal_parts(keys: int, splits: int) -> list[tuple[int, int]]:
    each = keys // splits
    return [(s * each, (s + 1) * each) for s in range(splits)]


def _in_whole_tiles(keys: int, splits: int) -> list[tuple[int, int]]:
    return [(start // 64 * 64, stop) for start, stop in cut(keys, splits)]


def _weighted(weight: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A combine step that is right but for the weights of its output."""

    def merge(outs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        w = weight(lse)[..., None]
        return ((w * outs).sum(0) / w.sum(0)).nan_to_num(nan=0.0), combine(outs, lse)[1]

    return merge


def _ignoring_the_maximum(outs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    weight = lse.exp()
    total = weight.sum(0)
    out = (weight[..., None] * outs).sum(0) / total[..., None]
    return torch.where(lse.amax(0)[..., None] == -torch.inf, 0.0, out), total.log()


def _without_the_last(outs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return combine(outs[:-1], lse[:-1]) if len(outs) > 1 else combine(outs, lse)


MASK = -1e6 * math.sqrt(80) / math.log2(math.e)
"""A product of Q and K whose scaled score is -10^6 in base-2 units, at a head dim of 80."""


def _with_empty_splits(outs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return combine(outs, torch.where(lse == MASK, -torch.inf, lse))  # its maximum is that of no key


inside("one key dropped at each split edge", cut=_without_a_key_at_the_edges)
inside("one key counted twice at each split edge", cut=_with_a_key_twice_at_the_edges)
inside("floor of the split length", cut=_in_equal_parts)
inside("split starts rounded down to tiles", cut=_in_whole_tiles)
inside("one split dropped", combine=_without_the_last)
inside("combine with equal weights", combine=_weighted(torch.ones_like))
inside("combine with weights exp2 of natural LSE", combine=_weighted(lambda lse: torch.exp2(lse - lse.amax(0))))
inside("combine ignoring the maximum", combine=_ignoring_the_maximum)
inside("combine that adds up partials", combine=lambda outs, lse: (outs.sum(0), combine(outs, lse)[1]))
inside("LSE of the first split alone", combine=lambda outs, lse: (combine(outs, lse)[0], lse[0]))
inside("partials in bfloat16", partials=through(torch.bfloat16))
inside("partials in float16", partials=through(torch.float16))
inside("scores in bfloat16", scores=through(torch.bfloat16))
inside("P in float8", weights=through(torch.float8_e4m3fn))
inside("finite mask sentinel", lowest=-3e4)
inside("mask value of -10^6 on scaled base-2 scores", lowest=MASK, combine=_with_empty_splits)
inside("weights under 2^-10 of the running maximum dropped", weights=lambda p: torch.where(p < 2**-10, 0.0, p))
inside("accumulator not rescaled", rescale_acc=torch.ones_like)
inside("denominator not rescaled", rescale_sum=torch.ones_like)


# --- wrong because of what was before -------------------------------------------------------------------


def state(name: str):
    """An impostor that holds something from call to call, or touches what it should only read."""

    def register(build: Callable[[Kernel], Kernel]):
        IMPOSTORS.append(Impostor(name, build))
        return build

    return register


def _copied(output: DecodeOutput) -> DecodeOutput:
    return DecodeOutput(output.out.clone(), output.lse.clone())


@state("stale output: the answer of the call before")
def _(right):
    held: list[DecodeOutput] = []

    def kernel(inputs, output):
        right(inputs, output)
        held.append(_copied(output))
        write(output, held.pop(0) if len(held) > 1 else held[0])

    return kernel


@state("first answer cached")
def _(right):
    held: list[DecodeOutput] = []

    def kernel(inputs, output):
        if not held:
            right(inputs, output)
            held.append(_copied(output))
        write(output, held[0])

    return kernel


@state("answer cached by the address of Q")
def _(right):
    held: dict[int, DecodeOutput] = {}

    def kernel(inputs, output):
        if inputs.q.data_ptr() not in held:
            right(inputs, output)
            held[inputs.q.data_ptr()] = _copied(output)
        write(output, held[inputs.q.data_ptr()])

    return kernel


@state("every second call skipped")
def _(right):
    calls: list[None] = []

    def kernel(inputs, output):
        if len(calls) % 2 == 0:
            right(inputs, output)
        calls.append(None)

    return kernel


@state("works only once")
def _(right):
    calls: list[None] = []

    def kernel(inputs, output):
        if not calls:
            right(inputs, output)
        calls.append(None)

    return kernel


@state("adds to its output instead of writing it")
def _(right):
    def kernel(inputs, output):
        mine = _copied(output)
        right(inputs, mine)
        output.out.add_(mine.out)
        output.lse.copy_(mine.lse)

    return kernel


@state("one output row unwritten")
def _(right):
    def kernel(inputs, output):
        mine = _copied(output)
        right(inputs, mine)
        output.out[:, 1:] = mine.out[:, 1:]
        output.out[1:] = mine.out[1:]
        output.lse.copy_(mine.lse)

    return kernel


@state("one LSE unwritten")
def _(right):
    def kernel(inputs, output):
        kept = output.lse[-1, -1].clone()
        right(inputs, output)
        output.lse[-1, -1] = kept

    return kernel


@state("inputs modified: Q scaled in place")
def _(right):
    def kernel(inputs, output):
        right(inputs, output)
        inputs.q.mul_(2)

    return kernel


@state("inputs modified: the last V cleared")
def _(right):
    def kernel(inputs, output):
        right(inputs, output)
        inputs.v[-1:] = 0

    return kernel


@state("guard row read, with weight 0")
def _(right):
    def kernel(inputs, output):
        right(inputs, output)
        v = inputs.v
        after_last = v.storage_offset() + len(v) * v.stride(0)
        if after_last + v.shape[-1] <= v.untyped_storage().nbytes() // v.element_size():
            output.out[-1] += 0 * torch.as_strided(v, (v.shape[-1],), (1,), after_last)

    return kernel


@state("row before the first read, with weight 0")
def _(right):
    def kernel(inputs, output):
        right(inputs, output)
        k = inputs.k
        if k.storage_offset() >= k.stride(0):
            output.out[0] += 0 * torch.as_strided(k, (k.shape[-1],), (1,), k.storage_offset() - k.stride(0))

    return kernel


def rows_after(t: Tensor, rows: int) -> Tensor:
    """Rows after the last of packed K or V, as many as lie in its memory."""
    end = t.storage_offset() + len(t) * t.stride(0)
    needed = (t.shape[1] - 1) * t.stride(1) + t.shape[2]  # of the last of them
    there = (t.untyped_storage().nbytes() // t.element_size() - end - needed) // max(1, t.stride(0)) + 1
    return t.as_strided((max(0, min(rows, there)), *t.shape[1:]), t.stride(), end)


@state("guard row added, unless it is NaN")
def _(right):
    def kernel(inputs, output):
        right(inputs, output)
        for row in rows_after(inputs.v, 1):
            output.out[-1] += row.nan_to_num(0.0).repeat_interleave(inputs.problem.group, 0) / 1024

    return kernel


@state("maximum over 16 guard rows too, by fmax")
def _(right):
    def kernel(inputs, output):
        right(inputs, output)
        problem = inputs.problem
        q = inputs.q[-1].float().unflatten(0, (problem.heads_kv, problem.group))
        k = rows_after(inputs.k, 16).float().permute(1, 2, 0)
        scores = (problem.softmax_scale * q @ k).flatten(0, 1).nan_to_num(-torch.inf)  # [Hq, 16]
        for score in scores.unbind(-1):
            vanishes = score - output.lse[-1] > 100  # every weight, and so their sum
            output.out[-1, vanishes] = 0
            output.lse[-1, vanishes] = -torch.inf

    return kernel


@state("next sequence's first V read, with weight 0")
def _(right):
    def kernel(inputs, output):
        right(inputs, output)
        for b, stop in enumerate(inputs.problem.cu_seqlens[1:-1]):
            if stop < inputs.problem.total_kv:
                output.out[b] += 0 * inputs.v[stop, 0]

    return kernel


@state("a race that corrupts one element in 100,000")
def _(right):
    generator: list[torch.Generator] = []

    def kernel(inputs, output):
        right(inputs, output)
        if not generator:
            generator.append(torch.Generator(inputs.device).manual_seed(0))
        hit = torch.rand(output.out.shape, generator=generator[0], device=inputs.device) < RACE
        size = output.out.float().square().mean(-1, keepdim=True).sqrt().to(output.out.dtype)  # of an element
        output.out.copy_(torch.where(hit, output.out + size, output.out))

    return kernel


RACES = tuple(impostor.name for impostor in IMPOSTORS if impostor.name.startswith("a race"))


# --- trying them ----------------------------------------------------------------------------------------


class ImpostorPlan:
    """An impostor as a plan."""

    def __init__(self, problem: DecodeProblem, device: torch.device, kernel: Kernel) -> None:
        self.config: dict[str, str] = {}
        self._problem = problem
        self._device = device
        self._kernel = kernel

    def new_output(self) -> DecodeOutput:
        return empty_output(self._problem, self._device)

    def workspaces(self) -> tuple[Tensor, ...]:
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        out = out or self.new_output()
        self._kernel(inputs, out)
        return out


@dataclass
class Verdict:
    """What became of an impostor at one length.

    Args:
        impostor: which.
        excess: its largest float64 error, as a multiple of the honest kernels' in the same probe: infinite
            where it is not finite, or breaks another promise than that of right values.
        visible: the probe where that was.
        caught: the probes that caught it, in order.
        reason: what the first of them said.
        worst: the result with the largest share of a budget.
    """

    impostor: str
    excess: float = 0.0
    visible: str | None = None
    caught: tuple[str, ...] = ()
    reason: str | None = None
    worst: CheckResult | None = None

    @property
    def counts(self) -> bool:
        """Whether its error is visible."""
        return self.excess > VISIBLE

    def add(self, name: str, result: CheckResult, floor: CheckResult) -> None:
        """Take the result of one probe, and that of honest kernels."""
        if (more := excess(result, floor)) > self.excess:
            self.excess, self.visible = more, name
        if not result.ok and name not in self.caught:
            self.reason = self.reason or result.reason
            self.caught = (*self.caught, name)
        if self.worst is None or (result.worst_row or math.inf) > (self.worst.worst_row or math.inf):
            self.worst = result


def excess(result: CheckResult, floor: CheckResult) -> float:
    """How many times the honest kernels' error a result's is, in its rows or in its LSE, whichever is more."""
    if not result.finite:
        return math.inf
    shares = (result.worst_row, result.worst_element, result.worst_lse)
    if not result.ok and all(share is not None and share <= 1 for share in shares):
        return math.inf  # right values, but another promise broken
    return max(
        0.0 if error == 0 else math.inf if error is None or not honest_error else error / honest_error
        for error, honest_error in ((result.rel_row, floor.rel_row), (result.lse_err, floor.lse_err))
    )


def problem_of(length: int, dtype: str = "bfloat16") -> DecodeProblem:
    """The problem on which impostors of a length are tried: ragged, one empty, a head dim that is padded."""
    return DecodeProblem(kv_lens=(length, 0, length + 5, length), heads_q=6, heads_kv=2, head_dim=80, dtype=dtype)


def honest_plans(problem: DecodeProblem, device: torch.device) -> list[DecodePlan]:
    """Honest kernels of several forms, whose errors are what cannot be avoided."""
    forms = ({"splits": 1}, {}, {"splits": 7, "block": 256}, {"reverse": True})
    return [ImpostorPlan(problem, device, partial(simulated, **form)) for form in forms]


def honest_floor(plans: Sequence[DecodePlan], probe: Probe) -> CheckResult:
    """The largest of each error of honest kernels in one probe.

    Raises:
        AssertionError: if the check calls one of them wrong.
    """
    results = [probe.apply(plan).result for plan in plans]
    for result in results:
        assert result.ok, f"{probe.title}: an honest kernel fails: {result.reason}"
    largest = {
        key: max(getattr(result, key) for result in results)
        for key in ("rel_l2", "worst_row", "lse_err", "worst_element", "worst_lse", "rel_row")
    }
    return replace(results[0], **largest)


def judge_all(
    length: int,
    device: torch.device,
    *,
    right: Kernel = simulated,
    impostors: Sequence[Impostor] = tuple(IMPOSTORS),
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Iterator[Verdict]:
    """Put every impostor through the check at one length.

    Args:
        length: of the sequences.
        device: where to compute.
        right: the kernel that the impostors are built around.
        impostors: which.
        dtype: of the problem.
        seed: of the inputs.
    """
    problem = problem_of(length, dtype)
    plans = {i.name: ImpostorPlan(problem, device, i.build(right)) for i in impostors}
    verdicts = {name: Verdict(name) for name in plans}
    honest_ones = honest_plans(problem, device)
    for probe in probes(problem, seed, device, repeat_outputs=1):
        if probe.name == "graph":
            continue  # a simulated kernel is no sequence of launches
        floor = honest_floor(honest_ones, probe)
        for name, plan in plans.items():
            if name not in RACES:
                verdicts[name].add(probe.title, probe.apply(plan).result, floor)
    for name in RACES:
        if name in plans:
            # Nothing else takes so many runs.
            *_, probe = probes(problem, seed, device, families=("normal",), repeat_outputs=RACE_OUTPUTS)
            assert probe.title == title("normal", "repeat")
            remembered = Remembering(right)
            honest_one = ImpostorPlan(problem, device, remembered)
            plan = ImpostorPlan(problem, device, next(i for i in impostors if i.name == name).build(remembered))
            verdicts[name].add(probe.title, probe.apply(plan).result, honest_floor([honest_one], probe))
    yield from verdicts.values()


class Remembering:
    """A right kernel that computes the same inputs once, to run a million outputs quickly."""

    def __init__(self, right: Kernel) -> None:
        self._right = right
        self._known: dict[int, DecodeOutput] = {}

    def __call__(self, inputs: DecodeInputs, output: DecodeOutput) -> None:
        if id(inputs) not in self._known:
            self._right(inputs, output)
            self._known[id(inputs)] = _copied(output)
        write(output, self._known[id(inputs)])
