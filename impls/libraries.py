"""Getting at the libraries behind the kernels: their modules, their versions, and what they ask of the GPU."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import packages_distributions, version
from types import ModuleType

import torch

from impls.contract import ImplUnavailable


def import_library(name: str) -> ModuleType:
    """The module of that name.

    Raises:
        ImplUnavailable: with what import said.
    """
    try:
        return import_module(name)
    except Exception as error:  # a build for another torch or CUDA fails in more ways than ImportError
        raise ImplUnavailable(f"import {name}: {type(error).__name__}: {error}") from error


def distributions(module: str) -> str | None:
    """The installed distributions that hold a module, with their versions; one interface has several builds."""
    names = packages_distributions().get(module, ())
    return ", ".join(f"{name} {version(name)}" for name in sorted(set(names))) or None


def check_capability(device: torch.device, least: tuple[int, int]) -> str | None:
    """The refusal of a CUDA device whose compute capability is below ``least``, or None."""
    got = torch.cuda.get_device_capability(device)
    if got >= least:
        return None
    return f"device: expected compute capability >= {least[0]}.{least[1]}, got {got[0]}.{got[1]}"


def sm_count(device: torch.device) -> int:
    """SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
