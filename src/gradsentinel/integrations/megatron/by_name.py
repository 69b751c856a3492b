"""Callbacks by their names, with the values that a command line or a file gives to their fields."""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_type_hints

from gradsentinel import callbacks
from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron.values import fitted

_CUTOFF = 0.5
"""How alike a word must be to be the one that was meant."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One callback that somebody has asked for."""

    name: str
    fields: Mapping[str, Any]
    place: str
    """Where that was said, for messages."""

    def make(self) -> Callback:
        """Make it.

        Raises:
            ConfigurationError: for a callback or field that there is not, or a value that it cannot have.
        """
        kind = _kind(self.name, self.place)
        hints = get_type_hints(kind)
        known = [field.name for field in dataclasses.fields(kind) if field.init]
        values = {}
        for name, value in self.fields.items():
            if name not in known:
                near = nearest(name, known)
                raise ConfigurationError(f"{self.place}: {self.name} has no field {name!r}{near}")
            try:
                values[name] = fitted(value, hints[name])
            except ValueError as error:
                raise ConfigurationError(f"{self.place}: {self.name}: {name}={value!r} {error}") from None
        try:
            made: Callback = kind(**values)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self.place}: {self.name}: {error}") from error
        return made


def nearest(word: str, known: Collection[str]) -> str:
    """Return which known word may have been meant, or else all of them, to go on a message with."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=_CUTOFF)
    near = near or [name for name in known if word.lower() in name.lower()]  # nan, for NanCallback
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known) or 'none'}"


def _kind(name: str, place: str) -> type[Any]:
    if name not in callbacks.__all__:
        near = nearest(name, callbacks.__all__)
        raise ConfigurationError(f"{place}: no callback is {name!r}{near}")
    kind: type[Any] = getattr(callbacks, name)
    return kind


def from_text(text: str, place: str) -> tuple[Wanted, ...]:
    """Return what a text such as 'NanCallback, Retry(attempts=1)' asks for; nothing in it is run.

    Raises:
        ConfigurationError: if it is no list of names with literal values.
    """
    try:
        tree = ast.parse(f"[{text}\n]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigurationError(f"{place} {text!r} is no list of callbacks: {said}") from None
    if not isinstance(tree, ast.List):
        raise ConfigurationError(f"{place} {text!r} is no list of callbacks")
    return tuple(_entry(entry, place) for entry in tree.elts)


def _entry(entry: ast.expr, place: str) -> Wanted:
    called = entry if isinstance(entry, ast.Call) else None
    name = entry if called is None else called.func
    if not isinstance(name, ast.Name):
        raise ConfigurationError(f"{place}: no callback is {ast.unparse(entry)!r}")
    values: dict[str, Any] = {}
    if called is not None:
        if called.args or any(keyword.arg is None for keyword in called.keywords):
            raise ConfigurationError(f"{place}: {ast.unparse(entry)} needs the names of its arguments")
        for keyword in called.keywords:
            field = str(keyword.arg)
            if field in values:
                raise ConfigurationError(f"{place}: {ast.unparse(entry)} says {field} twice")
            try:
                values[field] = ast.literal_eval(keyword.value)
            except (TypeError, ValueError, RecursionError, MemoryError) as error:
                raise ConfigurationError(f"{place}: {ast.unparse(entry)}: {error}") from None
    return Wanted(name=name.id, fields=values, place=place)


def from_table(table: Mapping[str, Any], place: str) -> tuple[Wanted, ...]:
    """Return what a table of callbacks asks for, in its order: fields by name, or several such tables.

    Raises:
        ConfigurationError: for an entry that is neither.
    """
    found = []
    for name, entry in table.items():
        here = f"{place}.{name}"
        several = isinstance(entry, Sequence) and not isinstance(entry, str)
        for fields in entry if several else [entry]:
            if not isinstance(fields, Mapping):
                raise ConfigurationError(
                    f"{here} is {fields!r} and must be a table of fields, which may be empty, or several"
                )
            found.append(Wanted(name=name, fields=fields, place=place))
    return tuple(found)


def make_callbacks(text: str, place: str = "--gs-callbacks") -> list[Callback]:
    """Return the callbacks that a text names; only names and literal arguments are read, nothing is run.

    Raises:
        ConfigurationError: for a callback or an argument that there is not.
    """
    return [wanted.make() for wanted in from_text(text, place)]
