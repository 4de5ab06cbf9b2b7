"""Clocks: what NVML says, what of it is throttling, and silence where it says nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from harness.clocks import OTHER_REASONS, SLOWING, Clocks, Reading, throttled, to_record

BITS = {name: 1 << i for i, name in enumerate((*SLOWING, *OTHER_REASONS))}


class NVMLError(Exception):
    pass


def fake_nvml(reasons: int = 0, *, refuses: tuple[str, ...] = ()) -> Any:
    """A pynvml of one GPU, ``GPU-abc``, that answers everything but the queries in ``refuses``."""

    def answer(name: str, value: object) -> Any:
        def query(handle: object, *arguments: object) -> object:
            assert handle == "handle of GPU-abc"
            if name in refuses:
                raise NVMLError(name)
            return value

        return query

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetClockInfo=lambda handle, which: {1: 1755, 2: 3201}[which],
        nvmlDeviceGetTemperature=answer("temperature", 61),
        nvmlDeviceGetPowerUsage=answer("power", 432100),
        nvmlDeviceGetCurrentClocksEventReasons=answer("reasons", reasons),
        **{f"nvmlClocksEventReason{name}": bit for name, bit in BITS.items()},
    )


def test_one_look_has_clocks_temperature_power_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(BITS["SwPowerCap"] | BITS["GpuIdle"]))
    assert Clocks("abc").read() == Reading(
        sm_mhz=1755, memory_mhz=3201, temperature_c=61, power_w=432.1, reasons=("SwPowerCap", "GpuIdle")
    )


def test_what_a_virtual_gpu_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(refuses=("power", "reasons")))
    reading = Clocks("abc").read()
    assert reading is not None
    assert (reading.power_w, reading.reasons, reading.throttled) == (None, None, None)
    assert reading.sm_mhz == 1755


def test_without_the_library_there_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Clocks("abc").read() is None


def reading(*reasons: str) -> Reading:
    return Reading(sm_mhz=1980, memory_mhz=3201, temperature_c=40, power_w=500.0, reasons=reasons)


@pytest.mark.parametrize("name", SLOWING)
def test_each_slowing_reason_marks_a_whole_round(name: str) -> None:
    assert throttled([reading(), reading("GpuIdle", name), reading()]) is True


@pytest.mark.parametrize("name", OTHER_REASONS)
def test_idling_and_chosen_clocks_are_no_throttling(name: str) -> None:
    assert throttled([reading(), reading(name)]) is False


def test_nobody_can_tell_unless_one_look_shows_it() -> None:
    assert throttled([reading(), None]) is None
    assert throttled([None, reading("HwSlowdown")]) is True
    assert throttled([]) is None


def test_the_record_has_three_values_of_each_quantity_for_each_round() -> None:
    rounds = [[reading(), reading(), reading("GpuIdle")]] * 2
    record = to_record(rounds)
    assert record is not None
    assert set(record) == {"sm_mhz", "memory_mhz", "temperature_c", "power_w", "reasons"}
    assert record["sm_mhz"] == [[1980] * 3] * 2
    assert record["reasons"] == [[(), (), ("GpuIdle",)]] * 2
    assert to_record([[reading(), None]]) is None
