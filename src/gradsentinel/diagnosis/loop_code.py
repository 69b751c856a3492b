"""What the training loop's own code does beside the step that `forward=` repeats."""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from gradsentinel.diagnosis.code_tree import called_without_graph, codes
from gradsentinel.diagnosis.handed import handed_beside_autograd
from gradsentinel.diagnosis.own_code import (
    assigned_in_turns,
    is_own,
    is_own_code,
    writes_beside_autograd,
)
from gradsentinel.diagnosis.replaced import lines_of, loop_around, replaces
from gradsentinel.diagnosis.surroundings import Methods, names_outside
from gradsentinel.diagnosis.weight_writes import weights_written
from gradsentinel.measures.inspection import answers

_MOST_FRAMES = 8
_UNNAMED = frozenset({"__call__", "__enter__", "__exit__"})
"""Methods that no code names where it calls them."""
_MOST_HELD = 64
"""So many functions of a container are read."""
_DEEPEST = 3
_OURS = __name__.partition(".")[0]
_STREAMS = frozenset({"Stream", "stream", "wait_stream", "set_stream", "record_stream"})
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
        frames = frames[: _outermost(frames) + 1]
        self._loops = [loop_around(frame) for frame in frames]
        self._running = [(frame.f_code, _values_of(frame)) for frame in frames]
        reached: list[types.FunctionType] = []
        stepping: list[types.FunctionType] = []
        for number, (frame, (code, values)) in enumerate(zip(frames, self._running, strict=True)):
            known_by = {**frame.f_globals, **values}
            _reach(_loaded(code), known_by, reached)
            _reach(_loaded(code, self._loops[number]), known_by, stepping)
        self._step = list(zip(self._running, self._loops, strict=True))
        self._functions = self._of_the_users(reached)
        self._stepping = self._of_the_users(stepping)
        """Those that a step runs: not what the loop's function calls before its loop begins."""

    def _of_the_users(self, reached: Iterable[types.FunctionType]) -> list[types.FunctionType]:
        known = self._known | {code for code, _ in self._running}
        return [
            function
            for function in dict.fromkeys(reached)
            if function.__code__ not in known and is_own_code(function.__code__, function.__module__ or "")
        ]

    def hidden_writes(self) -> list[str]:
        """Return where it writes to tensors in a way that leaves no trace in the autograd graph."""
        known, places, without = self._known, list[str](), set[str]()
        for code, values in self._running:
            places += writes_beside_autograd(code, values, known)
            without |= called_without_graph(code, partial(_is_activation, values))
        handed = handed_beside_autograd((code for code, _ in self._running), self._functions)
        for function in self._functions:
            code, graph = function.__code__, function.__name__ not in without
            outer, given = _outer_values(function), handed[code]
            places += writes_beside_autograd(code, outer, known, graph=graph, given=given)
        return list(dict.fromkeys(places))

    def weights_written(self, names: Collection[str]) -> list[str]:
        """Return where a step writes to weights of these names, beside the optimizer and autograd."""
        places = []
        for (code, _), loop in self._step:
            places += weights_written(code, names, None if loop is None else lines_of(code, loop))
        for function in self._stepping:
            places += weights_written(function.__code__, names)
        return list(dict.fromkeys(places))

    def replaced(self) -> list[str]:
        """Return where a step puts something in the place of a function of torch's, or of a module."""
        places = [place for (code, values), loop in self._step for place in replaces(code, values, loop)]
        for function in self._stepping:
            places += replaces(function.__code__, _globals_of(function))
        return list(dict.fromkeys(places))

    def streams(self) -> bool:
        """Return True if it has streams of the device: work may run on one before its input is there."""
        parts = [code for code, _ in self._running] + [function.__code__ for function in self._functions]
        return any(not _STREAMS.isdisjoint(part.co_names) for code in parts for part in codes(code))

    def assigned(self) -> set[str]:
        """Return the names of globals, of closures and of attributes that it changes from step to step."""
        known, found = self._known, set[str]()
        for code, _ in self._running:
            found |= assigned_in_turns(code, every=False, known=known)
        for (code, _), loop in self._step if any(self._loops) else ():
            if loop is None:  # the loop calls it, all of it, in each step
                found |= assigned_in_turns(code, every=True, known=known)
        for function in self._functions:
            found |= assigned_in_turns(function.__code__, every=True, known=known)
        return found


def _reach(names: set[str], known_by: Mapping[str, Any], reached: list[types.FunctionType]) -> None:
    """Add the user's functions that code with these names may run."""
    named = [known_by[name] for name in names & known_by.keys()]
    methods = Methods({type(value) for value in named if is_own(type(value))})
    start = [
        value for value in named if answers(value) and isinstance(value, types.FunctionType) and is_own(value)
    ]
    start += methods.called(names | _UNNAMED)
    start += _held_by(named, methods)
    outside = [value for _, value in names_outside(start, methods, reached)]
    for _ in names_outside(_held_by(outside, methods), methods, reached):
        pass


def _held_by(named: Iterable[Any], methods: Methods, depth: int = 0) -> list[Any]:
    """Return the user's functions in lists and dictionaries, and the methods of objects in there."""
    found: list[Any] = []
    for value in named:
        inside = list(value.values()) if isinstance(value, dict) else value
        for one in islice(inside, _MOST_HELD) if isinstance(inside, (list, tuple)) else ():
            if not answers(one):
                continue
            if isinstance(one, (dict, list, tuple)):
                found += _held_by([one], methods, depth + 1) if depth < _DEEPEST else []
            elif isinstance(one, types.FunctionType):
                found += [one] * is_own(one)
            elif is_own(type(one)):
                found += methods.of(type(one)) + methods.called(set(_UNNAMED))
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


def _outermost(frames: Sequence[types.FrameType]) -> int:
    """Return the number of the frame that no other one does anything beside within a step.

    That is the outermost one with a loop that uses something of ours, or else with any loop: what has called
    it waits until all its steps are done, a program that tries one training after the other, say.
    """
    loops = [
        (number, loop) for number, frame in enumerate(frames) if (loop := loop_around(frame)) is not None
    ]
    watched = [number for number, loop in loops if _uses_ours(frames[number], loop)]
    return max(watched or [number for number, _ in loops], default=len(frames))


def _uses_ours(frame: types.FrameType, loop: tuple[int, int]) -> bool:
    names = _loaded(frame.f_code, loop)
    known_by = {**frame.f_globals, **_values_of(frame)}
    named = [value for name in names & known_by.keys() if answers(value := known_by[name])]
    held = [
        value
        for one in named
        if is_own(type(one)) and isinstance(attributes := getattr(one, "__dict__", None), dict)
        for name, value in attributes.items()
        if name in names
    ]
    return any(type(value).__module__.partition(".")[0] == _OURS for value in (*named, *held))


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


def _loaded(code: types.CodeType, within: tuple[int, int] | None = None) -> set[str]:
    """The names that a running function reads, or its loop; a script defines more than it calls."""
    inner = [code] if code.co_name == "<module>" else list(codes(code))
    return {
        name
        for part in inner
        for instruction in dis.get_instructions(part)
        if within is None or part is not code or within[0] <= instruction.offset <= within[1]
        if instruction.opname.startswith("LOAD_")
        for name in (instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
        if isinstance(name, str)
    }


def _globals_of(function: types.FunctionType) -> Mapping[str, Any]:
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # a closure that is not filled yet
        return function.__globals__
    return {**function.__globals__, **found.nonlocals}


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
