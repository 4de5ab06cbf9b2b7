"""The families of inputs, by name, and what each exposes; drawn in :mod:`harness.inputs`, without torch here."""

from __future__ import annotations

from collections.abc import Mapping

FAMILY_NOTES: Mapping[str, str] = {
    "normal": "zero-mean, unit-variance values: no key stands out, and outputs shrink with length",
    "needles": "nearly all weight on the first and last key and on both sides of every split edge",
    "tagged": "V carries a mark of its sequence and KV head",
    "exact": "equal weights and integer V that nearly cancels: sums are exact, and every single key shows",
    "extreme": "scores of ±10⁴ and more: one key takes all the weight",
    "buried": "equal scores near −10⁶, below a finite mask value",
    "equal": "all keys of a sequence are the same",
}
"""Family -> the kind of fault that it is there for."""

FAMILY_NAMES = tuple(FAMILY_NOTES)
"""All families, in the order in which they are tried."""
