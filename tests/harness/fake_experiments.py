"""Stand-ins for :mod:`harness.experiments`; they live in the process that the selftest starts, and load nothing."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

BAD = "SPLITKV_TEST_BAD_CASE"
"""What the fake does on its second case: ``raise`` or ``die``."""


def serve(conn: Connection, name: str) -> None:
    """One trial a case."""
    conn.send({"device": "cuda", "clocks": time.time()})
    while True:
        try:
            case = conn.recv()
        except EOFError:
            return
        if case.name == "other" and os.environ.get(BAD) == "die":
            os._exit(3)
        if case.name == "other" and os.environ.get(BAD) == "raise":
            conn.send("ValueError: no such luck")
            continue
        conn.send([{"case": case.name, "impl": "x", "experiment": name, "a": [1.0], "b": [1.0]}])


def refuse(conn: Connection, name: str) -> None:
    conn.send("RuntimeError: device: expected a CUDA device, got none that torch can use")
