"""The check: is this output what a right kernel may return on these inputs?

Every (sequence, head) row has a budget of its own, computed from the float64 reference and from the
roundings that no kernel of this kind can avoid. There is no constant tolerance anywhere.

Where the budget comes from
---------------------------
With ``u`` the unit roundoff of the problem's dtype and ``u32 = 2^-24``, an honest kernel errs by

- **output rounding**: element ``o_d`` is rounded once, by at most half a spacing ``h_d``, the power of two
  below ``|o_d|`` times ``u``;
- **rounding of P** before the second matrix product (float16, bfloat16): each weight by about ``0.42 u`` of
  itself, independently: standard deviation ``p_rms_d = 0.42 u sqrt(sum_j p_j^2 v_jd^2)`` and, where float16
  weights are subnormal, a bias ``p_bias_d``;
- **scores in float32**: ``s_rms_d``, from the error of each score;
- **accumulation in float32** over ``n`` keys: a random walk of ``0.42 u32 sqrt(n)`` relative to the running
  sum (``swing_d``); partials are weighted by exponentials of float32 LSEs, which are only good to
  ``u32 (|lse| + |top|)``; and tensor cores add 16 products at a time and truncate, a bias of
  ``0.72 u32`` a step, ``n / 16`` steps with one split.

Sizes of the first three are measured on the data (:class:`impls.reference.Reference`). With ``a_d`` the
accumulation error, the budget is

- for one element: ``h_d + p_bias_d + bias_d + 8 sigma_d``, ``sigma_d^2 = p_rms_d^2 + s_rms_d^2 + a_d^2``;
- for a row, in the L2 norm over ``d``: ``sqrt(|h|^2 + (4 |sigma|)^2) + |p_bias| + |bias|``. Four standard
  deviations, not the two that would do for many independent elements, because with few effective keys
  or with structured V a whole row is a single draw.

The rounding of P shrinks with the number of effective keys just as the output does, so the budget stays at
about twice ``u`` of the row's norm at every length: on 64k random keys, where a typical output is 0.005, an
element may be off by some 1e-5 in bfloat16.

The normaliser is taken to be summed in float32 from *unrounded* weights, as every kernel here does, and
the LSE has its own, much smaller budget:
``4 u32 (|lse| + |top| + 0.42 sqrt(n / 32) + 4) + 4 s_lse``: roundings of the LSE and of the maximum in
natural and base-2 units, the sum over tiles, and the scores.

The multiples 4 and 8 are the only free constants. Against simulated honest kernels they leave the worst
row between about 0.2 and 0.7 of its budget; ``reports/NOTES.md`` has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs, DecodeOutput, DecodePlan
from impls.problem import DecodeProblem
from impls.reference import FP32_UNIT, ROUNDING_RMS, Reference, half_subnormal, unit_roundoff

ROW_SIGMAS = 4.0
"""Standard deviations in a row's budget."""

ELEMENT_SIGMAS = 8.0
"""Standard deviations in an element's budget: the largest of 10^9 independent normal values is 6."""

TRUNCATION_BIAS = 0.72
"""Mean relative error of one truncation to float32, in units of ``u32``, over a log-uniform mantissa."""

MMA_KEYS = 16
"""Keys whose products a tensor core adds in one step."""

GUARD_BYTES = 4096
"""Canary band on either side of a checked output; a multiple of every alignment that kernels ask for."""

CANARY = 0x5A
"""Byte of the canary bands: as a number it is ordinary in every dtype, so nothing resets it by accident."""


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one output.

    Args:
        ok: whether it is right.
        reason: what is wrong, naming the worst place; None where it is right.
        rel_l2: relative L2 error of the whole output; None where it is not finite or was not computed.
        worst_row: largest error of a row or element as a share of its budget, at most 1 where it is right.
        lse_err: largest absolute error of the LSE; None without LSE.
        finite: no NaN or infinity where the reference has none.
    """

    ok: bool
    reason: str | None
    rel_l2: float | None
    worst_row: float | None
    lse_err: float | None
    finite: bool

    def to_dict(self) -> dict[str, Any]:
        """The record's ``check`` object."""
        return {
            "rel_l2": self.rel_l2,
            "worst_row": self.worst_row,
            "lse_err": self.lse_err,
            "finite": self.finite,
        }


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
    # Empty rows have lse = top = -inf and swing 0; their budget is 0 because nothing is ever rounded there.
    offsets = torch.where(keys > 0, ref.lse.abs() + ref.top.abs(), 0.0)  # [B, Hq]

    half_spacing = _half_spacing(ref.out, dtype)
    accumulation = FP32_UNIT * (ROUNDING_RMS * keys.sqrt() + offsets + 1)[..., None] * ref.swing
    bias = ref.p_bias
    if dtype != torch.float32:
        bias = bias + TRUNCATION_BIAS * FP32_UNIT * (keys / MMA_KEYS)[..., None] * ref.swing
    sigma = (ref.p_rms.square() + ref.s_rms.square() + accumulation.square()).sqrt()

    row = half_spacing.square().sum(-1) + ROW_SIGMAS**2 * sigma.square().sum(-1)
    return Budget(
        row=row.sqrt() + bias.norm(dim=-1),
        element=half_spacing + bias + ELEMENT_SIGMAS * sigma,
        lse=4 * FP32_UNIT * (offsets + ROUNDING_RMS * (keys / 32).sqrt() + 4) + 4 * ref.s_lse,
    )


def _half_spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding ``value`` (float64) to ``dtype``; 0 for 0, which is exact."""
    exponent = torch.frexp(value).exponent - 1
    spacing = torch.ldexp(torch.full_like(value, unit_roundoff(dtype)), exponent)
    return torch.where(value == 0, 0.0, spacing.clamp(min=half_subnormal(dtype)))


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
    finite = True
    unwritten = judged & ~out.isfinite().all(-1)
    if unwritten.any():
        finite = False
        reasons.append(f"{_row(unwritten)}: expected finite values, got {_first_bad(out, unwritten)}")
    error = torch.where(judged[..., None], (out - ref.out).abs(), 0.0)
    row_share = _share(error.norm(dim=-1), allowed.row)
    element_share = _share(error, allowed.element)
    worst_row = max(_largest(row_share), _largest(element_share))
    if finite and _largest(row_share) > 1:
        at = _argmax(row_share)
        reasons.append(f"{_name(at)}: error {row_share[at]:.3g}x its budget (L2), {_count(row_share)}")
    elif finite and _largest(element_share) > 1:
        at = _argmax(element_share)
        reasons.append(
            f"{_name(at[:2])}, element {at[2]}: expected {ref.out[at]:.6g}, got {out[at]:.6g}, "
            f"error {element_share[at]:.3g}x its budget"
        )

    lse_err = None
    if output.lse is not None:
        lse = output.lse.double()
        empty = torch.tensor([n == 0 for n in problem.kv_lens], dtype=torch.bool, device=lse.device)[:, None]
        empty = empty.expand_as(lse)
        if (wrong := empty & (lse != -torch.inf)).any():
            reasons.append(f"{_lse(_argmax(wrong))}: expected -inf (no keys), got {_value(lse, wrong)}")
        filled = judged & ~empty
        if (wrong := filled & ~lse.isfinite()).any():
            finite = False
            reasons.append(f"{_lse(_argmax(wrong))}: expected a finite value, got {_value(lse, wrong)}")
        gap = torch.where(filled, (lse - ref.lse).abs(), 0.0)
        lse_err = _finite_or_none(_largest(gap))
        share = _share(gap, allowed.lse)
        if _largest(share) > 1 and lse_err is not None:
            at = _argmax(share)
            reasons.append(
                f"{_lse(at)}: expected {ref.lse[at]:.8g}, got {lse[at]:.8g}, "
                f"error {share[at]:.3g}x its budget, {_count(share)}"
            )

    norm = torch.where(judged[..., None], ref.out, 0.0).norm().item()
    off = error.norm().item()
    return CheckResult(
        ok=not reasons,
        reason="; ".join(reasons) or None,
        rel_l2=_finite_or_none(off / norm if norm else (0.0 if off == 0 else torch.inf)),
        worst_row=_finite_or_none(worst_row),
        lse_err=lse_err,
        finite=finite,
    )


def check_plan(plan: DecodePlan, inputs: DecodeInputs, ref: Reference) -> CheckResult:
    """Run a plan where nothing old can pass for a result, and judge what it returns.

    Outputs and LSE are NaN-filled between canary bands, float workspaces are NaN-filled (integer ones hold
    tables and are left alone), and the inputs must come out bit for bit as they went in. Where the library
    allocates its own output, the allocator's free blocks of the output's sizes are NaN-filled instead.

    Args:
        plan: made for ``inputs.problem`` on the inputs' device.
        inputs: what to run it on.
        ref: the oracle's values for these inputs.

    Returns:
        The verdict. Exceptions of the plan are the caller's to handle.
    """
    before = [t.clone() for t in _tensors(inputs)]
    for workspace in plan.workspaces():
        if workspace.is_floating_point():
            workspace.fill_(torch.nan)
    template = plan.new_output()
    guarded = [_Guarded(t) for t in _tensors(template)] if template is not None else []
    if template is None:
        _poison_free_blocks(inputs.problem, inputs.device)
        given = None
    else:
        given = DecodeOutput(guarded[0].tensor, guarded[1].tensor if len(guarded) > 1 else None)

    output = plan.run(inputs, given)
    result = compare(output, ref, inputs.problem)

    reasons = [result.reason] if result.reason else []
    if given is not None and any(
        a.data_ptr() != b.data_ptr() for a, b in zip(_tensors(output), _tensors(given), strict=False)
    ):
        reasons.append("run: expected the output tensors it was given, got others")
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
    return CheckResult(
        ok=not reasons,
        reason="; ".join(reasons) or None,
        rel_l2=result.rel_l2,
        worst_row=result.worst_row,
        lse_err=result.lse_err,
        finite=result.finite,
    )


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


def _poison_free_blocks(problem: DecodeProblem, device: torch.device) -> None:
    """Leave NaN in the blocks that the allocator will hand out next for an output and an LSE.

    Allocators serve a request from freed blocks of its size first. Several of each size are needed, since a
    library may take other tensors of that size before its output.
    """
    rows = problem.batch * problem.heads_q
    blocks = [
        torch.full((size,), 0xFF, dtype=torch.uint8, device=device)  # all ones is NaN in every float dtype
        for size in (rows * problem.head_dim * problem.element_bytes, rows * 4)
        for _ in range(8)
    ]
    del blocks


def _tensors(of: DecodeInputs | DecodeOutput) -> list[Tensor]:
    if isinstance(of, DecodeInputs):
        return [of.q, of.k, of.v, of.cu_seqlens_k]
    return [of.out] if of.lse is None else [of.out, of.lse]


def _bits(t: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals itself."""
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def _mismatch(output: DecodeOutput, ref: Reference, problem: DecodeProblem) -> str | None:
    shape = (problem.batch, problem.heads_q, problem.head_dim)
    wanted: Iterator[tuple[str, Tensor | None, Sequence[int], torch.dtype]] = iter(
        [
            ("out", output.out, shape, TORCH_DTYPES[problem.dtype]),
            ("lse", output.lse, shape[:2], torch.float32),
        ]
    )
    for name, tensor, size, dtype in wanted:
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(size):
            return f"{name}: expected shape {tuple(size)}, got {tuple(tensor.shape)}"
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
    flat = int(values.to(torch.float64).flatten().argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), values.shape))


def _finite_or_none(value: float) -> float | None:
    return value if value < torch.inf else None


def _name(at: tuple[int, ...]) -> str:
    return f"row (sequence {at[0]}, head {at[1]})"


def _row(wrong: Tensor) -> str:
    return _name(_argmax(wrong))


def _lse(at: tuple[int, ...]) -> str:
    return f"lse[{at[0]}, {at[1]}]"


def _value(values: Tensor, wrong: Tensor) -> str:
    return f"{values[_argmax(wrong)]:.8g}, {int(wrong.sum())} of {wrong.numel()}"


def _first_bad(out: Tensor, wrong: Tensor) -> str:
    row = out[_argmax(wrong)]
    bad = row[~row.isfinite()]
    return f"{bad[0]:g} in {len(bad)} of {len(row)} elements, {int(wrong.sum())} of {wrong.numel()} rows"


def _count(share: Tensor) -> str:
    return f"{int((share > 1).sum())} of {share.numel()} over budget"
