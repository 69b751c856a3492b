"""The single files of an archive: written once, synced, summed up as they go, and checked when read."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gradsentinel.state.tree import NATIVE_DTYPES

Piece = bytes | memoryview | Tensor
"""Of a file; a tensor is in host memory and contiguous."""
Write = Callable[[Path, Iterable[Piece]], dict[str, Any]]

_CODES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL")
_CHUNK = 16 * 2**20  # between two of them this thread needs the interpreter, and the training may wait for it


def write_tensor_file(
    path: Path, tensors: Mapping[str, Tensor], write: Write | None = None
) -> dict[str, Any]:
    """Write a safetensors file, synced to disk, and return its ``bytes`` and ``crc32``.

    Unlike the writer of the safetensors package it needs no NumPy, takes views and shared memory, and sums up
    as it goes. `write` is who writes it, `write_file` if not said.

    Raises:
        KeyError: a tensor's dtype is not in `gradsentinel.state.tree.NATIVE_DTYPES`.
        FileExistsError: the file exists; other OSErrors as they come.
    """
    codes = dict(zip(NATIVE_DTYPES, _CODES, strict=True))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps all aligned
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        dtype, shape = codes[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)

    def pieces() -> Iterator[Piece]:
        yield struct.pack("<Q", len(head)) + head
        for name in names:
            tensor = tensors[name]
            if not tensor.is_cpu or not tensor.is_contiguous():
                tensor = tensor.detach().to("cpu").contiguous()
            yield tensor

    return (write or write_file)(path, pieces())


def octets(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory, without NumPy; the view keeps the tensor."""
    size = tensor.numel() * tensor.element_size()
    memory: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory)


def read_tensor_file(path: Path, device: torch.device | str) -> dict[str, Tensor]:
    """Read a safetensors file into memory of its own; raises SafetensorError if it is none."""
    with safe_open(path, framework="pt") as file:  # copies, since these tensors may be the mapped file itself
        return {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118


def map_tensor_file(path: Path) -> dict[str, Tensor]:
    """Return tensors that are the file itself: of each, what is used is read from the disk when it is used.

    Raises ValueError or RuntimeError if it is no safetensors file.
    """
    dtypes = dict(zip(_CODES, NATIVE_DTYPES, strict=True))
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, size)))
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
    header.pop("__metadata__", None)
    found = {}
    for name, facts in header.items():
        begin, end = facts["data_offsets"]
        found[name] = data[begin:end].view(dtypes[facts["dtype"]]).reshape(facts["shape"])
    return found


def write_file(path: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Write a new file, synced to disk, and return its ``bytes`` and ``crc32``; raises OSError."""
    size = crc = 0
    with path.open("xb") as file:
        for one in pieces:
            piece = octets(one) if isinstance(one, Tensor) else one
            for start in range(0, len(piece), _CHUNK):
                chunk = piece[start : start + _CHUNK]
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": f"{crc:08x}"}


def checksum(path: Path, *, from_disk: bool = False) -> str:
    """Return a file's CRC-32 as the manifest has it.

    `from_disk` asks the system to forget what it keeps of the file in memory first, so that what is
    read is what the disk gives; a system that cannot do that reads what it has.
    """
    crc = 0
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
    return f"{crc:08x}"


def sync_directory(path: Path) -> None:
    """Have a directory's entries on disk before the call returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)
