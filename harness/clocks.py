"""What a GPU does with its clocks, as NVML tells it. Clocks are read here and never set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

SLOWING = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""NVML's clock event reasons that hold a busy GPU below the clocks it could have."""

OTHER_REASONS = ("GpuIdle", "ApplicationsClocksSetting", "SyncBoost", "DisplayClockSetting")
"""The reasons that are somebody's choice, or the rest between two kernels."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at a GPU; None where NVML does not say.

    Args:
        sm_mhz: clock of the SMs.
        memory_mhz: clock of the memory.
        temperature_c: of the chip, in degrees Celsius.
        power_w: what the board draws, in watts.
        reasons: names of NVML's clock event reasons that hold now, without ``nvmlClocksEventReason``.
    """

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    reasons: tuple[str, ...] | None

    @property
    def throttled(self) -> bool | None:
        """Whether a reason of :data:`SLOWING` holds; None where nobody can tell."""
        return None if self.reasons is None else any(reason in SLOWING for reason in self.reasons)


class Clocks:
    """NVML's handle of the GPU that CUDA calls by this UUID.

    Without the library, a driver or permission, :meth:`read` returns None.

    Args:
        uuid: as torch has it, without the prefix ``GPU-``. NVML counts devices in another order than CUDA, so
            a number would not do.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = None
        with suppress(Exception):  # whatever is missing: then nobody can tell
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml

    def read(self) -> Reading | None:
        """Look now; takes some tens of microseconds."""
        nvml = self._nvml
        if nvml is None:
            return None
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        return Reading(
            sm_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            reasons=None if reasons is None else self._names(reasons),
        )

    def _ask(self, query: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return query(self._handle, *arguments)
        except self._nvml.NVMLError:  # a virtual GPU answers some questions and not others
            return None

    def _names(self, reasons: int) -> tuple[str, ...]:
        names = (*SLOWING, *OTHER_REASONS)
        return tuple(name for name in names if reasons & getattr(self._nvml, f"nvmlClocksEventReason{name}"))


def throttled(readings: Sequence[Reading | None]) -> bool | None:
    """Whether any of the readings of a round shows a throttled GPU; None where none does and one does not know."""
    told = [None if reading is None else reading.throttled for reading in readings]
    return True if True in told else None if None in told or not told else False


def to_record(rounds: Sequence[Sequence[Reading | None]]) -> dict[str, Any] | None:
    """The readings of all rounds as a record keeps them; None where there were none.

    Returns:
        Name of a quantity of :class:`Reading` -> for each round the values before, during and after it.
    """
    if any(reading is None for readings in rounds for reading in readings):
        return None
    by_round = [[asdict(reading) for reading in readings if reading is not None] for readings in rounds]
    names = list(Reading.__annotations__)
    return {name: [[reading[name] for reading in readings] for readings in by_round] for name in names}
