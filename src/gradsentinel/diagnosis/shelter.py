"""Keeps the run as it is while a step is computed again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.again.generators import own_generators
from gradsentinel.diagnosis.belongings import Belongings, has_memory, tensor_keeper
from gradsentinel.measures.bounds import bounds
from gradsentinel.measures.inspection import stored
from gradsentinel.ranks.wrappers import find_ddp
from gradsentinel.run import Run
from gradsentinel.state.rng import preserved_rng

logger = logging.getLogger("gradsentinel")

_TORCH_FIELDS = frozenset(nn.Module().__dict__) | {"_parameters", "_buffers", "_modules"}


@contextmanager
def sheltered(run: Run) -> Iterator[None]:
    """Put everything back on leaving that running the model may change, bit for bit.

    Gradients (the same objects), parameters (as `bounds().weights` allows, frozen ones first), buffers,
    random states, training flags, requires_grad, and what the modules hold in plain attributes: numbers,
    containers, objects of the user's own, tensors, arrays, generators (`belongings.py`). Not what lies
    outside: closures, files, globals, objects of frameworks; but random generators that `forward=` refers to.
    """
    devices = [run.host.device.type] if run.host.device.type != "cpu" else []
    with ExitStack() as stack:
        stack.enter_context(preserved_rng(devices))
        for restore in (*_parameters(run), *_values(run), *_modules(run), *_scaler(run)):
            stack.callback(restore)
        for generator in own_generators(run):
            stack.callback(generator.put_back)
        stack.enter_context(run.local.suspended())
        stack.enter_context(_ddp_silenced(run.model))
        for _, parameter in run.host.named_parameters():
            parameter.grad = None
        yield


def _parameters(run: Run) -> Iterator[Any]:
    kept = [(p, p.grad, p.requires_grad) for _, p in run.host.named_parameters()]

    def restore() -> None:
        for parameter, gradient, wanted in kept:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
            parameter.grad = gradient

    yield restore


def _values(run: Run) -> Iterator[Any]:
    """What the parameters hold; says so where one was written to that is too large to be put back."""
    room = bounds().weights
    parameters = sorted(run.host.named_parameters(), key=lambda named: named[1].requires_grad)
    for name, parameter in parameters:
        held = stored(parameter.detach())
        if not has_memory(parameter) or held.layout is not torch.strided:
            continue
        room -= held.numel() * held.element_size()
        if room >= 0:
            yield tensor_keeper(parameter, on_host=parameter.device.type != "cpu")
        else:
            yield partial(_told_if_written, name, parameter, parameter._version)


def _told_if_written(name: str, parameter: Tensor, version: int) -> None:
    if parameter._version != version:
        logger.warning(
            "the forward pass writes to %s, which is too large to be put back after a replay", name
        )


def _modules(run: Run) -> Iterator[Any]:
    seen: set[int] = set()
    belongings = Belongings()
    for _, root in run.host.modules():
        for module in root.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield _Module(module, belongings).restore
    yield belongings.restore


class _Module:
    """One module as it was: flags, buffers, plain attributes; what these hold goes to `belongings`."""

    def __init__(self, module: nn.Module, belongings: Belongings) -> None:
        self._module = module
        self._training = module.training
        self._buffers = dict(module._buffers)
        self._values = [(b, _copy(b)) for b in self._buffers.values() if b is not None and has_memory(b)]
        self._plain = {k: v for k, v in module.__dict__.items() if k not in _TORCH_FIELDS}
        for value in self._plain.values():
            belongings.keep(value)

    @torch.no_grad()
    def restore(self) -> None:
        module = self._module
        module.training = self._training
        module._buffers.clear()
        module._buffers.update(self._buffers)
        for buffer, value in self._values:
            stored(buffer).copy_(value)
        for name in [k for k in module.__dict__ if k not in _TORCH_FIELDS and k not in self._plain]:
            del module.__dict__[name]
        module.__dict__.update(self._plain)


def _copy(tensor: Tensor) -> Tensor:
    return stored(tensor.detach()).clone()


def _scaler(run: Run) -> Iterator[Any]:
    scaler = getattr(run.host, "scaler", None)
    if scaler is None:
        return
    names = ("_scale", "_growth_tracker")
    kept = {name: getattr(scaler, name, None) for name in names}
    values = {name: t.clone() for name, t in kept.items() if isinstance(t, Tensor)}
    states = {key: dict(state) for key, state in scaler._per_optimizer_states.items()}

    def restore() -> None:
        for name, tensor in kept.items():
            setattr(scaler, name, tensor)
            if name in values and isinstance(tensor, Tensor):
                tensor.copy_(values[name])
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(states)

    yield restore


@contextmanager
def _ddp_silenced(model: Any) -> Iterator[None]:
    """Let DDP neither broadcast buffers nor reduce gradients, if the user's code goes through it."""
    wrapped = [find_ddp(module) for module in _each(model)]
    with ExitStack() as stack:
        for ddp in wrapped:
            if ddp is None:
                continue
            before = ddp.require_forward_param_sync
            stack.callback(setattr, ddp, "require_forward_param_sync", before)
            stack.enter_context(ddp.no_sync())
            ddp.require_forward_param_sync = False
        yield


def _each(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    values = model.values() if isinstance(model, dict) else model if isinstance(model, (list, tuple)) else []
    return [module for module in values if isinstance(module, nn.Module)]
