"""Telling batches and their records apart: fingerprints of the content, and the user's own ids."""

from __future__ import annotations

import hashlib
from collections import UserList, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradsentinel.incident import jsonable
from gradsentinel.measures.inspection import local

ID_FIELDS = ("sample_id", "sample_ids", "id", "ids", "idx", "index", "indices")
"""Fields of a batch that are taken for the user's own ids of its records."""

_ENDS = 64
"""Bytes at either end of a tensor that a probe looks at."""
_DEEPEST = 32


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
    """What a batch holds, each part of it found out at most once, and only if it is asked for."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

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
    """The user's ids of the records, by position, if the batch carries some."""
    if not isinstance(batch, Mapping):
        return {}
    for field in ID_FIELDS:
        found = batch.get(field)
        if isinstance(found, Tensor) and found.dim() == 1:
            return dict(enumerate(found.tolist()))
        if isinstance(found, Sequence) and not isinstance(found, str):
            return dict(enumerate(found))
    return {}


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
        yield from _tensor(torch.as_tensor(value), ends)
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
