"""What the user's own code puts in the place of functions of torch and of modules, as its code shows."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gradsentinel.diagnosis.code_tree import codes
from gradsentinel.diagnosis.own_code import top_of
from gradsentinel.measures.inspection import answers

_ALIASES = frozenset({"setattr", "delattr"})
_ITEMS = frozenset({"STORE_SUBSCR"})
_ATTRIBUTES = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_CALLS = frozenset({"forward", "__call__", "_call_impl", "_forward_hooks", "_forward_pre_hooks"})
"""What of a module is another program as soon as it is another object."""


def replaces(
    code: types.CodeType, values: Mapping[str, Any], within: tuple[int, int] | None = None
) -> list[str]:
    """Return where a function assigns to a function of torch's, or to a module's place: 'loop.py:12'.

    Such a thing can be put back before anybody looks, and leaves no trace in the autograd graph.

    Args:
        code: of the function.
        values: what its names stand for, as far as known.
        within: the instructions of its own that count, by their offsets; None: all of them.
    """
    inner = [code] if code.co_name == "<module>" else codes(code)  # a script defines more than it calls
    lines = [line for part in inner for line in _lines(part, values, within if part is code else None)]
    return [f"{Path(code.co_filename).name}:{line}" for line in sorted(set(lines))]


def loop_around(frame: types.FrameType) -> tuple[int, int] | None:
    """Return where the outermost loop that a frame is in begins and ends; None if it is in none."""
    found = [
        (step.argval, step.offset)
        for step in dis.get_instructions(frame.f_code)
        if "JUMP" in step.opname and step.argval <= frame.f_lasti <= step.offset
    ]
    return (min(begin for begin, _ in found), max(end for _, end in found)) if found else None


def lines_of(code: types.CodeType, within: tuple[int, int]) -> tuple[int, int]:
    """Return the first and the last line of some instructions."""
    found = [line for offset, line in dis.findlinestarts(code) if line and within[0] <= offset <= within[1]]
    return (min(found), max(found)) if found else (0, 0)


def _lines(code: types.CodeType, values: Mapping[str, Any], within: tuple[int, int] | None) -> Iterator[int]:
    reader = _Reader(values)
    lines = {offset: line for offset, line in dis.findlinestarts(code) if line is not None}
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = lines.get(step.offset, line)
        if (within is None or within[0] <= step.offset <= within[1]) and reader.replaces(step):
            yield line


class _Reader:
    """Follows what the last name of a function stands for, instruction by instruction."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._held: Any = None
        self._setting = False
        """True from the name of `setattr` to its call."""

    def replaces(self, step: dis.Instruction) -> bool:
        """Return True if an instruction puts something in the place of a function or of a module."""
        name, held = step.opname, self._held
        if name in _ATTRIBUTES or name in _ITEMS:
            self._held = None
            is_call = isinstance(held, nn.Module) and (name in _ITEMS or step.argval in _CALLS)
            return is_call or (_is_torch(held) and callable(_attribute(held, str(step.argval))))
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._held = _attribute(held, str(step.argval))
        elif name.startswith("LOAD_") and name != "LOAD_CONST":
            last = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
            self._held = self._values.get(last) if isinstance(last, str) else None
            self._setting = self._setting or last in _ALIASES
        elif name.startswith("CALL"):
            self._setting = False
        if self._setting and _is_torch(self._held):
            self._setting = False
            return True
        return False


def _attribute(value: Any, name: str) -> Any:
    """Look it up where that runs nobody's code: in modules of Python, classes and modules of torch."""
    if not answers(value):
        return None
    if isinstance(value, types.ModuleType):
        return vars(value).get(name)
    if isinstance(value, type):
        return inspect.getattr_static(value, name, None)
    if isinstance(value, nn.Module):
        return value._modules.get(name)
    return None


def _is_torch(value: Any) -> bool:
    return answers(value) and isinstance(value, (types.ModuleType, type)) and top_of(value) == "torch"
