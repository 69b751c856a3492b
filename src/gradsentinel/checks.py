"""What the doctor makes of the facts: one function for each thing that is looked at."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gradsentinel.cann import Cann, cann_for, releases_for
from gradsentinel.errors import ConfigurationError
from gradsentinel.measures.bounds import VARIABLE as BUFFERS
from gradsentinel.measures.bounds import parse as parse_bounds
from gradsentinel.switches import SWITCHES
from gradsentinel.wording import size_of

SILENT_CHECK = "NPU_ASD_CONFIG"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_ESSENTIAL = {"torch": "2.6", "safetensors": "0.4.3"}
_LITTLE_DISK = 1 << 30  # bytes


class State(str, Enum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; training works."""
    BROKEN = "broken"
    """Essential, and it does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    remedy: str = ""
    """What to do about it; empty if nothing."""

    def as_dict(self) -> dict[str, str]:
        """JSON form."""
        return {"name": self.name, "state": self.state.value, "found": self.found, "remedy": self.remedy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that torch can see."""

    name: str
    """As torch writes it: cpu, cuda:0, npu:3."""
    what: str
    works: bool = True
    """True when a small sum came out right."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"name": self.name, "what": self.what, "works": self.works}


def release(version: str) -> tuple[int, ...]:
    """Return the numbers a version begins with: (2, 6, 0) for 2.6.0a1+cpu."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def is_older(version: str, minimum: str) -> bool:
    """Return True if a version is below a minimum; one that cannot be read is not."""
    numbers, least = release(version), release(minimum)
    length = max(len(numbers), len(least))
    return bool(numbers) and _padded(numbers, length) < _padded(least, length)


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return numbers + (0,) * (length - len(numbers))


def check_version(name: str, version: str | None) -> Check:
    """Judge the version of an essential package."""
    minimum = _ESSENTIAL[name]
    if version is not None and not is_older(version, minimum):
        return Check(name=name, state=State.OK, found=version)
    return Check(
        name=name,
        state=State.BROKEN,
        found="missing" if version is None else f"{version}, but {minimum} or newer is needed",
        remedy=f"pip install --upgrade '{name}>={minimum}'",
    )


def check_torch(version: str | None, problem: str, backend: str = "") -> Check:
    """Judge torch: its version, and whether it could be imported.

    Args:
        version: that of torch; None if it is not installed.
        problem: why `import torch` fails, empty if it does not.
        backend: the device backend that makes it fail, if it is one.
    """
    if not problem or version is None:
        return check_version("torch", version)
    remedy = "reinstall torch"
    if backend or AUTOLOAD in problem:
        remedy = (
            f"export {AUTOLOAD}=0, or set up the driver of {backend or 'that backend'} "
            "(Ascend: install CANN and source its set_env.sh)"
        )
    return Check(
        name="torch",
        state=State.BROKEN,
        found=f"{version}, but importing it failed: {problem}",
        remedy=remedy,
    )


def check_devices(devices: tuple[Device, ...], complaints: list[str]) -> Check:
    """Judge the devices, and what torch had to say when it was asked for them."""
    silent = [device.name for device in devices if not device.works]
    if silent:
        return Check(
            name="devices",
            state=State.BROKEN,
            found=f"{', '.join(silent)} cannot add two numbers",
            remedy="see the message above; check the driver, or hide the device "
            "(CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES)",
        )
    accelerators = [device.name for device in devices if device.name != "cpu"]
    if not accelerators and complaints:
        return Check(
            name="devices",
            state=State.NOTE,
            found=f"cpu only; torch says: {complaints[0]}",
            remedy="if there should be an accelerator, check its driver and that torch was built for it",
        )
    return Check(name="devices", state=State.OK, found=", ".join(accelerators) or "cpu only")


def check_backends(backends: Mapping[str, str], autoload: str) -> Check | None:
    """Judge the device backends that `import torch` loads by itself; None if none is installed.

    Args:
        backends: what is wrong with each installed backend, empty if nothing.
        autoload: the value of TORCH_DEVICE_BACKEND_AUTOLOAD.
    """
    if not backends:
        return None
    failing = {name: problem for name, problem in backends.items() if problem}
    if failing:
        name, problem = next(iter(failing.items()))
        return Check(
            name="backends",
            state=State.NOTE,
            found=f"{name} is installed and cannot be loaded: {problem}",
            remedy=f"keep {AUTOLOAD}=0, or set up its driver (Ascend: source set_env.sh), or uninstall it",
        )
    if autoload != "1":
        return Check(
            name="backends",
            state=State.NOTE,
            found=f"{', '.join(backends)} could be loaded, but {AUTOLOAD}={autoload}",
            remedy=f"unset {AUTOLOAD}, or import the backend in your script",
        )
    return Check(name="backends", state=State.OK, found=f"{', '.join(backends)} loaded")


def check_npu_version(torch_version: str | None, npu_version: str | None) -> Check | None:
    """Judge whether torch_npu was made for this torch; None if it is not installed."""
    if torch_version is None or npu_version is None:
        return None
    mine, theirs = release(torch_version)[:2], release(npu_version)[:2]
    if mine == theirs or not theirs:
        return Check(name="torch_npu", state=State.OK, found=f"{npu_version} for torch {torch_version}")
    wanted = ".".join(map(str, mine))
    known = ", ".join(f"{one.torch_npu} with CANN {one.cann}" for one in releases_for(torch_version)[:3])
    return Check(
        name="torch_npu",
        state=State.NOTE,
        found=f"{npu_version} was not made for torch {torch_version}",
        remedy=f"pip install 'torch-npu=={wanted}.*', or the torch of torch_npu's version"
        + (f"; for this torch: {known}" if known else ""),
    )


def check_cann(npu_version: str | None, cann: Cann | None, *, works: bool = False) -> Check | None:
    """Judge whether torch_npu will find the CANN it needs; None if torch_npu is not installed.

    `works` says that it has found one: devices are there.
    """
    if npu_version is None:
        return None
    if works and (cann is None or not cann.active):
        return Check(name="cann", state=State.OK, found="torch_npu has found it, in an unusual place")
    wanted = cann_for(npu_version)
    needed = f"CANN {wanted}" if wanted else "CANN"
    if cann is None:
        return Check(
            name="cann",
            state=State.NOTE,
            found=f"torch_npu {npu_version} is installed, CANN is not: torch_npu cannot be loaded",
            remedy=f"install {needed} with its driver and source its set_env.sh; until then export "
            f"{AUTOLOAD}=0, or `import torch` fails. GradSentinel needs neither",
        )
    found = f"{cann.version or 'unknown version'} in {cann.home}"
    if not cann.active:
        return Check(
            name="cann",
            state=State.NOTE,
            found=f"{found}, but its environment is not set up",
            remedy=f"source {cann.script}; without it torch_npu cannot be loaded",
        )
    if wanted and cann.version and release(cann.version)[:2] != release(wanted)[:2]:
        return Check(
            name="cann",
            state=State.NOTE,
            found=f"{found}, but torch_npu {npu_version} was released with CANN {wanted}",
            remedy=f"install CANN {wanted}, or the torch_npu of CANN {cann.version} (table: docs/npu.md)",
        )
    return Check(name="cann", state=State.OK, found=found)


def check_silent_check(npu_version: str | None, environment: Mapping[str, str]) -> Check | None:
    """Tell whether torch_npu looks for silent errors by itself; None if it is not installed."""
    if npu_version is None:
        return None
    stated = environment.get(SILENT_CHECK, "")
    if "enable:true" in stated.replace(" ", "").lower():
        return Check(name="silent check", state=State.OK, found=f"{SILENT_CHECK}={stated}")
    return Check(
        name="silent check",
        state=State.NOTE,
        found=f"torch_npu's own look for silent errors is off: {SILENT_CHECK} is {stated or 'unset'}",
        remedy=f"export {SILENT_CHECK}=enable:true,with_checksum:true before the start. It compares "
        "gradients in bf16 and fp32 with their past and only logs; DeviceHealthCallback makes incidents of "
        "its warnings. It takes up to 1.5 GiB of device memory, and more than 2% of a small model's time",
    )


def check_buffers(environment: Mapping[str, str]) -> Check | None:
    """Judge the bounds of what is kept for a diagnosis; None if they are the defaults."""
    stated = environment.get(BUFFERS, "")
    if not stated.strip():
        return None
    try:
        found = parse_bounds(stated)
    except ConfigurationError as error:
        return Check(
            name="buffers",
            state=State.BROKEN,
            found=str(error),
            remedy=f"unset {BUFFERS}, or correct it: a run would not start",
        )
    return Check(name="buffers", state=State.OK, found=f"{BUFFERS}: {found}")


def check_health(kinds: set[str], tools: Mapping[str, bool]) -> Check | None:
    """Tell whether the cards can be asked for their health; None if there are none.

    Args:
        kinds: of devices that torch sees.
        tools: what is there: "npu-smi", "nvidia-ml-py".
    """
    needed = {
        "npu": ("npu-smi", "comes with the Ascend driver; put it on the PATH of this user or container")
    }
    needed["cuda"] = ("nvidia-ml-py", "pip install 'gradsentinel[nvml]'")
    asked = {kind: tool for kind, tool in needed.items() if kind in kinds}
    if not asked:
        return None
    missing = [f"{tool}: {how}" for tool, how in asked.values() if not tools.get(tool)]
    if not missing:
        return Check(name="health", state=State.OK, found=", ".join(tool for tool, _ in asked.values()))
    return Check(
        name="health",
        state=State.NOTE,
        found="DeviceHealthCallback cannot ask the cards for temperature, power and memory errors",
        remedy="; ".join(missing),
    )


def check_distributed(backends: tuple[str, ...] | None) -> Check:
    """Judge torch.distributed by the backends it has; None: it was not built in."""
    if backends:
        return Check(name="distributed", state=State.OK, found=", ".join(backends))
    return Check(
        name="distributed",
        state=State.NOTE,
        found="torch.distributed is not available" if backends is None else "no backend",
        remedy="for runs of several processes install a torch that has it; one process needs none",
    )


def check_determinism(kinds: set[str], environment: Mapping[str, str]) -> Check:
    """Judge whether a step that is computed again can come out the same, bit for bit."""
    switches = [switch for kind in sorted(kinds) for switch in SWITCHES.get(kind, ())]
    missing = [switch for switch in switches if not switch.is_set(environment)]
    if not missing:
        return Check(name="determinism", state=State.OK, found="nothing in the environment stands against it")
    return Check(
        name="determinism",
        state=State.NOTE,
        found="a step that is computed again may differ in the last bits"
        + "".join(
            f"; {one.variable}={environment[one.variable]} is not deterministic"
            for one in missing
            if environment.get(one.variable)
        ),
        remedy=f"export {' '.join(f'{one.variable}={one.values[0]}' for one in missing)}, and "
        "torch.use_deterministic_algorithms(True) in the script; what it costs: "
        + "; ".join(f"{one.variable}: {one.cost}" for one in missing)
        + "; the latter is slower, and raises where an operator has no deterministic way",
    )


def check_directory(path: str) -> Check:
    """Judge the directory that runs are written to by writing to it."""
    try:
        directory = os.path.realpath(path)
        with tempfile.TemporaryFile(dir=directory):
            free = shutil.disk_usage(directory).free
    except OSError as error:
        return Check(
            name="directory",
            state=State.NOTE,
            found=f"the current directory cannot be written to: {error.strerror}",
            remedy="give run_dir= a directory that can, or go to one",
        )
    if free < _LITTLE_DISK:
        return Check(
            name="directory",
            state=State.NOTE,
            found=f"only {size_of(free)} free",
            remedy="snapshots and incident bundles need room: give run_dir= another disk",
        )
    return Check(name="directory", state=State.OK, found=f"can be written to, {size_of(free)} free")


def check_encoding(encoding: str | None) -> Check:
    """Judge the encoding of what is printed."""
    name = (encoding or "unknown").lower()
    if name.replace("-", "").startswith("utf"):
        return Check(name="encoding", state=State.OK, found=name)
    return Check(
        name="encoding",
        state=State.NOTE,
        found=f"{name}: other characters are printed as escapes",
        remedy="export PYTHONIOENCODING=utf-8, or LANG=C.UTF-8",
    )
