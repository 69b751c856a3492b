"""Drives small runs through the public API, and looks for what must not be left behind."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsentinel import Action, Incident, NanCallback, Sentinel


def _finite(tensor: Tensor) -> bool:
    numbers = tensor.is_floating_point() or tensor.is_complex()
    packed = tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None)  # torch 2.8 and newer have it
    if tensor.device.type == "meta" or not numbers or packed:
        return True
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.double()
    return bool(values.isfinite().all())


def _tensors(thing: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, Tensor):
        yield path, thing
    elif isinstance(thing, nn.Module):
        for name, tensor in itertools.chain(thing.named_parameters(), thing.named_buffers()):
            yield f"{path}{name}", tensor
            if tensor.grad is not None:
                yield f"{path}{name}.grad", tensor.grad
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _tensors(value, f"{path}{'' if isinstance(key, Tensor) else key}.")
    elif isinstance(thing, torch.optim.Optimizer):
        yield from _tensors(thing.state, path)
        for group in thing.param_groups:
            yield from ((f"{path}{key}", torch.tensor(v)) for key, v in group.items() if type(v) is float)


@pytest.fixture
def nonfinite() -> Callable[..., list[str]]:
    """Names of what is NaN or Inf in modules (gradients too), optimizers (hyperparameters too) and dicts."""

    def look(*things: Any) -> list[str]:
        return [
            name
            for number, thing in enumerate(things)
            for name, tensor in _tensors(thing, f"{number}:")
            if not _finite(tensor)
        ]

    return look


@pytest.fixture
def watch(run_dir: Path) -> Iterator[Callable[..., Sentinel]]:
    """Make a sentinel, with NanCallback alone unless callbacks are given; closed after the test."""
    made: list[Sentinel] = []

    def make(model: Any, optimizer: Any, *callbacks: Any, **settings: Any) -> Sentinel:
        made.append(
            Sentinel(model, optimizer, callbacks=callbacks or (NanCallback(),), run_dir=run_dir, **settings)
        )
        return made[-1]

    yield make
    for sentinel in made:
        sentinel.close()


def _state(sentinel: Sentinel) -> dict[str, Tensor]:
    """A copy of everything that a dropped step must leave as it was."""
    state = {f"parameter {name}": p for name, p in sentinel.host.named_parameters()}
    for prefix, module in sentinel.host.modules():
        state.update({f"buffer {prefix}.{name}": b for name, b in module.named_buffers()})
    for index, optimizer in enumerate(sentinel.host.optimizers):
        for parameter, entries in optimizer.state.items():
            name = sentinel.host.name_of(parameter)
            state.update({f"moment {index} {name} {k}": v for k, v in entries.items() if torch.is_tensor(v)})
    lazy = torch.nn.parameter.is_lazy
    return {name: t.detach().clone() for name, t in state.items() if not lazy(t) and t.device.type != "meta"}


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype.itemsize == 1:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return torch.equal(one, other) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


@pytest.fixture
def drive() -> Callable[..., list[str]]:
    """Train over the batches and return what was done about each step.

    On the way it holds that a dropped step changes nothing, bit for bit: parameters, buffers, moments.
    """

    def run(
        sentinel: Sentinel,
        batches: Iterable[Any],
        loss_of: Callable[[Any], Tensor],
        *,
        accumulate: int = 1,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> list[str]:
        actions: list[str] = []
        before = _state(sentinel)
        backwards = 0
        for batch in sentinel.steps(batches, accumulate=accumulate):
            sentinel.backward(loss_of(batch))
            backwards += 1
            if sentinel.step(max_norm, norm_type=norm_type) is None:
                continue
            action = sentinel.last_action
            actions.append(action.label)
            after = _state(sentinel)
            if action is Action.SKIP:
                assert not sentinel.applied
                changed = [name for name, tensor in before.items() if not _same(tensor, after[name])]
                assert changed == [], "a dropped step changed something"
                assert not [name for name in after.keys() - before.keys() if name.startswith("moment")]
            before = after
        return actions

    return run


class _Term(torch.autograd.Function):
    """Zero, with a gradient that is whatever one likes."""

    @staticmethod
    def forward(ctx, parameter, gradient):
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx, upstream):
        return ctx.gradient, None


@pytest.fixture
def term() -> Callable[[Tensor, Tensor], Tensor]:
    """A term of the loss whose value is 0 and whose gradient is the given tensor, NaN and all."""
    return lambda parameter, gradient: _Term.apply(parameter, gradient.to(parameter.dtype))


@pytest.fixture
def told() -> Callable[[Sentinel], list[tuple[int, str, str]]]:
    """Step, kind and outcome of each incident."""

    def tell(sentinel: Sentinel) -> list[tuple[int, str, str]]:
        return [(i.step, str(i.kind), str(i.outcome)) for i in sentinel.incidents]

    return tell


@pytest.fixture
def named() -> Callable[[Incident], set[str]]:
    """The names of the tensors that an incident blames."""
    return lambda incident: {tensor.name for tensor in incident.tensors}
