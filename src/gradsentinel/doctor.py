"""What is installed here, what works, and what to do about the rest."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradsentinel._version import __version__
from gradsentinel.cann import find_cann, find_npu_smi
from gradsentinel.checks import (
    AUTOLOAD,
    Check,
    Device,
    State,
    check_backends,
    check_buffers,
    check_cann,
    check_determinism,
    check_devices,
    check_directory,
    check_distributed,
    check_encoding,
    check_health,
    check_npu_version,
    check_silent_check,
    check_torch,
    check_version,
    is_older,
)
from gradsentinel.wording import printable, size_of

SCHEMA = 1
_PATIENCE = 120  # seconds
_DEVICE_KINDS = ("cuda", "npu", "xpu", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An optional package and what it is good for."""

    names: tuple[str, ...]
    """The names under which it may be installed; the first is the usual one."""
    purpose: str
    minimum: str
    install: str
    """The command that adds it."""

    def version(self) -> str | None:
        """Return the installed version, without importing it; None if it is not installed."""
        return next((found for name in self.names if (found := installed(name)) is not None), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON form, with the version that is installed now."""
        version = self.version()
        return {
            "name": self.names[0],
            "version": version,
            "enough": version is not None and not is_older(version, self.minimum),
            "minimum": self.minimum,
            "purpose": self.purpose,
            "install": self.install,
        }


def _extra(name: str) -> str:
    return f"pip install 'gradsentinel[{name}]'"


PARTS = (
    Part(
        names=("tensorboard",), purpose="TensorBoardCallback", minimum="2.16", install=_extra("tensorboard")
    ),
    Part(names=("matplotlib",), purpose="loss curves as a PNG", minimum="3.8", install=_extra("demo")),
    Part(
        names=("lightning", "pytorch-lightning"),
        purpose="Lightning runs",
        minimum="2.6",
        install=_extra("lightning"),
    ),
    Part(names=("transformers",), purpose="Hugging Face runs", minimum="5.0", install=_extra("huggingface")),
    Part(names=("accelerate",), purpose="Hugging Face runs", minimum="1.10", install=_extra("huggingface")),
    Part(names=("megatron-core",), purpose="Megatron runs", minimum="0.10", install=_extra("megatron")),
    Part(names=("torch-npu",), purpose="Ascend NPUs", minimum="2.6", install=_extra("npu")),
    Part(names=("nvidia-ml-py",), purpose="health of CUDA cards", minimum="12.535", install=_extra("nvml")),
    Part(
        names=("prometheus-client",),
        purpose="PrometheusCallback",
        minimum="0.20",
        install=_extra("prometheus"),
    ),
    Part(names=("mlflow-skinny", "mlflow"), purpose="MLflowSink", minimum="3.0", install=_extra("mlflow")),
    Part(
        names=("numpy",),
        purpose="NumPy's random state in snapshots",
        minimum="1.26",
        install="pip install numpy",
    ),
)
"""In the order in which they are shown; minimum versions as in the extras of the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the doctor found; a rich renderable."""

    versions: Mapping[str, str]
    devices: tuple[Device, ...]
    parts: tuple[Mapping[str, Any], ...]
    checks: tuple[Check, ...] = field(default=())

    @property
    def healthy(self) -> bool:
        """True if nothing essential is broken."""
        return all(check.state is not State.BROKEN for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema": SCHEMA,
            "healthy": self.healthy,
            "versions": dict(self.versions),
            "devices": [device.as_dict() for device in self.devices],
            "parts": [dict(part) for part in self.parts],
            "checks": [check.as_dict() for check in self.checks],
        }

    def __rich__(self) -> RenderableType:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        broken = [check.name for check in self.checks if check.state is State.BROKEN]
        verdict = (
            Text(f"Broken: {', '.join(broken)}. What to do is said above.", "bold red")
            if broken
            else Text("Everything essential works.", "bold green")
        )
        return Group(
            Text(printable(versions)),
            *_section("Devices", (_device_row(device) for device in self.devices)),
            *_section("Checks", (_check_row(check) for check in self.checks)),
            *_section("Optional parts", (_part_row(part) for part in self.parts)),
            Text(),
            verdict,
        )


def examine() -> Report:
    """Look at this machine, this interpreter and the current directory; trains and changes nothing."""
    backends, autoload = _backends(), os.environ.get(AUTOLOAD, "1")
    failing = next((name for name, problem in backends.items() if problem), "")
    broken = failing if autoload == "1" else ""
    # Without the backend that makes the import fail there is still something to be said of torch.
    torch, problem = _import_torch(autoload="0" if broken else autoload)
    parts = tuple(part.as_dict() for part in PARTS)
    devices = tuple(_devices(torch))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices += tuple(_accelerators(torch)) if torch is not None else ()
    kinds = {device.name.partition(":")[0] for device in devices}
    torch_npu = _torch_npu_version()
    checks = [
        check_torch(_torch_version(torch), problem or (backends[broken] if broken else ""), broken),
        check_version("safetensors", installed("safetensors")),
        check_devices(devices, [str(entry.message) for entry in caught]),
        check_backends({} if torch is None or broken else backends, autoload),
        check_npu_version(_torch_version(torch), torch_npu),
        check_cann(torch_npu, find_cann(os.environ), works="npu" in kinds),
        check_silent_check(torch_npu, os.environ),
        check_distributed(_distributed_backends(torch)) if torch is not None else None,
        check_determinism(kinds, os.environ),
        check_buffers(os.environ),
        check_health(
            kinds,
            {"npu-smi": find_npu_smi() is not None, "nvidia-ml-py": installed("nvidia-ml-py") is not None},
        ),
        check_directory("."),
        check_encoding(getattr(sys.stdout, "encoding", None)),
    ]
    versions = {
        "gradsentinel": __version__,
        "python": platform.python_version(),
        "torch": _torch_version(torch) or "missing",
        "safetensors": installed("safetensors") or "missing",
        "platform": f"{platform.system()} {platform.machine()}",
    }
    return Report(
        versions=versions,
        devices=devices,
        parts=parts,
        checks=tuple(check for check in checks if check is not None),
    )


# -- facts ------------------------------------------------------------------------------------------


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, read from its metadata: nothing is imported."""
    try:
        return metadata.version(name) or "unknown"
    except (metadata.PackageNotFoundError, KeyError):
        return None


def _import_torch(*, autoload: str) -> tuple[ModuleType | None, str]:
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = autoload
    try:
        import torch  # noqa: PLC0415 - that it may fail is the point
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        if before is None:
            del os.environ[AUTOLOAD]
        else:
            os.environ[AUTOLOAD] = before
    return torch, ""


def _torch_npu_version() -> str | None:
    """Return the version of torch_npu; "unknown" for one that was put on the path without its metadata."""
    found = installed("torch-npu")
    if found is not None:
        return found
    try:
        there = importlib.util.find_spec("torch_npu") is not None
    except ValueError:  # something of that name is loaded that came from no file
        there = True
    return "unknown" if there else None


def _torch_version(torch: ModuleType | None) -> str | None:
    return installed("torch") if torch is None else str(torch.__version__)


def _devices(torch: ModuleType | None) -> Iterator[Device]:
    """The CPU, as far as this process may use it."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count()
    threads = f", {torch.get_num_threads()} threads" if torch is not None else ""
    yield Device(name="cpu", what=f"{cores} cores{threads}")


def _accelerators(torch: ModuleType) -> Iterator[Device]:
    kinds = list(_DEVICE_KINDS)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        kinds.append(accelerator.current_accelerator().type)
    for kind in dict.fromkeys(kinds):
        module = getattr(torch, kind, None)
        if module is None or not getattr(module, "is_available", bool)():
            continue
        for index in range(module.device_count()):
            yield _look_at(torch, module, f"{kind}:{index}", index)


def _look_at(torch: ModuleType, module: Any, name: str, index: int) -> Device:
    """Ask a device for its name and for a small sum."""
    try:
        words = [module.get_device_name(index)] if hasattr(module, "get_device_name") else []
        if hasattr(module, "get_device_properties"):
            memory = getattr(module.get_device_properties(index), "total_memory", None)
            words += [] if memory is None else [size_of(memory)]
        works = float(torch.ones(2, device=name).sum()) == 2.0
    except (RuntimeError, OSError, AssertionError) as error:
        return Device(name=name, what=f"{type(error).__name__}: {error}", works=False)
    return Device(name=name, what=", ".join(words), works=works)


def _backends() -> dict[str, str]:
    """What is wrong with each backend that `import torch` would load, empty if nothing."""
    names = sorted({entry.name for entry in metadata.entry_points(group="torch.backends")})
    if not names:
        return {}
    # In a process of its own: an import that fails halfway would leave its mark on this one, or end it.
    try:
        trial = subprocess.run(
            [sys.executable, "-c", "import torch"],
            env={**os.environ, AUTOLOAD: "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(names, f"importing it took more than {_PATIENCE} s")
    if trial.returncode == 0:
        return dict.fromkeys(names, "")
    if trial.returncode < 0:
        return dict.fromkeys(names, f"importing it ended the process with signal {-trial.returncode}")
    return dict.fromkeys(names, _cause_in([x for x in trial.stderr.splitlines() if x and not x[0].isspace()]))


def _cause_in(lines: list[str]) -> str:
    """The first error of a traceback: torch's own, at the end, only says that loading failed."""
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["the import ended without a word"])[0]


def _distributed_backends(torch: ModuleType) -> tuple[str, ...] | None:
    if not torch.distributed.is_available():
        return None
    asked = ("gloo", "nccl", "mpi", "ucc", "xccl")
    found = [
        name
        for name in asked
        if (has := getattr(torch.distributed, f"is_{name}_available", None)) is not None and has()
    ]
    if "hccl" in torch.distributed.Backend.backend_list:
        found.append("hccl")
    return tuple(found)


# -- display -------------------------------------------------------------------------------------------

_STATE_STYLES = {State.OK: "green", State.NOTE: "yellow", State.BROKEN: "bold red"}


def _section(title: str, rows: Iterator[tuple[Text, ...]]) -> tuple[RenderableType, ...]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*row)
    for column in grid.columns:
        column.overflow = "fold"
    return Text(), Text(title, "bold"), grid


def _device_row(device: Device) -> tuple[Text, ...]:
    return Text(f"  {device.name}"), Text(printable(device.what), "" if device.works else "bold red")


def _check_row(check: Check) -> tuple[Text, ...]:
    found = Text(printable(check.found))
    if check.remedy:
        found.append("\n-> ", _STATE_STYLES[check.state]).append(printable(check.remedy))
    return Text(f"  {check.state.value}", _STATE_STYLES[check.state]), Text(check.name), found


def _part_row(part: Mapping[str, Any]) -> tuple[Text, ...]:
    version = Text(printable(part["version"] or "missing"), "" if part["version"] else "dim")
    if part["version"] and not part["enough"]:
        what = Text.assemble(("too old: ", "yellow"), f"{part['install']} (>= {part['minimum']})")
    else:
        what = Text(part["purpose"] if part["version"] else part["install"])
    return Text(f"  {part['name']}"), version, what
