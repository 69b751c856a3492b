"""Telling batches and their records apart: fingerprints of the content, and the user's own ids."""

from __future__ import annotations

import hashlib
import os
from collections import UserList, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradsentinel.data.holdings import as_tensor
from gradsentinel.incident import jsonable
from gradsentinel.measures.inspection import local
from gradsentinel.state.tree import tensors_in

_MAYBE_IDS = ("idx", "index", "indices")
"""These may as well be the rows of an embedding: only if no two records have the same one."""
ID_FIELDS = (
    *("sample_id", "sample_ids", "record_id", "record_ids", "row_id", "row_ids", "example_id", "example_ids"),
    *("uid", "uids", "uuid", "uuids", "guid", "__key__", "id", "ids", *_MAYBE_IDS),
)
"""Fields of a batch that are taken for the user's own ids of its records, the first one that fits."""

_ENDS = 64
"""Bytes at either end of a tensor that a probe looks at."""
_DEEPEST = 32
_NESTED = 3
"""Levels below the batch at which ids are looked for."""
_HERE = frozenset({"cpu", "meta"})


def fingerprint(batch: Any) -> str:
    """Return a short text that two batches share only if they hold the same; "" if it cannot be told.

    In any process and on any device. Tensors and arrays count with dtype, shape and every bit; containers
    and objects with what they hold; strings and numbers as they are. Waits for the device. The first part,
    up to the dash, is `probe`.
    """
    first = probe(batch)
    return f"{first}-{_digest(batch, None)}" if first else ""


def probe(batch: Any) -> str:
    """Return the beginning of a batch's fingerprint, which looks only at a few bytes of each tensor."""
    return _digest(batch, _ENDS)[:8]


class Content:
    """What a batch holds, each part of it found out at most once, and only if it is asked for.

    Asking waits for the device if the batch lies on one: `waits` says so beforehand.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    @cached_property
    def waits(self) -> bool:
        """True if a tensor of the batch is on a device: its values are not here."""
        return any(one.device.type not in _HERE for one in _Reader(None).tensors(self._batch))

    @cached_property
    def _probe(self) -> str:
        return probe(self._batch)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._batch)

    @cached_property
    def _ids(self) -> tuple[Any, ...]:
        return tuple(map(jsonable, sample_ids(self._batch).values()))

    def has(self, known: str) -> bool:
        """Say whether it has this fingerprint; most that have not are told by the probe."""
        return bool(known) and known.partition("-")[0] == self._probe and known == self._fingerprint

    def has_ids(self, known: tuple[Any, ...]) -> bool:
        """Say whether its records have these ids, in their JSON form."""
        return bool(known) and known == self._ids


def sample_ids(batch: Any) -> dict[int, Any]:
    """The user's ids of the records, by position, if the batch carries some.

    They are looked for in mappings, dataclasses, named tuples and objects, also nested ones (`meta.id`), and
    in lists of such records; under one of `ID_FIELDS`, with one number or text for each record.
    """
    size = _size(batch)
    fields = dict(_fields(batch, 0))
    for name in ID_FIELDS:
        for found in (value for path, value in fields.items() if path[-1] == name):
            values = _listed(found)
            fits = values and (size is None or len(values) == size)
            if fits and not (name in _MAYBE_IDS and len(set(values)) < len(values)):
                return dict(enumerate(values))
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return _of_records(batch)
    return {}


def _fields(value: Any, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the named values of a batch by path, those on top first."""
    named = list(_named(value))
    yield from (((name,), inside) for name, inside in named)
    for name, inside in named if depth < _NESTED else ():
        yield from (((name, *path), deeper) for path, deeper in _fields(inside, depth + 1))


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((key, inside) for key, inside in value.items() if isinstance(key, str))
    elif hasattr(value, "_fields") and isinstance(value, tuple):
        yield from ((name, getattr(value, name)) for name in getattr(value, "_fields"))  # noqa: B009 - a named tuple
    elif not isinstance(value, (Tensor, str, bytes, list, tuple, type)) and not callable(value):
        yield from ((name, held) for name, held in _children(value) if isinstance(name, str))


def _listed(value: Any) -> list[Any]:
    """Return one number or text for each record; empty if it is no such list."""
    if isinstance(value, Tensor):
        whole = value.dim() == 1 and not value.is_floating_point() and value.device.type != "meta"
        return value.tolist() if whole else []
    if hasattr(value, "__array__"):
        listed = value.tolist() if getattr(value, "ndim", 0) == 1 else []
    else:
        listed = list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else []
    listed = [one.item() if isinstance(one, Tensor) and one.dim() == 0 else one for one in listed]
    return listed if all(isinstance(one, _SCALARS) or _is_uuid(one) for one in listed) else []


_SCALARS = (int, float, str, bytes, os.PathLike)


def _is_uuid(value: Any) -> bool:
    return type(value).__module__ == "uuid"


def _of_records(records: Sequence[Any]) -> dict[int, Any]:
    """Return the ids of records that each have one of their own."""
    found = {}
    for position, record in enumerate(records):
        fields = dict(_fields(record, 0))
        single = (fields[path] for name in ID_FIELDS for path in fields if path[-1] == name)
        value = next((one for one in single if isinstance(one, (int, str)) or _is_single(one)), None)
        if value is None:
            return {}
        found[position] = value.item() if isinstance(value, Tensor) else value
    return found


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point()


def _size(batch: Any) -> int | None:
    """Return how many records most tensors of the batch have."""
    sizes = [t.shape[0] for _, t in tensors_in(batch) if t.dim() > 0 and not t.is_nested]
    return max(sizes, key=sizes.count) if sizes and not isinstance(batch, list) else None


def _digest(batch: Any, ends: int | None) -> str:
    reader = _Reader(ends)
    digest = hashlib.blake2b(digest_size=16)
    for part in reader.parts(batch):
        digest.update(len(part).to_bytes(8, "little"))  # so that no two lists of parts read alike
        digest.update(part)
    return digest.hexdigest() if reader.found_any else ""


class _Reader:
    """Takes a batch apart, in an order that does not depend on the process."""

    def __init__(self, ends: int | None) -> None:
        self.found_any = False
        """True once there was a value that says something about the batch."""
        self._ends = ends
        self._inside: set[int] = set()

    def tensors(self, value: Any) -> Iterator[Tensor]:
        """Yield the tensors in the value, without a look at what they hold."""
        if isinstance(value, Tensor):
            yield value
        elif not (_is_plain(value) or id(value) in self._inside or len(self._inside) >= _DEEPEST):
            self._inside.add(id(value))
            for _, child in _children(value):
                yield from self.tensors(child)
            self._inside.discard(id(value))

    def parts(self, value: Any) -> Iterator[bytes]:
        """Yield what the value is made of."""
        if isinstance(value, Tensor):
            self.found_any = True
            yield from _tensor(value, self._ends)
        elif value is None or isinstance(value, (bool, int, float, complex, str)):
            self.found_any = self.found_any or value is not None
            yield f"{type(value).__name__} {value!r}".encode(errors="surrogatepass")
        elif isinstance(value, (bytes, bytearray)):
            self.found_any = True
            yield b"bytes"
            yield bytes(value)
        elif hasattr(value, "__array__"):  # NumPy's arrays and scalars
            self.found_any = True
            yield from _array(value, self._ends)
        elif id(value) in self._inside or len(self._inside) >= _DEEPEST:
            yield b"..."
        else:
            children = list(_children(value))
            yield f"{type(value).__qualname__} {len(children)}".encode()
            self._inside.add(id(value))
            for label, child in children:
                yield repr(label).encode(errors="surrogatepass")  # a name alone tells no two batches apart
                yield from self.parts(child)
            self._inside.discard(id(value))


def _is_plain(value: Any) -> bool:
    """True for what holds no tensor: numbers, texts, NumPy's arrays."""
    return (
        value is None
        or isinstance(value, (int, float, complex, str, bytes, bytearray))
        or (hasattr(value, "__array__"))
    )


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from ((key, value[key]) for key in sorted(value, key=repr))
    elif isinstance(value, (set, frozenset)):
        yield from enumerate(sorted(value, key=repr))
    elif isinstance(value, (list, tuple, deque, UserList)):
        yield from enumerate(value)
    elif not callable(value):  # what an object of the user's own holds
        held = getattr(value, "__dict__", None) or {
            name: getattr(value, name)
            for kind in type(value).__mro__
            for name in getattr(kind, "__slots__", ())
            if hasattr(value, name)
        }
        yield from ((name, held[name]) for name in sorted(held))


def _array(value: Any, ends: int | None) -> Iterator[bytes]:
    try:
        yield from _tensor(torch.as_tensor(as_tensor(value)), ends)
    except (TypeError, RuntimeError, ValueError):  # texts, dates, objects
        yield repr(getattr(value, "tolist", lambda: value)()).encode(errors="surrogatepass")


@torch.no_grad()
def _tensor(tensor: Tensor, ends: int | None) -> Iterator[bytes]:
    # A ragged tensor has a shape of symbols that differ from one to the next; its offsets say it as well.
    yield f"tensor {tensor.dtype} {'nested' if tensor.is_nested else tuple(tensor.shape)}".encode()
    if tensor.device.type == "meta" or tensor.is_quantized:
        return
    held = local(tensor.detach())
    for part in _memory(held):
        flat = part.resolve_conj().resolve_neg().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        count = None if ends is None else max(1, ends // max(1, flat.dtype.itemsize))
        pieces = [flat] if count is None else [flat[:count], flat[-count:]]
        for piece in pieces:
            octets = piece.contiguous().cpu().view(torch.uint8)  # on the host the bits lie in order
            yield _bytes(octets)


def _memory(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's values."""
    if tensor.is_nested:
        offsets = getattr(tensor, "offsets", None)
        return [tensor.values(), *([offsets()] if offsets is not None else [])]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _bytes(octets: Tensor) -> bytes:
    try:
        return octets.numpy().tobytes()
    except RuntimeError:  # NumPy is not installed
        return bytes(octets.tolist())
