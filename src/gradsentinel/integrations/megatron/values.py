"""Values that were written down, as the type of a field wants them."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

_PLAIN: Mapping[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
    Path: ("text", (str,)),
    type(None): ("", (type(None),)),
}
"""In words, and what is taken for it; that nothing is allowed goes without saying."""
_NO: Any = object()
"""What does not fit is taken as this."""


def fitted(value: Any, hint: Any) -> Any:
    """Return the value as a field of this type takes it; a list becomes a tuple.

    Raises:
        ValueError: if it does not fit, saying what would: "must be a whole number".
    """
    taken = _taken(value, hint)
    if taken is _NO:
        words = _words(hint)
        if not words:
            raise ValueError("cannot be written down; a script that calls attach itself can give it")
        raise ValueError(f"must be {words}")
    return taken


def _taken(value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        fitting = (_taken(value, one) for one in get_args(hint))
        return next((taken for taken in fitting if taken is not _NO), _NO)
    if origin is not None:
        return _COLLECTED.get(origin, _nothing)(value, get_args(hint))
    _, kinds = _PLAIN.get(hint, ("", ()))
    counts = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    return value if counts else _NO


def _nothing(value: Any, inner: tuple[Any, ...]) -> Any:
    """Of what is a function there is no value that can be written down."""
    del value, inner
    return _NO


def _table(value: Any, inner: tuple[Any, ...]) -> Any:
    if not isinstance(value, Mapping):
        return _NO
    keys, values = _all(value, [inner[0]] * len(value)), _all(value.values(), [inner[1]] * len(value))
    return _NO if _NO in (keys, values) else dict(zip(keys, values, strict=True))


def _sequence(value: Any, inner: tuple[Any, ...]) -> Any:
    if not isinstance(value, (list, tuple, set, frozenset)):
        return _NO
    return _all(value, [inner[0]] * len(value))


def _tuple(value: Any, inner: tuple[Any, ...]) -> Any:
    if inner[1:] == (...,):
        return _sequence(value, inner)
    if not isinstance(value, (list, tuple)) or len(value) != len(inner):
        return _NO
    return _all(value, inner)


def _all(values: Iterable[Any], hints: Sequence[Any]) -> Any:
    parts = tuple(_taken(value, hint) for value, hint in zip(values, hints, strict=True))
    return _NO if any(part is _NO for part in parts) else parts


_COLLECTED: Mapping[Any, Callable[[Any, tuple[Any, ...]], Any]] = {
    Mapping: _table,
    dict: _table,
    tuple: _tuple,
    **dict.fromkeys((Sequence, Collection, list, set, frozenset), _sequence),
}


def _words(hint: Any) -> str:
    """What fits, in words; of what cannot be written down none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(filter(None, map(_words, inner))))
    if origin is None or origin not in _COLLECTED:
        return _PLAIN.get(hint, ("", ()))[0]
    if origin is tuple and ... not in inner:
        return f"a list of {', '.join(map(_words, inner))}"
    what = "a table" if _COLLECTED[origin] is _table else "a list"
    parts = _words(inner[1] if what == "a table" else inner[0])
    return f"{what}, each entry {parts}" if parts else ""
