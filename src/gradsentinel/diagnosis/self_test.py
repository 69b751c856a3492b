"""The self-test of an Ascend device (`torch_npu.npu.stress_detect`), as a step of a diagnosis.

It takes minutes, changes the voltage of the chip while it runs, needs 10 GiB of its memory, and may not
run where several jobs share a machine. So it runs only where it was asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

NEEDS = 10 << 30
"""Bytes of device memory that it takes."""
_FAULT = 2
_VOLTAGE = "574007"
"""The number of the error that says that the voltage was not restored."""
KINDS = ("aic", "hccs")
"""What can be tested: the cores of the chip; by all ranks together, the links between a machine's chips."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The outcome of a self-test."""

    passed: bool | None
    """None if it did not run."""
    words: str


class _CannotRun(Exception):
    """Says why."""


def run_self_test(kind: str, device: torch.device) -> SelfTest:
    """Test the device; never raises, waits for it, and may take minutes. Not in a thread.

    Args:
        kind: one of `KINDS`; "hccs" is called on every rank.
        device: of this rank.
    """
    what = f"the self-test ({kind}) of {device}"
    try:
        code = _run(kind, device)
    except _CannotRun as error:
        return SelfTest(None, f"{what} did not run: {error}")
    except Exception as error:  # noqa: BLE001 - a beta interface of a driver
        if _VOLTAGE in str(error):
            return SelfTest(False, f"{what} could not restore the voltage, restart the machine: {error}")
        return SelfTest(None, f"{what} did not run: {type(error).__name__}: {error}")
    if code == 0:
        return SelfTest(True, f"{what} passed")
    return (
        SelfTest(False, f"{what} found a hardware fault")
        if code == _FAULT
        else SelfTest(None, f"{what} did not run: code {code}")
    )


def _run(kind: str, device: torch.device) -> int:
    npu: Any = getattr(sys.modules.get("torch_npu"), "npu", None)
    if device.type != "npu" or npu is None:
        raise _CannotRun("only Ascend devices have one, through torch_npu")
    test = getattr(npu, "stress_detect", None)
    if test is None:
        raise _CannotRun("this torch_npu has no stress_detect")
    npu.synchronize()
    npu.empty_cache()
    free = int(npu.mem_get_info()[0]) if hasattr(npu, "mem_get_info") else NEEDS
    # For the links all ranks must come, or those that did would wait.
    if free < NEEDS and kind == "aic":
        raise _CannotRun(f"it needs {NEEDS >> 30} GiB of device memory, {free / 2**30:.1f} are free")
    try:
        return int(test(kind))
    except TypeError:
        if kind != "aic":
            raise
        return int(test())  # older releases know one test only
