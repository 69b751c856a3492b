"""Tensors inside nested structures: batches and the outputs of modules. Nothing is changed in place."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]


def dotted(path: Path) -> str:
    """Return a path as users write it: `images`, `0`, `encoder.hidden_states.2`."""
    return ".".join(str(key) for key in path)


def tensors(tree: Any) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in dicts, lists, tuples and dataclasses, each with its path, in order."""
    if isinstance(tree, Tensor):
        yield (), tree
        return
    for key, child in _children(tree):
        for path, tensor in tensors(child):
            yield (key, *path), tensor


def replaced(tree: Any, path: Path, new: Any) -> Any:
    """Return a copy of the structure with one place replaced; the rest is shared with the original."""
    if not path:
        return new
    key, *rest = path
    child = replaced(dict(_children(tree))[key], tuple(rest), new)
    if isinstance(tree, tuple):
        items = [child if i == _position(tree, key) else item for i, item in enumerate(tree)]
        return type(tree)._make(items) if hasattr(tree, "_make") else tuple(items)
    twin = copy.copy(tree)
    if isinstance(twin, (list, Mapping)):
        twin[key] = child  # type: ignore[index] # a mapping that cannot be written to says so itself
    else:
        object.__setattr__(twin, key, child)  # a frozen dataclass refuses the plain way
    return twin


def pick(
    tree: Any, wanted: str | None, fits: Callable[[Tensor], bool], *, what: str
) -> list[tuple[Path, Tensor]]:
    """Return the tensors at a dotted path, or all of them, that fit.

    Raises:
        LookupError: there is nothing at this path.
    """
    found = list(tensors(tree))
    if wanted is not None:
        names = [dotted(path) for path, _ in found]
        found = [
            (path, t) for path, t in found if dotted(path) == wanted or dotted(path).startswith(f"{wanted}.")
        ]
        if not found:
            near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or names[:3]
            raise LookupError(
                f"{what} has no tensor at {wanted!r}; the nearest: {', '.join(map(repr, near)) or 'none'}"
            )
    return [(path, tensor) for path, tensor in found if fits(tensor)]


def listing(tree: Any) -> str:
    """Return the tensors in a structure in one line, for an error message."""
    return (
        ", ".join(f"{dotted(path) or 'the tensor itself'} ({t.dtype})" for path, t in tensors(tree)) or "none"
    )


def _children(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from zip(tree._fields, tree, strict=True)
    elif isinstance(tree, (list, tuple)):
        yield from enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for f in dataclasses.fields(tree):
            yield f.name, getattr(tree, f.name, None)


def _position(tree: Any, key: Any) -> int:
    return key if isinstance(key, int) else tree._fields.index(key)
