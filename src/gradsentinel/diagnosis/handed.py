"""Which parameters of the loop's own functions get tensors that autograd does not see: `mend(out.data)`."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable, Iterator, Sequence

from gradsentinel.diagnosis.code_tree import alternatives, node_of
from gradsentinel.diagnosis.own_code import aliases_of, root_of, takes_a_detour

_DEEPEST = 3
"""A function that hands on what it was given, and that one once more."""


def handed_beside_autograd(
    running: Iterable[types.CodeType], functions: Sequence[types.FunctionType]
) -> dict[types.CodeType, set[str]]:
    """Return by function the names of its parameters that hold such a tensor in some call of it.

    What such a function writes to, it writes to without a trace, and its own source does not show it.

    Args:
        running: the functions that call them, as far as they are running now.
        functions: those that may be called; they may call each other.
    """
    found: dict[types.CodeType, set[str]] = {function.__code__: set() for function in functions}
    callers = list(dict.fromkeys((*running, *found)))
    for _ in range(_DEEPEST):
        before = sum(map(len, found.values()))
        for code in callers:
            node = node_of(code)
            if node is not None:
                _look_at(node, found.get(code, set()), functions, found)
        if sum(map(len, found.values())) == before:
            break
    return found


def _look_at(
    node: ast.AST,
    given: set[str],
    functions: Sequence[types.FunctionType],
    found: dict[types.CodeType, set[str]],
) -> None:
    unseen = aliases_of(node, given)
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        places = [(number, None) for number, one in enumerate(call.args) if _is_unseen(one, unseen)] + [
            (None, one.arg) for one in call.keywords if _is_unseen(one.value, unseen)
        ]
        for function in _called(call, functions) if places else ():
            found[function.__code__] |= set(_names(function, call, places))


def _is_unseen(expression: ast.expr, unseen: set[str]) -> bool:
    return any(takes_a_detour(part) or root_of(part) in unseen for part in alternatives(expression))


def _called(call: ast.Call, functions: Sequence[types.FunctionType]) -> Iterator[types.FunctionType]:
    """Yield what may be called: by its name, or, out of a container, any."""
    called = call.func
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", None)
    yield from (one for one in functions if name is None or one.__name__ in (name, "__call__"))


def _names(
    function: types.FunctionType, call: ast.Call, places: Iterable[tuple[int | None, str | None]]
) -> Iterator[str]:
    """Yield the parameters at these places of a call; all of them where the places do not tell."""
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    rest = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: count + rest]
    own = int(bool(names) and names[0] in ("self", "cls"))
    spread = any(isinstance(one, ast.Starred) for one in call.args)
    for number, keyword in places:
        place = None if number is None or spread else number + own
        if keyword in names:
            yield str(keyword)
        elif place is not None and place < code.co_argcount:
            yield names[place]
        else:
            yield from names[own:]
