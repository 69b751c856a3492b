"""Runs the optimizer's arithmetic again on copies of one parameter, to see which operator makes it bad."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.diagnosis.memory import bad_mask, judge
from gradsentinel.diagnosis.operands import equation, operands_of
from gradsentinel.diagnosis.record import Event
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.diagnosis.walk import origins_of
from gradsentinel.measures.inspection import readable
from gradsentinel.measures.named import gradient_of

logger = logging.getLogger("gradsentinel")

_LARGEST = 1 << 22
"""Elements up to which a parameter is rehearsed: it takes a few copies of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """An optimizer's step that makes something non-finite of finite numbers."""

    event: Event
    gradient: str
    """What the gradient was, in words."""
    key: str
    """Of the moment that came out bad; empty if it is the parameter."""

    def __str__(self) -> str:
        formula = equation(self.event)
        made = "NaN" if self.event.badness.nan else "Inf"
        what = f"{self.event.op} makes {formula or made}"
        inputs = "; ".join(map(str, operands_of(self.event)))
        return f"run again on a copy, with {self.gradient}, {what} (inputs: {inputs})"


@torch.no_grad()
def rehearse(
    optimizer: Optimizer,
    parameter: Tensor,
    group: Mapping[str, Any],
    *,
    grad_norm: float | None = None,
    exact: bool = False,
) -> Rehearsal | None:
    """Return what the optimizer's step does to copies of a parameter and its moments, made finite.

    Tried with the gradient itself, if it is still there, with one that is 0, and with one of the norm given;
    what is not finite begins at 0, or as large as its type allows. None if that makes nothing bad, or other
    things than those that are, or if it cannot be tried. Changes nothing; the optimizer's hooks do not run.

    Args:
        optimizer: of the run.
        parameter: one that is bad, or whose moments are.
        group: its settings, perhaps others than it has now.
        grad_norm: of the step's gradients.
        exact: it has to make bad the very elements that are.
    """
    if readable(parameter) is not None or hasattr(parameter, "to_local"):
        return None
    if not 0 < parameter.numel() <= _LARGEST or parameter.layout is not torch.strided:
        return None
    for words, gradient in _gradients(parameter, grad_norm):
        for limit in (False, True):
            try:
                found = _step(optimizer, parameter, group, gradient, limit=limit, exact=exact)
            except Exception as error:
                logger.debug("the optimizer's step could not be rehearsed: %s", error, exc_info=True)
                return None
            if found is not None:
                event, key = found
                given = f"{words}, from moments at the limit of their type" if limit else words
                return Rehearsal(event=event, gradient=given, key=key)
    return None


def _gradients(parameter: Tensor, norm: float | None) -> Iterator[tuple[str, Tensor]]:
    mine = gradient_of(parameter)
    if mine is not None and mine.layout is torch.strided and not judge(mine):
        yield "its gradient", mine.detach().clone()
    yield "a gradient of 0", torch.zeros_like(parameter)
    if norm is not None and norm > 0:
        sizes = [norm / math.sqrt(parameter.numel())]
        if math.isinf(norm):  # their squares overflowed: the gradients were finite, or no step had been made
            largest = torch.finfo(torch.float32).max
            sizes = [*(factor * math.sqrt(largest) for factor in (2, 1e3, 1e6)), largest / 4]
        for size in sizes:
            yield f"gradients of the size of the step's ({size:.4g})", torch.full_like(parameter, size)


def _step(
    optimizer: Optimizer,
    parameter: Tensor,
    group: Mapping[str, Any],
    gradient: Tensor,
    *,
    limit: bool,
    exact: bool,
) -> tuple[Event, str] | None:
    stand_in = torch.nn.Parameter(_finite(parameter, limit=limit), requires_grad=True)
    state = {
        key: _finite(value, limit=limit) if isinstance(value, Tensor) else value
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    if limit and not _bad(parameter, optimizer.state):
        return None
    stand_in.grad = gradient.to(stand_in.dtype)
    copy = _copy_of(optimizer, {**group, "params": [stand_in]}, {stand_in: state} if state else {})
    trace = Trace((), [("parameter", stand_in)])
    step = inspect.unwrap(type(optimizer).step)
    with trace:
        try:
            step(copy)
        except RuntimeError:
            stand_in.grad = _sparse(stand_in.grad)
            step(copy)
    after = _bad(stand_in, copy.state)
    found = _bad(parameter, optimizer.state)
    if after.keys() != found.keys():
        return None  # it makes other things bad than those that are: that was not it
    if exact and not all(torch.equal(bad_mask(after[key]), bad_mask(found[key])) for key in after):
        return None
    for key, tensor in after.items():
        origins = origins_of(trace, [tensor])
        if origins:
            return origins[0], key
    return None


def _bad(parameter: Tensor, state: Mapping[Tensor, Any]) -> dict[str, Tensor]:
    """The parameter, as "", and its moments, as far as they are not finite."""
    moments = {key: value for key, value in state.get(parameter, {}).items() if isinstance(value, Tensor)}
    return {key: value for key, value in {"": parameter.detach(), **moments}.items() if judge(value)}


def _copy_of(optimizer: Optimizer, group: dict[str, Any], state: Mapping[Tensor, Any]) -> Optimizer:
    """Return an optimizer of the same kind, without hooks and without what schedulers put around `step`."""
    copy = object.__new__(type(optimizer))
    kept = optimizer.__dict__.keys() - {"step", "found_inf", "grad_scale"}  # the scaler's, or the guard's
    copy.__dict__.update({key: optimizer.__dict__[key] for key in kept})
    for name, value in optimizer.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, Mapping):
            copy.__dict__[name] = type(value)()
    copy.param_groups = [group]
    copy.state = type(optimizer.state)(getattr(optimizer.state, "default_factory", None), state)
    return copy


def _finite(tensor: Tensor, *, limit: bool) -> Tensor:
    value = tensor.detach().clone()
    if readable(value) is not None:
        return value
    return torch.nan_to_num(value, 0.0) if limit else torch.nan_to_num(value, 0.0, 0.0, 0.0)


def _sparse(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that has every row, as an embedding's would; some optimizers take no other."""
    if gradient is None or not gradient.dim():
        return gradient
    rows = torch.arange(gradient.shape[0], device=gradient.device)[None]
    return torch.sparse_coo_tensor(rows, gradient, gradient.shape, check_invariants=True)
