"""Lets megatron-core run on a CPU over gloo, as torch_npu's `transfer_to_npu` lets it run on an Ascend NPU.

What the code says about CUDA is done on the CPU instead, in the whole process: for tests and examples only.
`install()` comes before the first import of Megatron.
"""

import contextlib
import importlib.util
import logging
import os
import sys
import types
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron compiles small functions: leave them as they are
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_SPLITS = ("output_split_sizes", "input_split_sizes")


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class CudaToCpu(TorchFunctionMode):
    """Makes tensors for "cuda" on the CPU, and lets CPU tensors look as if they were elsewhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in {torch.Tensor.cuda, torch.Tensor.pin_memory}:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)  # it is compared with such names
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        for name in _SPLITS:  # of an all-to-all; numbers only where the tensor is a CUDA one
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


class _Generators:
    """Stands for torch.cuda.default_generators: there is one, the CPU's."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


class _Stream:
    """A stream or event that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self


class _Event(_Stream):
    pass


def install() -> None:
    """Change torch in this process; a second call does nothing."""
    cuda: Any = torch.cuda
    if cuda.Stream is _Stream:
        return
    # One generator is both the CPU's and the device's, which Megatron notices.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    instead = {
        "synchronize": lambda *_, **__: None,
        "empty_cache": lambda *_, **__: None,
        "set_device": lambda *_, **__: None,
        "_lazy_init": lambda *_, **__: None,
        "current_device": lambda *_, **__: CPU,
        "_lazy_call": lambda call, **_: call(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": lambda *_: None,
        "initial_seed": lambda *_: torch.initial_seed(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
    }
    for name, function in instead.items():
        setattr(cuda, name, function)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(cuda.random, name, instead[name])
    cuda.default_generators = _Generators()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    if importlib.util.find_spec("triton") is None:  # from 0.18 on one kernel's file is imported anyway
        stub: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        stub.__getattr__ = lambda _: None
        sys.modules[stub.__name__] = stub
    mode = CudaToCpu()
    run = torch.autograd._engine_run_backward

    def engine(*args: Any, **kwargs: Any) -> Any:  # the mode is off inside of torch.autograd.backward
        with mode:
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = engine
    mode.__enter__()
