"""The problem: what one decode-attention call has to compute, as host values.

Standard library only, so that a study can be read, expanded and rendered on a machine without torch.
Everything is validated here, once; nothing downstream looks at these fields again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

DTYPE_BYTES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
"""The dtypes a problem may name, and the bytes of one element."""

INT32_MAX = 2**31 - 1


class ProblemError(ValueError):
    """A problem that makes no sense; the message names the field, what was expected and what was got."""


@dataclass(frozen=True, kw_only=True)
class DecodeProblem:
    """One token of attention per sequence over packed, variable-length keys and values.

    For sequence ``b`` with keys ``K_b [kv_lens[b], Hkv, D]`` and query head ``h``, which uses KV head
    ``h // (heads_q // heads_kv)``::

        s = scale * K_b[:, h // group] @ q[b, h]      # [kv_lens[b]]
        out[b, h] = softmax(s) @ V_b[:, h // group]   # [D]
        lse[b, h] = log(sum(exp(s)))                  # natural logarithm

    A sequence without keys has output 0 and LSE minus infinity.

    Args:
        kv_lens: keys of each sequence, in tokens; may be empty, entries may be 0.
        heads_q: query heads; a multiple of ``heads_kv``.
        heads_kv: key/value heads.
        head_dim: elements per head.
        dtype: of q, k, v and the output: ``float16``, ``bfloat16`` or ``float32``.
        scale: factor on the scores; None means ``head_dim ** -0.5``.

    Raises:
        ProblemError: on any field out of range, naming the field and index at fault.
    """

    kv_lens: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str = "bfloat16"
    scale: float | None = None

    def __post_init__(self) -> None:
        given: object = self.kv_lens  # a study file may hold anything
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ProblemError(f"kv_lens: expected a sequence of integers, got {given!r}")
        lens = tuple(self.kv_lens)
        for i, n in enumerate(lens):
            if not _is_int(n):
                raise ProblemError(f"kv_lens[{i}]: expected an integer, got {n!r}")
            if n < 0:
                raise ProblemError(f"kv_lens[{i}]: expected >= 0, got {n}")
        object.__setattr__(self, "kv_lens", lens)
        if sum(lens) > INT32_MAX:
            raise ProblemError(f"kv_lens: expected a sum <= {INT32_MAX} (cu_seqlens_k is int32), got {sum(lens)}")
        for name in ("heads_q", "heads_kv", "head_dim"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ProblemError(f"{name}: expected an integer >= 1, got {value!r}")
        if self.heads_q % self.heads_kv:
            raise ProblemError(f"heads_q: expected a multiple of heads_kv = {self.heads_kv}, got {self.heads_q}")
        if self.dtype not in list(DTYPE_BYTES):  # a list, so that an unhashable value is refused by name too
            raise ProblemError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.scale is not None and (
            isinstance(self.scale, bool)
            or not isinstance(self.scale, (int, float))
            or not math.isfinite(self.scale)
            or self.scale <= 0
        ):
            raise ProblemError(f"scale: expected a finite number > 0 or None, got {self.scale!r}")

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.kv_lens)

    @cached_property
    def total_kv(self) -> int:
        """Keys of all sequences together: rows of the packed K and V."""
        return sum(self.kv_lens)

    @cached_property
    def max_kv(self) -> int:
        """Keys of the longest sequence; 0 for an empty batch."""
        return max(self.kv_lens, default=0)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_kv

    def tiles_per_split(self, block_h: int) -> int:
        """CTAs that one split of ours launches: for each KV head one for every ``block_h`` heads of its group."""
        return self.heads_kv * -(-self.group // block_h)

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores: ``scale``, or ``head_dim ** -0.5``."""
        return self.head_dim**-0.5 if self.scale is None else float(self.scale)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of q, k, v and the output."""
        return DTYPE_BYTES[self.dtype]

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Prefix sums of ``kv_lens`` with a leading 0, ``batch + 1`` values."""
        return (0, *accumulate(self.kv_lens))

    @property
    def key_bytes(self) -> int:
        """Bytes of K and V of one key, for one KV head."""
        return 2 * self.head_dim * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V together: what every implementation must read at least once."""
        return self.total_kv * self.heads_kv * self.key_bytes

    def to_dict(self) -> dict[str, Any]:
        """The problem as JSON values; ``scale`` is left out where it is the default."""
        out: dict[str, Any] = {
            "kv_lens": list(self.kv_lens),
            "heads_q": self.heads_q,
            "heads_kv": self.heads_kv,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }
        if self.scale is not None:
            out["scale"] = self.scale
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DecodeProblem:
        """The inverse of :meth:`to_dict`.

        Raises:
            ProblemError: for unknown or missing keys, or values out of range.
        """
        known = {"kv_lens", "heads_q", "heads_kv", "head_dim", "dtype", "scale"}
        if unknown := sorted(set(data) - known):
            raise ProblemError(f"problem: expected keys {', '.join(sorted(known))}, got {', '.join(unknown)}")
        if missing := sorted({"kv_lens", "heads_q", "heads_kv", "head_dim"} - set(data)):
            raise ProblemError(f"problem: expected key {missing[0]}, got {', '.join(sorted(data)) or 'none'}")
        return cls(**dict(data))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
