"""The families of inputs and the probes, by name, and what each exposes; in words alone, without torch.

The families are drawn in :mod:`harness.inputs`, the probes are in :mod:`harness.probes`.
"""

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

PROBE_NOTES: Mapping[str, str] = {
    "again": "the same tensors with other values, so that a remembered answer shows",
    "memory": "NaN, then large numbers, in all rows that do not belong to a sequence: around K and V, and in half"
    " of the other sequences",
    "layout": "Q, K and V as strided views of wider or shared buffers",
    "graph": "captured in a CUDA graph, and replayed after the inputs were overwritten",
    "repeat": "the same input until a million outputs have been seen, so that rare races show",
}
"""Probe beside the plain run on each family -> what it does, and what it is there for."""
