"""The random generators that a program made itself, as far as they can be found."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch

from gradsentinel.measures.inspection import answers
from gradsentinel.run import Run

_MOST_FUNCTIONS = 32


class OwnGenerator:
    """A generator of torch, NumPy or Python's `random`, and the state it had when it was found."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._state = _state_of(generator)

    def put_back(self) -> bool:
        """Put the state back, and return True if it had become another one."""
        now = _state_of(self._generator)
        if isinstance(now, torch.Tensor):
            same = torch.equal(now, self._state)
        else:
            same = repr(now) == repr(self._state)
        if not same:
            _set_state(self._generator, self._state)
        return not same


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def own_generators(run: Run) -> list[OwnGenerator]:
    """Return the generators among what modules hold as attributes and what `forward=` refers to by name.

    That goes for the functions of the same file that it calls, too.
    """
    found = {id(value): value for value in _held(run) if answers(value) and _is_generator(value)}
    return [OwnGenerator(generator) for generator in found.values()]


def _held(run: Run) -> Iterator[Any]:
    for _, root in run.host.modules():
        for module in root.modules():
            yield from vars(module).values()
    forward: Any = getattr(run.forward, "func", run.forward)  # of a partial
    yield from getattr(forward, "__dict__", {}).values()
    seen: set[int] = set()
    functions = [forward]
    while functions and len(seen) < _MOST_FUNCTIONS:
        function = functions.pop(0)
        seen.add(id(function))
        for value in _named_in(function):
            yield value
            of_a_function = answers(value) and isinstance(value, FunctionType)
            if of_a_function and value.__module__ == function.__module__:
                functions += [value] * (id(value) not in seen)


def _named_in(function: Any) -> list[Any]:
    """Return what a function has from outside; nothing if it is no Python function."""
    found: list[Any] = []
    with suppress(TypeError, ValueError):
        names = inspect.getclosurevars(function)
        found += [*names.nonlocals.values(), *names.globals.values()]
    found += getattr(function, "__defaults__", None) or ()
    found += (getattr(function, "__kwdefaults__", None) or {}).values()
    return found


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)  # that has no state
    of_numpy = type(value).__module__.startswith("numpy.")
    return isinstance(value, torch.Generator) or (
        of_numpy and (hasattr(type(value), "bit_generator") or type(value).__name__ == "RandomState")
    )
