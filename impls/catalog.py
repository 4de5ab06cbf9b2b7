"""The implementations, in the order in which reports list them. Adding one is one file and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from impls.contract import DecodeImpl

IMPLS: dict[str, str] = {
    "tilelang-splitkv": "impls.tilelang_splitkv:TileLangSplitKV",
    "triton-splitkv": "impls.triton_splitkv:TritonSplitKV",
    "flash-attn-2": "impls.flash_attn:FlashAttn2",
    "flash-attn-2-paged": "impls.flash_attn:FlashAttn2Paged",
    "flash-attn-3": "impls.flash_attn:FlashAttn3",
    "flash-attn-3-paged": "impls.flash_attn:FlashAttn3Paged",
    "flashinfer": "impls.flashinfer:FlashInfer",
    "torch-varlen": "impls.torch_attention:TorchVarlen",
    "torch-sdpa": "impls.torch_attention:TorchSdpa",
    "tilelang-equal-splits": "impls.tilelang_splitkv:TileLangEqualSplits",
}
"""Implementation id -> ``module:Class``."""

DESCRIPTIONS: dict[str, str] = {
    "tilelang-splitkv": "this project's kernels in TileLang: splits in proportion to each sequence's length",
    "triton-splitkv": "this project's kernels in Triton: the same algorithm, split counts for its own tiles",
    "flash-attn-2": "packed K and V; one split count for the whole batch, chosen by the library",
    "flash-attn-2-paged": "K and V as pages; one split count for the whole batch, chosen by the library",
    "flash-attn-3": "packed K and V; splits chosen by the library for each sequence, on the device, in every call",
    "flash-attn-3-paged": "K and V as pages; splits chosen by the library, scheduled before the call",
    "flashinfer": "packed K and V; chunks of one length for the whole batch, chosen by the library on the host",
    "torch-varlen": "packed K and V; the flash-attn 2 built into torch, which chooses the splits",
    "torch-sdpa": "one call a sequence",
    "tilelang-equal-splits": "ablation: the kernels of tilelang-splitkv with 8 splits for every sequence",
}
"""Implementation id -> what a reader of a report must know of it, in a line of plain text."""

OURS = ("tilelang-splitkv", "triton-splitkv")
"""The kernels this project writes; the others are baselines, or :data:`ABLATIONS`."""

ABLATIONS = ("tilelang-equal-splits",)
"""Our kernels with one of their choices undone, to see what it is worth: neither ours nor a baseline."""


def check_name(name: str) -> str:
    """Return ``name`` if it is a known implementation id.

    Raises:
        KeyError: listing the known ids.
    """
    if name not in IMPLS:
        raise KeyError(f"implementation: expected one of {', '.join(IMPLS)}, got {name!r}")
    return name


def load(name: str) -> DecodeImpl:
    """Import and construct one implementation.

    Raises:
        KeyError: if the name is unknown; the message lists the known ones.
        impls.contract.ImplUnavailable: if its library is not here, with what import said.
    """
    module, cls = IMPLS[check_name(name)].split(":")
    impl: DecodeImpl = getattr(import_module(module), cls)()
    return impl
