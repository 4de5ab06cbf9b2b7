"""What the parts of a worker share: its device and implementations, and how a step is announced, tried and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from impls.contract import DecodeImpl


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How a part of a worker does its steps.

    Args:
        device: where to compute.
        load: implementation id -> implementation.
        at: announces the next step: whose, and what.
        attempt: ``(who, action, *arguments)`` to what the action returns, or the row that tells why it does not.
        send: takes each row, or another message to the parent.
    """

    device: torch.device
    load: Callable[[str], DecodeImpl]
    at: Callable[[int | None, str], None]
    attempt: Callable[..., Any]
    send: Callable[[object], None]
