"""The check: is this output what a right kernel may return on these inputs?

Every (sequence, head) row has a budget of its own, computed from the float64 reference and from the
roundings that no kernel of this kind can avoid. There is no constant tolerance anywhere.

Where the budget comes from
---------------------------
With ``u`` the unit roundoff of the problem's dtype and ``u32 = 2^-24``, an honest kernel errs by

- **output rounding**: element ``o_d`` is rounded once, by at most half a spacing ``h_d``: ``u`` times the
  power of two below ``|o_d|``;
- **rounding of P** before the second matrix product (float16, bfloat16): each weight by about ``0.42 u`` of
  itself, independently: standard deviation ``p_rms_d = 0.42 u sqrt(sum_j p_j^2 v_jd^2)``. The largest
  weight is 1 and exact. A kernel that rounds *normalised* weights instead has an error that is known, and of
  the same size on random data; where weights are equal it may be larger, and then the difference is added;
- **scores in float32**: standard deviation ``s_rms_d``, from the error of each score;
- **accumulation in float32** over ``n`` keys: a random walk ``w_d = u32 (0.42 sqrt(n) + |lse| + |top| + 1)``
  times the largest running sum (``swing_d``): one rounding a key, and partials are weighted by
  exponentials of float32 LSEs, which are only good to that many ``u32``;
- **bias** ``c_d``: tensor cores (float16, bfloat16) align each product to the accumulator and cut it off two
  bits below float32's last one, so each key loses about ``u32 / 4`` of ``swing_d``, all of one sign where the
  products are; keys with equal scores err alike. Kernels for float16 and bfloat16 may also use an exponential
  that is good to ``2^-14`` alone (PyTorch's on a CPU is off by 5.2e-5 at 0): weights lose that in their
  rounding, the normaliser does not.

Where all weights are 1 and V holds integers, sums are exact in float32: there the two terms that grow with
``n`` are 0, and only the weights of the splits, ``|lse| + |top| + 1`` roundings, are left of them.

All sizes are measured on the data, in the reference's own pass (:class:`impls.reference.Reference`). With
``sigma_d^2 = p_rms_d^2 + s_rms_d^2 + w_d^2`` the budget is

- for a row, in the L2 norm over ``d``: ``|h| + |c| + 4 |sigma|``. Four standard deviations, not the one
  and a bit that would do for many independent elements, because with few effective keys or with
  structured V a whole row is a single draw;
- for one element: ``h_d + c_d + 8 sigma_d``, as the largest of 10^9 normal values lies at 6. It is there for
  single corrupted elements, and to be exact where only the output's rounding is left.

The rounding of P shrinks with the number of effective keys just as the output does, so a row's budget stays
about ``2.4 u`` of its norm at every length: on 64k random keys in bfloat16, where a typical output element
is 0.005, it may be off by some 5e-5.

The normaliser is taken to be summed in float32 from *unrounded* weights; its logarithm is part of the LSE,
which has its own, much smaller budget: ``4 u32 (|lse| + |top| + 0.42 sqrt(n / 32) + 4) + 4 s_lse``: roundings
of the LSE and of the maximum in natural and base-2 units, the sum tile by tile, and the scores. A kernel may
also keep a sum a thread from the first key to the last: what a key adds to the sum that holds the largest
weight is rounded to that sum's last place, and keys lighter than that are lost or rounded up to it, all one way
where they are alike. At least four threads share a row in every layout of a matrix product, so a quarter of
``swallowed`` is added to the budget of the LSE, and that share of itself to an output's.

The multiples 4 and 8 and that ``2^-14`` are the only constants chosen by hand: on random float16 and bfloat16
data an error of four times the honest one is over budget, and simulated honest kernels
(``tests/harness/honest.py``) keep well under it at every length. An element that is only rounded may come close
to its ``h_d``, never over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs, DecodeOutput, DecodePlan
from impls.problem import DecodeProblem
from impls.reference import FP32_UNIT, ROUNDING_RMS, Reference, half_subnormal, unit_roundoff

ROW_SIGMAS = 4.0
"""Standard deviations in a row's budget."""

ELEMENT_SIGMAS = 8.0
"""Standard deviations in an element's budget."""

COARSE_EXP = 2.0**-14
"""Relative error of an exponential that is still good enough for weights of 16 bits."""

CUT_KEYS = 4
"""Keys whose products lose a float32 roundoff of the accumulator together: each is cut two bits below it."""

ROW_THREADS = 4
"""Threads that share a row of a matrix product, at least, and so the sum of its weights."""

GUARD_BYTES = 4096
"""Canary band on either side of a checked output; a multiple of every alignment that kernels ask for."""

POISON_BLOCKS = 8
"""Blocks of one size that are filled before a run whose output the library allocates."""

CANARY = 0x5A
"""Byte of the canary bands: as a number it is ordinary in every dtype, so nothing resets it by accident."""


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one output.

    The three shares are errors divided by their budgets: at most 1 where the output is right. A number is
    None where it is not finite or could not be computed.

    Args:
        ok: whether it is right.
        reason: what is wrong, naming the worst place; None where it is right.
        rel_l2: relative L2 error of the whole output.
        worst_row: largest share of a row, in the L2 norm.
        lse_err: largest absolute error of the LSE; None without LSE.
        finite: no NaN or infinity where the reference has none.
        worst_element: largest share of an element.
        worst_lse: largest share of an LSE.
        rel_row: largest relative L2 error of a row: the plain error, whatever the budget.
    """

    ok: bool
    reason: str | None
    rel_l2: float | None
    worst_row: float | None
    lse_err: float | None
    finite: bool
    worst_element: float | None = None
    worst_lse: float | None = None
    rel_row: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record's ``check`` object: the measured values, without the verdict."""
        values = asdict(self)
        return {key: value for key, value in values.items() if key not in ("ok", "reason")}


@dataclass(frozen=True)
class Budget:
    """What an honest kernel may be off by; float64.

    Args:
        row: ``[B, Hq]``: of a row of the output, in the L2 norm over ``head_dim``.
        element: ``[B, Hq, D]``: of one element of the output.
        lse: ``[B, Hq]``: of the LSE.
    """

    row: Tensor
    element: Tensor
    lse: Tensor


def budget(ref: Reference, problem: DecodeProblem) -> Budget:
    """The budgets of all rows of a problem, as derived in the module docstring."""
    dtype = TORCH_DTYPES[problem.dtype]
    keys = torch.tensor(problem.kv_lens, dtype=torch.float64, device=ref.out.device)[:, None]  # [B, 1]
    # Empty rows have lse = top = -inf and swing 0; their budget is 0, since 0 is exact.
    offsets = torch.where(keys > 0, ref.lse.abs() + ref.top.abs(), 0.0)  # [B, Hq]

    half_spacing = torch.where(keys[..., None] > 0, _half_spacing(ref.out, dtype), 0.0)
    steps = torch.where(ref.exact, 0.0, ROUNDING_RMS * keys.sqrt()[..., None]) + (offsets + 1)[..., None]
    walk = FP32_UNIT * steps * ref.swing
    sigma = (ref.p_rms.square() + ref.s_rms.square() + walk.square()).sqrt()
    alike = ref.tied * keys if dtype == torch.float32 else keys / CUT_KEYS  # steps that all err one way
    bias = ref.bias + (ref.normalised - ROW_SIGMAS * ref.p_rms).clamp(min=0)
    bias = bias + torch.where(ref.exact, 0.0, FP32_UNIT * alike[..., None] * ref.swing)
    swallowed = ref.swallowed / ROW_THREADS  # of the sum that everything is divided by
    bias = bias + (swallowed[..., None] + (0.0 if dtype == torch.float32 else COARSE_EXP)) * ref.out.abs()
    return Budget(
        row=half_spacing.norm(dim=-1) + bias.norm(dim=-1) + ROW_SIGMAS * sigma.norm(dim=-1),
        element=half_spacing + bias + ELEMENT_SIGMAS * sigma,
        lse=4 * FP32_UNIT * (offsets + ROUNDING_RMS * (keys / 32).sqrt() + ref.tied * keys / 32 + 4)
        + 4 * ref.s_lse
        + swallowed,
    )


def _half_spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding a value near ``value`` (float64) to ``dtype``."""
    exponent = torch.frexp(value).exponent - 1
    spacing = torch.ldexp(torch.full_like(value, unit_roundoff(dtype)), exponent)
    return torch.where(value == 0, 0.0, spacing).clamp(min=half_subnormal(dtype))


def compare(output: DecodeOutput, ref: Reference, problem: DecodeProblem) -> CheckResult:
    """Judge an output against the reference.

    Rows where the reference itself is not finite (their sequence holds NaN or infinities) are not judged.

    Args:
        output: what an implementation returned; ``lse`` may be None.
        ref: the oracle's values for the same inputs.
        problem: what was to be computed.

    Returns:
        The verdict. Nothing is raised for a wrong output, whatever its shape.
    """
    if reason := _mismatch(output, ref, problem):
        return CheckResult(ok=False, reason=reason, rel_l2=None, worst_row=None, lse_err=None, finite=False)
    allowed = budget(ref, problem)
    judged = ref.out.isfinite().all(-1)  # [B, Hq]
    reasons: list[str] = []

    out = output.out.double()
    error = torch.where(judged[..., None], (out - ref.out).abs(), 0.0)
    row_share = _share(error.norm(dim=-1), allowed.row)
    element_share = _share(error, allowed.element)
    unwritten = judged & ~out.isfinite().all(-1)
    finite = not bool(unwritten.any())
    if not finite:
        reasons.append(f"{_row(_argmax(unwritten))}: expected finite values, got {_first_bad(out, unwritten)}")
    elif _largest(worst := torch.maximum(row_share, element_share.amax(-1))) > 1:
        at = _argmax(worst)
        d = int(element_share[at].argmax())
        reasons.append(
            f"{_row(at)}: error {row_share[at]:.3g}x its budget (L2), element {d} {element_share[at][d]:.3g}x: "
            f"expected {ref.out[at][d]:.6g}, got {out[at][d]:.6g}; {_count(worst, 'rows')}"
        )

    lse_err = worst_lse = None
    if output.lse is not None:
        lse = output.lse.double()
        filled = judged & (ref.lse > -torch.inf)
        gap = torch.where(filled, (lse - ref.lse).abs(), 0.0)
        share = _share(gap, allowed.lse)
        lse_err, worst_lse = _largest(gap), _largest(share)
        if (wrong := judged & ~filled & (lse != -torch.inf)).any():
            reasons.append(f"{_lse(_argmax(wrong))}: expected -inf (no keys), got {_value(lse, wrong)}")
        if (wrong := filled & ~lse.isfinite()).any():
            finite = False
            reasons.append(f"{_lse(_argmax(wrong))}: expected a finite value, got {_value(lse, wrong)}")
        elif worst_lse > 1:
            at = _argmax(share)
            reasons.append(
                f"{_lse(at)}: expected {ref.lse[at]:.8g}, got {lse[at]:.8g}, "
                f"error {share[at]:.3g}x its budget, {_count(share, 'values')}"
            )

    norms = torch.where(judged[..., None], ref.out, 0.0).norm(dim=-1)
    norm, off = norms.norm().item(), error.norm().item()
    return CheckResult(
        ok=not reasons,
        reason="; ".join(reasons) or None,
        rel_l2=_finite(off / norm if norm else (0.0 if off == 0 else math.inf)),
        worst_row=_finite(_largest(row_share)),
        lse_err=_finite(lse_err),
        finite=finite,
        worst_element=_finite(_largest(element_share)),
        worst_lse=_finite(worst_lse),
        rel_row=_finite(_largest(_share(error.norm(dim=-1), norms))),
    )


def check_plan(plan: DecodePlan, inputs: DecodeInputs, ref: Reference) -> CheckResult:
    """Run a plan where nothing old can pass for a result, and judge what it returns.

    Outputs and LSE are NaN-filled between canary bands, float workspaces are NaN-filled (integer ones hold tables
    and counters and are left alone), and the inputs must come out bit for bit as they went in. Where the library
    allocates its own output, the memory that it gets for it is NaN-filled instead.

    Args:
        plan: made for ``inputs.problem`` on the inputs' device.
        inputs: what to run it on.
        ref: the oracle's values for these inputs.

    Returns:
        The verdict. Exceptions of the plan are the caller's to handle.
    """
    return run_checked(plan, inputs, ref)[0]


def run_checked(plan: DecodePlan, inputs: DecodeInputs, ref: Reference) -> tuple[CheckResult, DecodeOutput]:
    """Like :func:`check_plan`, with the output that was judged."""
    before = [t.clone() for t in _tensors(inputs)]
    poison_workspaces(plan)
    template = plan.new_output()
    guarded = [_Guarded(t) for t in _tensors(template)] if template is not None else []
    if template is None:
        given = None
        with _poisoned_allocations(inputs.problem, inputs.device):
            output = plan.run(inputs, None)
    else:
        given = DecodeOutput(guarded[0].tensor, guarded[1].tensor if len(guarded) > 1 else None)
        output = plan.run(inputs, given)
    result = compare(output, ref, inputs.problem)

    reasons = [result.reason] if result.reason else []
    if given is not None and any(
        not _same_place(a, b) for a, b in zip(_tensors(output), _tensors(given), strict=False)
    ):
        reasons.append("run: expected the output tensors it was given, got others")
    if given is not None and given.lse is not None and output.lse is None:
        reasons.append("run: expected the LSE that it was given a tensor for, got none")
    reasons += [
        f"{name}: written outside the tensor, {damage}"
        for name, block in zip(("out", "lse"), guarded, strict=False)
        if (damage := block.damage())
    ]
    reasons += [
        f"{name}: expected unchanged inputs, got {int((_bits(old) != _bits(new)).sum())} changed elements"
        for name, old, new in zip(("q", "k", "v", "cu_seqlens_k"), before, _tensors(inputs), strict=True)
        if not torch.equal(_bits(old), _bits(new))
    ]
    return replace(result, ok=not reasons, reason="; ".join(reasons) or None), output


def disagreement(
    a: DecodeOutput, b: DecodeOutput, ref: Reference, problem: DecodeProblem
) -> dict[str, float | None]:
    """How far two outputs are from each other, in the terms of their errors.

    Args:
        a: an output.
        b: another, of the same problem and inputs.
        ref: the oracle's values for these inputs.
        problem: what was computed.

    Returns:
        ``rel_l2``: the L2 norm of the difference, relative to that of the reference; ``worst_row``: the
        largest L2 difference of a row, relative to one output's budget.
    """
    apart = (a.out.double() - b.out.double()).norm(dim=-1)  # [B, Hq]
    off, norm = apart.norm().item(), ref.out.norm().item()
    return {
        "rel_l2": _finite(off / norm if norm else (0.0 if off == 0 else math.inf)),
        "worst_row": _finite(_largest(_share(apart, budget(ref, problem).row))),
    }


def poison_workspaces(plan: DecodePlan) -> None:
    """Fill a plan's float workspaces with NaN."""
    for workspace in plan.workspaces():
        if workspace.is_floating_point():
            workspace.fill_(torch.nan)


def same_bits(a: DecodeOutput, b: DecodeOutput) -> bool:
    """Whether two outputs are the same bit for bit; an LSE counts where both have one."""
    return all(torch.equal(_bits(x), _bits(y)) for x, y in zip(_tensors(a), _tensors(b), strict=False))


def ulp_distance(a: Tensor, b: Tensor) -> int | None:
    """The largest distance of two tensors' elements in representable values between them.

    Args:
        a: any float tensor.
        b: of the same shape and dtype.

    Returns:
        0 where they are bitwise equal up to the sign of zero; None where one holds a NaN.
    """
    if a.isnan().any() or b.isnan().any():
        return None
    if not a.numel():
        return 0
    ordered = []
    for x in (a.contiguous(), b.contiguous()):
        bits = _bits(x).long()
        ordered.append(torch.where(bits < 0, -(bits & ((1 << (8 * x.element_size() - 1)) - 1)), bits))
    return int((ordered[0] - ordered[1]).abs().max())


class _Guarded:
    """A NaN-filled tensor like ``template`` (contiguous), between two canary bands of one allocation."""

    def __init__(self, template: Tensor) -> None:
        size = template.numel() * template.element_size()
        self._bytes = torch.full((size + 2 * GUARD_BYTES,), CANARY, dtype=torch.uint8, device=template.device)
        inner = self._bytes[GUARD_BYTES : GUARD_BYTES + size]
        self.tensor = inner.view(template.dtype).view(template.shape).fill_(torch.nan)

    def damage(self) -> str | None:
        """Where the bands were written, in bytes from the tensor's edges, or None."""
        for band, where in ((self._bytes[:GUARD_BYTES], "before"), (self._bytes[-GUARD_BYTES:], "after")):
            hit = (band != CANARY).nonzero().flatten()
            if len(hit):
                nearest = GUARD_BYTES - int(hit[-1]) if where == "before" else int(hit[0])
                return f"{len(hit)} bytes {where} it, the nearest {nearest} bytes away"
        return None


@contextmanager
def _poisoned_allocations(problem: DecodeProblem, device: torch.device) -> Iterator[None]:
    """Within it, what is allocated holds NaN, as far as it is no more than outputs and LSE need.

    Allocators serve a request from freed memory first. On CUDA, all requests go to a pool of their own, which
    has been filled and freed; on a CPU a few blocks of each size are the best that can be done.
    """
    rows = problem.batch * problem.heads_q
    sizes = (rows * problem.head_dim * problem.element_bytes, rows * 4)
    if device.type != "cuda":
        _poison(device, sizes * POISON_BLOCKS)
        yield
        return
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device):
        # Requests of up to 1 MiB, and larger ones, are served from segments of different kinds.
        _poison(device, [*[1 << 20] * POISON_BLOCKS, max(32 << 20, 4 * sizes[0])])
        yield


def _poison(device: torch.device, sizes: Iterable[int]) -> None:
    """Fill blocks of these sizes, all at a time, and free them. All bits one is NaN in every float dtype."""
    [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]


def _tensors(of: DecodeInputs | DecodeOutput) -> list[Tensor]:
    if isinstance(of, DecodeInputs):
        return [of.q, of.k, of.v, of.cu_seqlens_k]
    return [of.out] if of.lse is None else [of.out, of.lse]


def _same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are the same memory in the same order."""
    return a.data_ptr() == b.data_ptr() and (a.stride() == b.stride() or a.numel() <= 1)


def _bits(t: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals itself."""
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def _mismatch(output: DecodeOutput, ref: Reference, problem: DecodeProblem) -> str | None:
    shape = (problem.batch, problem.heads_q, problem.head_dim)
    for name, tensor, size, dtype in (
        ("out", output.out, shape, TORCH_DTYPES[problem.dtype]),
        ("lse", output.lse, shape[:2], torch.float32),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != size:
            return f"{name}: expected shape {size}, got {tuple(tensor.shape)}"
        if tensor.dtype != dtype:
            return f"{name}: expected dtype {dtype}, got {tensor.dtype}"
        if tensor.device != ref.out.device:
            return f"{name}: expected device {ref.out.device}, got {tensor.device}"
    return None


def _share(error: Tensor, allowed: Tensor) -> Tensor:
    """Error over budget: 0 where there is no error, infinite where there is one and no budget."""
    return torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _largest(share: Tensor) -> float:
    return share.max().item() if share.numel() else 0.0


def _argmax(values: Tensor) -> tuple[int, ...]:
    flat = values.to(torch.float64).flatten().argmax()
    return tuple(int(i) for i in torch.unravel_index(flat, values.shape))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _row(at: tuple[int, ...]) -> str:
    return f"row (sequence {at[0]}, head {at[1]})"


def _lse(at: tuple[int, ...]) -> str:
    return f"lse[{at[0]}, {at[1]}]"


def _value(values: Tensor, wrong: Tensor) -> str:
    return f"{values[_argmax(wrong)]:.8g} ({int(wrong.sum())} of {wrong.numel()} values)"


def _first_bad(out: Tensor, wrong: Tensor) -> str:
    row = out[_argmax(wrong)]
    bad = row[~row.isfinite()]
    return f"{bad[0]:g} in {len(bad)} of {len(row)} elements ({int(wrong.sum())} of {wrong.numel()} rows)"


def _count(share: Tensor, what: str) -> str:
    return f"{int((share > 1).sum())} of {share.numel()} {what} over budget"
