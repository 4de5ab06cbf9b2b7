"""What a problem costs: bytes, floating-point operations, and the rates they make of a time.

Units: bytes; µs; GB/s with a GB of 1e9 bytes; TFLOP/s with 1e12 operations.
"""

from __future__ import annotations

import math

from impls.problem import DecodeProblem

CEILING_SLACK = 1.03
"""How much faster than the read ceiling a time may seem before it is called impossible."""


def io_bytes(problem: DecodeProblem) -> int:
    """Bytes that any implementation must move: K and V and q read once, the output written once.

    Partial results and log-sum-exps are an implementation's own affair and do not count.
    """
    q_bytes = problem.batch * problem.heads_q * problem.head_dim * problem.element_bytes
    return problem.kv_bytes + 2 * q_bytes


def flops(problem: DecodeProblem) -> int:
    """Operations of the two matrix products, ``4 * Hq * sum(kv_lens) * D``.

    A multiplication and an addition for each element of ``q K^T``, and again for ``P V``; the softmax does
    not count.
    """
    return 4 * problem.heads_q * problem.total_kv * problem.head_dim


def gbps(n_bytes: float, us: float) -> float:
    """GB/s (1e9 bytes) of ``n_bytes`` moved in ``us`` µs.

    Raises:
        ValueError: for a time that is not above 0.
    """
    return n_bytes / _positive(us) / 1e3


def tflops(operations: float, us: float) -> float:
    """TFLOP/s (1e12 operations) of ``operations`` done in ``us`` µs.

    Raises:
        ValueError: for a time that is not above 0.
    """
    return operations / _positive(us) / 1e6


def _positive(us: float) -> float:
    if not (us > 0 and math.isfinite(us)):
        raise ValueError(f"us: expected a finite time > 0, got {us}")
    return us
