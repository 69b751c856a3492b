"""What an operator was given and what it made of it, in numbers and words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.diagnosis.memory import bad_mask, judge
from gradsentinel.diagnosis.record import Event
from gradsentinel.measures.inspection import first_index, parts_of, readable, values_of

_SIGNS = {"div": "/", "mul": "*", "sub": "-", "add": "+", "pow": "**", "true_divide": "/"}


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor that an operator was given."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float
    high: float
    """Range of its finite values; NaN if it has none."""
    zeros: int
    nonfinite: int
    origin: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def largest(self) -> float:
        """Largest finite magnitude."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        name = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        if math.isnan(self.low):
            return f"{name}, nothing finite" if self.nonfinite else f"{name}, empty"
        text = f"{name} in [{self.low:.4g}, {self.high:.4g}]"
        text += f", {self.zeros} exact zero(s)" if self.zeros else ""
        return text + (f", {self.nonfinite} non-finite" if self.nonfinite else "")


def tensors_of(event: Event) -> list[Tensor]:
    """Return the operator's tensor arguments, in the order of `Event.argument_origins`."""
    return [x for x in tree_leaves((event.args, event.kwargs)) if isinstance(x, Tensor)]


@torch.no_grad()
def operands_of(event: Event) -> list[Operand]:
    """Describe the operator's floating tensors; waits for the device."""
    found = []
    for tensor, origin in zip(tensors_of(event), event.argument_origins, strict=False):
        if readable(tensor) is not None or tensor.layout is not torch.strided:
            continue
        values = parts_of(values_of(tensor))
        finite = values[torch.isfinite(values)].double()
        empty = finite.numel() == 0
        found.append(
            Operand(
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                low=math.nan if empty else float(finite.min()),
                high=math.nan if empty else float(finite.max()),
                zeros=int((finite == 0).sum()),
                nonfinite=values.numel() - finite.numel(),
                origin=origin,
            )
        )
    return found


def _makes_nan(event: Event) -> bool:
    """True if NaN is what is new in the result: infinities may only have passed through."""
    return event.badness.nan and not any(edge.badness.nan for edge in event.edges)


@torch.no_grad()
def bad_index(event: Event) -> tuple[tuple[int, ...], Tensor] | None:
    """Return the position of the first element that the operator made bad, and the result it is in."""
    explained = [t for t in tensors_of(event) if readable(t) is None and t.layout is torch.strided]
    for result in event.results:
        bad = bad_mask(result)
        fresh = bad.clone()
        for tensor in explained if event.edges and torch.Tag.pointwise in event.function.tags else ():
            if event.badness.nan and not any(edge.badness.nan for edge in event.edges):
                fresh &= torch.isnan(result)
            else:
                try:
                    fresh &= ~bad_mask(tensor).expand(result.shape)
                except RuntimeError:
                    continue
        bad = fresh if bool(fresh.any()) else bad
        if _makes_nan(event):
            nans = torch.isnan(result)
            bad = nans if bool(nans.any()) else bad
        if bool(bad.any()):
            return first_index(result, bad, int(bad.flatten().to(torch.uint8).argmax())), result
    return None


def bad_rows(event: Event) -> list[int]:
    """Return the positions along the first dimension of the first bad result."""
    for result in event.results:
        if result.dim():
            bad = torch.isnan(result) if _makes_nan(event) else bad_mask(result)
            bad = bad if result.dim() == 1 else bad.flatten(1).any(1)
            rows: list[int] = bad.nonzero().flatten().tolist()
            return rows
    return []


@torch.no_grad()
def bad_alike(event: Event, other: Event) -> bool:
    """Return True if the same operator, at the same line, has made the same elements bad."""
    if event.op != other.op or event.call.line != other.call.line:
        return False
    mine, theirs = ([bad_mask(result) for result in one.results] for one in (event, other))
    alike = [one.shape == two.shape and torch.equal(one, two) for one, two in zip(mine, theirs, strict=False)]
    return bool(alike) and len(mine) == len(theirs) and all(alike)


def equation(event: Event) -> str:
    """Return what an elementwise operator computed at its first bad element; empty if it is none."""
    found = bad_index(event)
    if found is None or torch.Tag.pointwise not in event.function.tags:
        return ""
    index, result = found
    terms = []
    for argument in event.args:
        if isinstance(argument, Tensor):
            value = _at(argument, index, tuple(result.shape))
            if value is None:
                return ""
            terms.append(f"{value:.4g}")
        elif isinstance(argument, (int, float)) and not isinstance(argument, bool):
            terms.append(f"{argument:.4g}")
    name = event.function.overloadpacket.__name__.rstrip("_")
    made = result[index].item() if index else result.item()
    if name in _SIGNS and len(terms) >= 2:
        factor = event.kwargs.get("alpha", 1)
        second = terms[1] if factor == 1 else f"{factor:g} * {terms[1]}"
        return f"{terms[0]} {_SIGNS[name]} {second} = {_word(made)}"
    return f"{name}({', '.join(terms)}) = {_word(made)}"


def place(index: tuple[int, ...], shape: tuple[int, ...], batch_size: int | None) -> str:
    """Say in words where an element is: sample, position, channel, as far as the shape tells."""
    if not index:
        return "the only value"
    text = f"[{', '.join(map(str, index))}]"
    names = {1: ("sample",), 2: ("sample", "channel"), 3: ("sample", "position", "channel")}.get(len(index))
    if names is None or batch_size is None or shape[0] != batch_size:
        return text
    return f"{text} ({', '.join(f'{name} {i}' for name, i in zip(names, index, strict=True))})"


def places_of_statistics(func: Any, args: Sequence[Any]) -> list[int]:
    """Return which arguments batch norm writes to beside its results; its schema does not say so."""
    names = [argument.name for argument in func._schema.arguments]
    if "running_mean" not in names or "backward" in func.overloadpacket.__name__:
        return []
    given = dict(zip(names, args, strict=False))
    if not given.get("training", given.get("train", True)):
        return []
    places = [names.index(name) for name in ("running_mean", "running_var") if name in given]
    return [place for place in places if isinstance(args[place], Tensor)]


def running_statistics(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that batch norm writes to beside its results."""
    return [args[place] for place in places_of_statistics(func, args)]


def finite_again(event: Event, device: torch.device | None = None) -> bool | None:
    """Run the operator alone on the same inputs: is the result finite now? None if that failed.

    On another device if one is given: then it takes another implementation.
    """
    if not (event.args or event.kwargs) or event.function._schema.is_mutable:
        return None
    if running_statistics(event.function, event.args):
        return None  # what it writes to them is no result of it

    def moved(value: Any) -> Any:
        if device is None:
            return value
        if isinstance(value, torch.device):
            return device
        return value.to(device) if isinstance(value, Tensor) else value

    try:
        with torch.no_grad():
            args, kwargs = tree_map(moved, (event.args, event.kwargs))
            result = event.function(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return not any(judge(x) for x in tree_leaves(result) if isinstance(x, Tensor))


def _at(tensor: Tensor, index: tuple[int, ...], shape: tuple[int, ...]) -> complex | None:
    try:
        view = tensor.expand(shape)
    except RuntimeError:
        return None
    value: complex = view[index].item() if index else view.item()
    return value


def _word(value: complex) -> str:
    return "NaN" if value != value else f"{value:g}"  # noqa: PLR0124 - NaN differs from itself
