"""A simulated NPU for machines without one: torch.device("npu") on host memory, counting what it is asked.

`install()` builds the extension once (a compiler and ninja are needed), renames torch's spare backend to
"npu" and registers the `hccl` process group. It changes the process for good, so tests run in a child.
"""

import contextlib
import importlib.machinery
import os
import shutil
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

_c10d = torch.library.Library("c10d", "IMPL")
"""For as long as the program runs: what it registers is gone with it."""
_HERE = Path(__file__).parent
_FORMATS = {"ND": 2, "NZ": 29}
_built: Any = None
ranges: list[str] = []
"""What was marked for the profiler: "+name" where a range begins, "-name" where it ends."""
_groups: list[Any] = []
"""The gloo groups behind the simulated ones, which hold no reference themselves."""


@dataclass
class Counts:
    """What the simulated devices saw since `reset()`."""

    syncs: dict[str, int] = field(default_factory=dict)
    """Waits of the host, by what made it wait."""
    launches: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Operators without a kernel of the device's own, which run on the CPU there."""
    hazards: list[str] = field(default_factory=list)
    """Work that was not ordered after what it depends on, although the numbers came out right here."""


def install(devices: int = 2, *, saturating: bool = False) -> None:
    """Make `torch.device("npu")` available in this process, and what it needs of `torch_npu`.

    `saturating` computes as the Atlas training series does: an overflow becomes the largest finite number
    and NaN becomes 0, and a flag of the device remembers it.
    """
    global _built  # noqa: PLW0603 - a process has one backend
    if _built is not None:
        return
    from torch.utils.cpp_extension import load  # noqa: PLC0415 - slow

    _find_tools()

    folder = _HERE / ".build" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-O1", "-w", "-DUSE_C10D_GLOO"]
    source = str(_HERE / "simulator.cpp")
    _built = load("simulated_npu", [source], extra_cflags=flags, build_directory=str(folder))
    _built.setup(devices)
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _device_module(devices))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    native = native_ops()
    _built.set_native(native)
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    whole = (
        "aten::_foreach_",
        "aten::_amp_foreach_non_finite_check_and_unscale_",
        "aten::_amp_update_scale_",
    )
    _built.register_native([op[6:] for op in native if op.startswith(whole) and has_kernel(op, "CPU")])
    if torch.__version__.startswith("2.6."):  # where collectives have no kernel that passes autograd by
        for op in (one for one in torch._C._dispatch_get_all_op_names() if one.startswith("c10d::")):
            _c10d.impl(op.removeprefix("c10d::"), torch.library.fallthrough_kernel, "AutogradPrivateUse1")
    dist.Backend.register_backend("hccl", _hccl, devices=["npu"])
    sys.modules["torch_npu"] = _torch_npu()
    saturate(saturating)


def native_ops() -> list[str]:
    """Return the operators with kernels of their own, as the table has them."""
    lines = (_HERE / "native_ops.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def saturate(on: bool) -> None:  # noqa: FBT001 - a switch
    """Have the devices saturate from now on, or not; the flags are cleared."""
    _built.set_saturating(on)


def counts() -> Counts:
    """Return what was counted since the last `reset()`."""
    return Counts(
        *(kind(found) for kind, found in zip((dict, dict, dict, list), _built.stats(), strict=True))
    )


def reset() -> None:
    """Count from zero."""
    _built.reset()


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count in the block; the result is filled in when it ends."""
    reset()
    found = Counts()
    yield found
    found.__dict__.update(counts().__dict__)


class Stream(torch.Stream):
    """A stream of a simulated device."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Self:
        if given:
            return super().__new__(cls, **given)
        return super().__new__(cls, device=_device(device), priority=priority)

    @property
    def npu_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """An event of a simulated device; its first `query` answers no while the work is not known to be done."""

    def __new__(cls, **given: bool) -> Self:
        return super().__new__(cls, device="npu", **given)


def _device(device: Any = None) -> torch.device:
    if device is None:
        return torch.device("npu", _built.cur_dev())
    found = torch.device("npu", device) if isinstance(device, int) else torch.device(device)
    return found if found.index is not None else torch.device("npu", _built.cur_dev())


@contextlib.contextmanager
def _on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run the block on a stream, which is no context manager itself before torch 2.7."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _as_stream(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


class _DeviceContext:
    """`torch.npu.device(...)`."""

    def __init__(self, device: Any) -> None:
        self._index = -1 if device is None else _device(device).index

    def __enter__(self) -> None:
        self._before = _built.cur_dev()
        if self._index >= 0:
            _built.set_dev(self._index)

    def __exit__(self, *_: object) -> None:
        _built.set_dev(self._before)


def _device_module(count: int) -> types.ModuleType:
    """Return what torch finds as `torch.npu`."""
    module = types.ModuleType("torch.npu")
    generators = tuple(_built.default_generator(index) for index in range(count))
    nothing = ("_lazy_init", "init", "empty_cache", "ipc_collect")
    functions: dict[str, Any] = {
        **dict.fromkeys(nothing, lambda: None),
        "Stream": Stream,
        "Event": Event,
        "device": _DeviceContext,
        "is_available": lambda: count > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: count,
        "current_device": _built.cur_dev,
        "set_device": lambda device: _built.set_dev(_device(device).index),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_device(device)),
        "current_stream": lambda device=None: _as_stream(torch.accelerator.current_stream(_device(device))),
        "default_stream": lambda device=None: Stream(
            stream_id=0, device_index=_device(device).index, device_type=20
        ),
        "set_stream": torch.accelerator.set_stream,
        "stream": _on_stream,
        "get_device_name": lambda device=None: "SimAscend910B",
        "get_soc_version": lambda: 220,
        "memory_allocated": lambda device=None: _built.mem(_device(device).index, False),
        "memory_reserved": lambda device=None: _built.mem(_device(device).index, False),
        "max_memory_allocated": lambda device=None: _built.mem(_device(device).index, True),
        "reset_peak_memory_stats": lambda device=None: _built.reset_peak(_device(device).index),
        "default_generators": generators,
        "manual_seed": lambda seed: generators[_built.cur_dev()].manual_seed(int(seed)),
        "manual_seed_all": lambda seed: [one.manual_seed(int(seed)) for one in generators] and None,
        "initial_seed": lambda device=None: generators[_device(device).index].initial_seed(),
        "get_rng_state": lambda device="npu": generators[_device(device).index].get_state(),
        "set_rng_state": lambda state, device="npu": generators[_device(device).index].set_state(state),
        "get_rng_state_all": lambda: [one.get_state() for one in generators],
        "set_rng_state_all": lambda states: (
            [one.set_state(state) for one, state in zip(generators, states, strict=True)] and None
        ),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
        "is_bf16_supported": lambda: True,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    module.matmul = types.SimpleNamespace(allow_hf32=False)
    module.conv = types.SimpleNamespace(allow_hf32=True)
    module.mstx = types.SimpleNamespace(range_start=_range_start, range_end=_range_end)
    return module


def _range_start(name: str, stream: Any = None) -> int:
    assert stream is None or isinstance(stream, Stream)
    ranges.append(f"+{name}")
    return len(ranges)


def _range_end(number: int) -> None:
    ranges.append(ranges[number - 1].replace("+", "-", 1))


def _torch_npu() -> types.ModuleType:
    """Return what a program that uses NPUs has imported as `torch_npu`."""
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.__version__ = "2.13.0"
    utils = types.SimpleNamespace(is_support_inf_nan=lambda: not _built.is_saturating())
    module.npu = types.SimpleNamespace(utils=utils, mstx=torch.npu.mstx)
    module.npu_get_float_status = _float_status
    module.npu_clear_float_status = _clear_float_status
    module.get_npu_format = _built.format_of
    module.npu_format_cast = _cast
    return module


def _float_status(status: torch.Tensor) -> torch.Tensor:
    _only_where_it_saturates()
    _built.float_status(status)
    return torch.zeros_like(status)  # the releases differ: this one writes to what it was given


def _clear_float_status(status: torch.Tensor) -> torch.Tensor:
    _only_where_it_saturates()
    _built.clear_float_status(status)
    return status


def _only_where_it_saturates() -> None:
    if not _built.is_saturating():
        raise RuntimeError("there is no overflow flag in INF_NAN mode")


def _cast(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return a copy in another format; the numbers of the device's own formats are in another order."""
    before = _built.format_of(tensor)
    plain = (0, _FORMATS["ND"])
    turned = tensor.clone() if (before in plain) == (number in plain) else tensor.flip(0).clone()
    _built.set_format(turned, number)
    return turned


def _hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated-hccl", store), rank, size, timeout)
    _groups.append(gloo)
    return _built.Hccl(gloo)


def _find_tools() -> None:
    """Put this environment's own ninja within reach: nobody may have activated it."""
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], scripts])


def compiler_is_missing() -> str | None:
    """Return why the simulator cannot be built here, or None."""
    _find_tools()
    for tool in (os.environ.get("CXX", "g++"), "ninja"):
        if shutil.which(tool) is None:
            return f"the simulated NPU needs {tool} to be built"
    return None
