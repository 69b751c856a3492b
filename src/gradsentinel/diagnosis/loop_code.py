"""What the training loop's own code does beside the step that `forward=` repeats."""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from gradsentinel.diagnosis.code_tree import called_without_graph, codes
from gradsentinel.diagnosis.own_code import (
    assigned_in_turns,
    is_own,
    is_own_code,
    writes_beside_autograd,
)
from gradsentinel.diagnosis.surroundings import Methods, names_outside
from gradsentinel.measures.inspection import answers

_MOST_FRAMES = 8
_UNNAMED = frozenset({"__call__", "__enter__", "__exit__"})
"""Methods that no code names where it calls them."""
_FRAME_AND_US = 3
"""References to a frame's dictionary: the frame's, ours, and that of the one who counts."""


class LoopCode:
    """The functions of the user's that are running now, and those that they call by name.

    What `forward=` runs, too, is left out: a replay repeats it. Make it where the loop's functions are on the
    stack: in the call that the loop has made.

    Args:
        known: the functions that a forward pass may run.
    """

    def __init__(self, known: Iterable[types.FunctionType]) -> None:
        self._known = ours = {function.__code__ for function in known}
        frames = [frame for frame in _loop_frames() if frame.f_code not in ours]
        self._running = [(frame.f_code, _values_of(frame)) for frame in frames]
        reached: list[types.FunctionType] = []
        for frame, (code, values) in zip(frames, self._running, strict=True):
            names, known_by = _loaded(code), {**frame.f_globals, **values}
            named = [known_by[name] for name in names & known_by.keys()]
            methods = Methods({type(value) for value in named if is_own(type(value))})
            start = [
                value
                for value in named
                if answers(value) and isinstance(value, types.FunctionType) and is_own(value)
            ]
            start += methods.called(names | _UNNAMED)
            for _ in names_outside(start, methods, reached):
                pass
        running = {code for code, _ in self._running}
        self._functions = [
            function
            for function in dict.fromkeys(reached)
            if function.__code__ not in ours | running
            and is_own_code(function.__code__, function.__module__ or "")
        ]

    def hidden_writes(self) -> list[str]:
        """Return where it writes to tensors in a way that leaves no trace in the autograd graph."""
        known, places, without = self._known, list[str](), set[str]()
        for code, values in self._running:
            places += writes_beside_autograd(code, values, known)
            without |= called_without_graph(code, partial(_is_activation, values))
        for function in self._functions:
            code, graph = function.__code__, function.__name__ not in without
            places += writes_beside_autograd(code, _outer_values(function), known, graph=graph)
        return list(dict.fromkeys(places))

    def assigned(self) -> set[str]:
        """Return the names of globals, of closures and of attributes that it changes from step to step."""
        known, found = self._known, set[str]()
        for code, _ in self._running:
            found |= assigned_in_turns(code, every=False, known=known)
        for function in self._functions:
            found |= assigned_in_turns(function.__code__, every=True, known=known)
        return found


def _loop_frames() -> list[types.FrameType]:
    """Return the frames of the user's that are running, the innermost first."""
    found: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _MOST_FRAMES:
        if is_own_code(frame.f_code, str(frame.f_globals.get("__name__", ""))):
            found.append(frame)
        elif found and "-packages" in frame.f_code.co_filename:
            break  # what runs the program: a launcher, a test runner
        frame = frame.f_back
    return found


def _values_of(frame: types.FrameType) -> dict[str, Any]:
    """Return a frame's local variables, and leave no copy of them behind.

    Before Python 3.13 a frame keeps the dictionary that it has handed out, and with it the activations of
    the step, for as long as the loop runs. Where somebody else holds it, it is theirs.
    """
    held = frame.f_locals
    values = {name: value for name, value in held.items() if answers(value)}
    own = frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(held) is dict
    if own and sys.getrefcount(held) <= _FRAME_AND_US:
        held.clear()
    return values


def _is_activation(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    return isinstance(value, Tensor) and value.grad_fn is not None


def _loaded(code: types.CodeType) -> set[str]:
    """The names that a running function reads; a script defines more than it calls."""
    inner = [code] if code.co_name == "<module>" else list(codes(code))
    return {
        name
        for part in inner
        for instruction in dis.get_instructions(part)
        if instruction.opname.startswith("LOAD_")
        for name in (instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
        if isinstance(name, str)
    }


def _outer_values(function: types.FunctionType) -> Mapping[str, Any]:
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # a closure that is not filled yet
        return {}
    values = {**found.globals, **found.nonlocals}
    # What a function finds outside, and without a graph, is no activation: a matrix of hits, say.
    return {
        n: None if isinstance(v, Tensor) and v.grad_fn is None else v for n, v in values.items() if answers(v)
    }
