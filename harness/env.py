"""The environment of a run: what a reader must know before believing, or repeating, its numbers.

Nothing here fails for want of a GPU, a driver, git or a library: what cannot be found out is None.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
"""The project: the folder that holds ``harness``."""

GIT_VARIABLE = "SPLITKV_GIT"
"""Names the commit, as ``sha`` or ``sha-dirty``, where the code runs without its git folder."""

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton",),
    "tilelang": ("tilelang",),
    "flash_attn": ("flash-attn",),
    # One interface, several builds; the record says which.
    "flash_attn_3": ("flash-attn-3", "tokenspeed-fa3"),
    "flashinfer": ("flashinfer-python",),
    "numpy": ("numpy",),
}
"""Key of the record -> the distributions that may provide the library, in order of preference."""


def default_device() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``. Imports torch."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def environment(device: str) -> dict[str, Any]:
    """The ``env`` of a run record.

    Args:
        device: where the run computes, ``cpu`` or ``cuda``; the latter imports torch and asks for the
            properties of its current GPU.

    Returns:
        JSON values: ``device``; ``gpu`` (its name), ``driver``, ``sm_count``, ``l2_bytes`` and ``clocks`` in
        MHz, all None on ``cpu``; ``cpu`` and ``cpu_count``; ``python`` and the versions of :data:`LIBRARIES`
        by name, None where not installed; ``git`` and ``dirty`` as of :func:`git_commit`.
    """
    commit, dirty = git_commit()
    return {
        "device": device,
        **(_gpu() if device == "cuda" else dict.fromkeys(("gpu", "driver", "sm_count", "l2_bytes", "clocks"))),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(distributions) for name, distributions in LIBRARIES.items()},
        "git": commit,
        "dirty": dirty,
    }


def git_commit(root: Path = ROOT) -> tuple[str | None, bool | None]:
    """The commit that runs, and whether the working tree differs from it.

    Asked of git where ``root`` is the top of a repository, else read from :data:`GIT_VARIABLE`. Reports do not
    count as a difference: a run writes there itself.

    Returns:
        ``(sha, dirty)``, or ``(None, None)`` where neither knows.
    """
    # A copy installed into some other repository's folder must not claim that repository's commit.
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == root.resolve():
        sha = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude)reports")
        if sha is not None and changes is not None:
            return sha, changes != ""
    stated = os.environ.get(GIT_VARIABLE, "")
    return (stated.removesuffix("-dirty"), stated.endswith("-dirty")) if stated else (None, None)


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None where there is no git, no repository or no commit."""
    try:
        done = subprocess.run(
            ("git", "-C", str(root), *arguments), capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(distributions: tuple[str, ...]) -> str | None:
    """Version from the installed metadata: importing a GPU library only to ask would take seconds, or crash."""
    for distribution in distributions:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return version if distribution == distributions[0] else f"{version} ({distribution})"
    return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties()
    driver, clocks = _nvml(f"GPU-{properties.uuid}")
    return {
        "gpu": properties.name,
        "driver": driver,
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "clocks": clocks,
    }


def _nvml(uuid: str) -> tuple[str | None, dict[str, int] | None]:
    """Driver version, and clocks in MHz of the GPU of that UUID, now and at most."""
    try:
        import pynvml
    except ImportError:
        return None, None
    driver, clocks = None, None
    try:
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        # By UUID, for torch counts only the GPUs that CUDA_VISIBLE_DEVICES leaves it, and in another order.
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
        clocks = {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, sm),
            "sm_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, sm),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, memory),
            "memory_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, memory),
        }
    except pynvml.NVMLError:
        pass  # no driver, or a virtual GPU that it does not list: what was learnt so far stands
    return driver, clocks
