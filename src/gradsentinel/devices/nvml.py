"""Asks NVML, the management library of the NVIDIA driver, for the health of a card; needs `nvidia-ml-py`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradsentinel.devices.health import HealthUnavailable, Reading
from gradsentinel.incident import now

_SLOWED = {
    0x8: "slowed down by the hardware",
    0x20: "slowed down: hot",
    0x40: "slowed down by the hardware: hot",
    0x80: "slowed down: power brake",
}
"""Reasons for lower clocks that are no good sign, by NVML's bit."""


class Nvml:
    """The health of one CUDA device.

    Args:
        index: of the device, as in "cuda:3".
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.uuid, self.bus = _identity(index)
        self.card = self.uuid or f"cuda {_place(index)}"
        self._nvml: Any = None
        self._handle: Any = None

    def read(self) -> Reading:
        """Return what the card says of itself.

        Raises:
            HealthUnavailable: if nvidia-ml-py or the driver is missing, or the card is gone.
        """
        nvml = self._open()
        notes: list[str] = []
        with self._told(nvml):
            name = nvml.nvmlDeviceGetName(self._handle)
        temperature = self._ask(nvml, "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        hottest = self._ask(
            nvml, "nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        )
        milliwatts = self._ask(nvml, "nvmlDeviceGetPowerUsage")
        reasons = self._ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its older name
            reasons = self._ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
        notes += [words for bit, words in _SLOWED.items() if int(reasons or 0) & bit]
        health, counters = None, dict(self._ecc(nvml))
        rows = self._ask(nvml, "nvmlDeviceGetRemappedRows")
        if rows is not None:
            corrected, uncorrected, pending, failed = rows
            counters["remapped rows, correctable"] = int(corrected)
            counters["remapped rows, uncorrectable"] = int(uncorrected)
            health = "row remapping failed" if failed else "row remapping pending" if pending else "OK"
        return Reading(
            card=self.card,
            name=name.decode() if isinstance(name, bytes) else str(name),
            time=now(),
            temperature=None if temperature is None else float(temperature),
            hottest=None if hottest is None else float(hottest),
            power=None if milliwatts is None else float(milliwatts) / 1000,
            health=health,
            counters=counters,
            notes=tuple(notes),
        )

    def _ecc(self, nvml: Any) -> Iterator[tuple[str, int]]:
        for kind, what in (
            (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "corrected"),
            (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, "uncorrected"),
        ):
            for since, when in ((nvml.NVML_VOLATILE_ECC, ""), (nvml.NVML_AGGREGATE_ECC, ", of its life")):
                count = self._ask(nvml, "nvmlDeviceGetTotalEccErrors", kind, since)
                if count is not None:
                    yield f"{what} ECC errors{when}", int(count)

    def _ask(self, nvml: Any, name: str, *args: Any) -> Any:
        """Return one answer; None where this card or this driver has none."""
        question: Callable[..., Any] | None = getattr(nvml, name, None)
        try:
            return None if question is None else question(self._handle, *args)
        except nvml.NVMLError:
            return None

    def _open(self) -> Any:
        if self._nvml is not None:
            return self._nvml
        try:
            import pynvml  # noqa: PLC0415 - optional
        except ImportError as error:
            raise HealthUnavailable(f"{error}; pip install 'gradsentinel[nvml]'") from error
        if not hasattr(pynvml, "nvmlInit") or not hasattr(pynvml, "NVMLError"):
            raise HealthUnavailable("the package pynvml here is another one; pip install nvidia-ml-py")
        with self._told(pynvml):
            pynvml.nvmlInit()
            self._handle = self._find(pynvml)
        self._nvml = pynvml
        return pynvml

    def _find(self, nvml: Any) -> Any:
        if self.uuid:
            return nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        if self.bus:
            return nvml.nvmlDeviceGetHandleByPciBusId(self.bus)
        return nvml.nvmlDeviceGetHandleByIndex(_place(self.index))

    @contextlib.contextmanager
    def _told(self, nvml: Any) -> Iterator[None]:
        """Have the library's errors told as ours, and the card looked for anew next time."""
        try:
            yield
        except nvml.NVMLError as error:
            self._nvml = None
            raise HealthUnavailable(f"NVML: {error}") from error


def _identity(index: int) -> tuple[str, str]:
    """Return UUID and PCI address of a device that is in use already; empty where torch does not tell."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return "", ""
    try:
        found = cuda.get_device_properties(index)
    except (RuntimeError, AssertionError):
        return "", ""
    uuid = getattr(found, "uuid", None)
    domain, number, place = (getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    known = domain is not None and number is not None and place is not None
    bus = f"{domain:08X}:{number:02X}:{place:02X}.0" if known else ""
    text = "" if uuid is None else str(uuid)
    return (text if not text or text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"), bus


def _place(index: int) -> int:
    """Return which of the machine's cards this is, as far as CUDA_VISIBLE_DEVICES tells by numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].strip().isdecimal():
        return int(visible[index])
    return index
