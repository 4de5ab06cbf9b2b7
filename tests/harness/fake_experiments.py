"""Stand-ins for :mod:`harness.experiments`; they live in the process that the selftest starts, and load nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

BAD = "SPLITKV_TEST_BAD_CASE"
"""What the fake does on its second case: ``raise`` or ``die``."""


def env() -> dict[str, Any]:
    return {"device": "cuda", "clocks": time.time()}


def serve(conn: Connection) -> None:
    """One trial a case, which names its process."""
    conn.send(env())
    while True:
        try:
            name, case = conn.recv()
        except EOFError:
            return
        if case.name == "b1_8k" and os.environ.get(BAD) == "die":
            os._exit(3)
        if case.name == "b1_8k" and os.environ.get(BAD) == "raise":
            conn.send("ValueError: no such luck")
            continue
        trial = {"case": case.name, "impl": "x", "experiment": name, "a": [1.0], "b": [1.0], "pid": os.getpid()}
        conn.send([trial])


def refuse(conn: Connection) -> None:
    conn.send("RuntimeError: device: expected a CUDA device, got none that torch can use")


def liars(device: str) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    trials = [
        {"case": case, "impl": "liar", "experiment": "liars", "status": "wrong", "reason": "caught"}
        for case in ("liars_small", "liars_large")
    ]
    return env() | {"device": device}, trials
