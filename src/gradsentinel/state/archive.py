"""Directories of safetensors and JSON that are whole or not there at all.

An archive is written under a temporary name beside its own (``.tmp-NAME-PID-TOKEN``), its manifest last,
synced to disk and renamed. Each file's size and CRC-32 stand in the manifest and are checked before anything
is used. Nothing is ever unpickled.
"""

import json
import os
import re
import secrets
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gradsentinel.errors import GradSentinelError
from gradsentinel.state.archive_files import (
    checksum,
    map_tensor_file,
    read_tensor_file,
    sync_directory,
    write_file,
    write_tensor_file,
)
from gradsentinel.state.processes import host_token, is_alive
from gradsentinel.state.tree import UnsupportedStateError, flatten, unflatten
from gradsentinel.state.writer import Writer

_FORMAT = 1  # of the manifest; the schema is that of the state in it
_MANIFEST = "manifest.json"
_SKELETON = "state.json"
_FILE_NAME = re.compile(r"state(-\d{5}-of-\d{5})?\.safetensors|state\.json")
_TEMPORARY = re.compile(r"\.tmp-.+-(?P<pid>\d+)-(?P<host>[0-9a-f]{8})[0-9a-f]{8}")
_DAY = 24 * 3600.0


class ArchiveError(GradSentinelError, RuntimeError):
    """An archive cannot be written or read; the message says why in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an archive says about itself."""

    kind: str
    """What it is for, such as ``snapshot``."""

    schema: int
    """Version of the layout of its state and meta."""

    meta: Any
    """What the writer noted beside the state."""

    files: Mapping[str, tuple[int, str]]
    """Size in bytes and CRC-32 of each file."""


def write_archive(
    path: str | os.PathLike[str],
    state: Any,
    meta: Any,
    *,
    kind: str,
    schema: int = 1,
    max_file_bytes: int = 2 * 2**30,
    verify: bool = False,
    writer: Writer | None = None,
) -> Path:
    """Write a state as a new archive, whole or not at all, and return its path.

    Parent directories are made. Tensors go to the CPU one at a time, so the state is not held twice.

    Args:
        path: the archive's directory, which must not exist: nothing is ever replaced.
        state: whatever `gradsentinel.state.tree.flatten` takes.
        meta: facts to be read without loading the state; of the same types, but no tensors or arrays.
        kind: what it is for; readers ask for a kind.
        schema: version of the layout of state and meta.
        max_file_bytes: a file of tensors gets no larger than this, unless a single tensor is.
        verify: read everything back and compare the checksums before the archive gets its name.
        writer: a process that writes and reads back; None for this thread.

    Raises:
        ArchiveError: it exists, or cannot be written (disk full, read-only, forbidden), or is not read back
            as it was written; no half is left.
        UnsupportedStateError: the state or meta holds something that cannot be stored.
        WriterGone: the writer has ended; no half is left.
    """
    path = Path(path)
    tensors, skeleton = flatten(state, copy_views=False)
    meta_tensors, encoded_meta = flatten(meta, "meta")
    if meta_tensors:
        raise UnsupportedStateError("meta: tensors and arrays belong into the state")
    body = {"format": _FORMAT, "kind": kind, "schema": schema, "meta": encoded_meta}
    temporary = temporary_beside(path)
    others = () if writer is None else (writer.write_file,)
    read_back = partial(checksum, from_disk=True) if writer is None else writer.checksum
    try:
        if os.path.lexists(path):
            raise ArchiveError(f"cannot write the archive {path}: it exists already")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        files = {}
        for name, part in _parts(tensors, max_file_bytes):
            files[name] = write_tensor_file(temporary / name, part, *others)
        files[_SKELETON] = write_file(temporary / _SKELETON, [json.dumps(skeleton).encode()])
        body["files"] = files
        text = json.dumps({**body, "crc32": _crc_of(body)}, indent=1, allow_nan=False)
        write_file(temporary / _MANIFEST, [text.encode()])
        sync_directory(temporary)
        if verify:
            for name, facts in files.items():
                if read_back(temporary / name) != facts["crc32"]:
                    raise ArchiveError(f"cannot write the archive {path}: {name} is not read back as written")
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise ArchiveError(f"cannot write the archive {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def read_archive(
    path: str | os.PathLike[str],
    *,
    kind: str,
    device: torch.device | str = "cpu",
    schema: int = 1,
    lazily: bool = False,
) -> tuple[Any, Any]:
    """Verify an archive and return its state, the tensors on ``device``, and its meta.

    Args:
        path: the archive's directory.
        kind: the kind it must be of.
        device: where its tensors go.
        schema: the newest schema that the caller understands.
        lazily: the tensors are the files, read when they are used; `check_archive` verifies them.

    Raises:
        ArchiveError: it is missing, foreign, of another kind, too new, truncated, or damaged.
    """
    path = Path(path)
    manifest = read_manifest(path, kind=kind, schema=schema)
    try:
        for name in sorted({entry.name for entry in path.iterdir()} - {_MANIFEST, *manifest.files}):
            if not name.startswith("."):  # network file systems and desktops leave such files
                raise ArchiveError(f"the archive {path} holds a file that is not part of it: {name}")
        tensors: dict[str, Tensor] = {}
        for name, (_, crc32) in manifest.files.items():
            if not lazily or name == _SKELETON:
                _check_sum(path / name, crc32)
            if name != _SKELETON and lazily:
                tensors.update(map_tensor_file(path / name))
            elif name != _SKELETON:
                tensors.update(read_tensor_file(path / name, device))
        skeleton = json.loads((path / _SKELETON).read_bytes())
        return unflatten(tensors, skeleton), manifest.meta
    except OSError as error:
        raise ArchiveError(f"cannot read the archive {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, RecursionError, SafetensorError, struct.error) as error:
        raise ArchiveError(f"the archive {path} is damaged: {error}") from error


def check_archive(path: str | os.PathLike[str], *, kind: str) -> None:
    """Read all files of an archive and compare their checksums; raises ArchiveError."""
    path = Path(path)
    for name, (_, crc32) in read_manifest(path, kind=kind).files.items():
        try:
            _check_sum(path / name, crc32)
        except OSError as error:
            raise ArchiveError(f"cannot read the archive {path}: {error.strerror or error}") from error


def read_manifest(
    path: str | os.PathLike[str], *, kind: str | None = None, schema: int | None = 1
) -> Manifest:
    """Read what an archive says about itself, and check that all its files are there in full length.

    Args:
        path: the archive's directory.
        kind: the kind it must be of; None for any.
        schema: the newest schema that the caller understands; None for any.

    Raises:
        ArchiveError: it is missing, foreign, of another kind, too new, truncated, or its manifest is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise ArchiveError(
            f"{path} is not an archive but a file" if path.exists() else f"no archive at {path}"
        )
    try:
        if not stat.S_ISREG((path / _MANIFEST).lstat().st_mode):
            raise ArchiveError(f"the archive {path} is damaged: its {_MANIFEST} is no regular file")
        body = json.loads((path / _MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ArchiveError(f"{path} is not an archive of GradSentinel: it has no {_MANIFEST}") from None
    except OSError as error:
        raise ArchiveError(f"cannot read the archive {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ArchiveError(
            f"the archive {path} is damaged: its {_MANIFEST} is truncated or no JSON"
        ) from error
    manifest = _parse(path, body)
    if schema is not None and manifest.schema > schema:
        raise ArchiveError(_too_new(path, manifest.schema, schema))
    if kind is not None and manifest.kind != kind:
        raise ArchiveError(f"the archive {path} is a {manifest.kind!r}, not a {kind!r}")
    for name, (size, _) in manifest.files.items():
        _check_size(path / name, size)
    return manifest


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether there is an archive with all its files in full length; the checksums are left to the reader."""
    try:
        read_manifest(path, schema=None)
    except ArchiveError:
        return False
    return True


def list_archives(directory: str | os.PathLike[str], kind: str) -> list[Path]:
    """Return the complete archives of a kind in a directory, the last by name first; none if it is missing.

    Temporary, foreign and incomplete directories are left out.
    """
    found = []
    for entry in sorted(_entries(directory), reverse=True):
        with suppress(ArchiveError):
            if not entry.name.startswith("."):
                read_manifest(entry, kind=kind, schema=None)
                found.append(entry)
    return found


def remove_archive(path: str | os.PathLike[str]) -> None:
    """Remove an archive, so that no half of it is left under its name; what cannot be removed stays."""
    path = Path(path)
    doomed = temporary_beside(path)
    with suppress(OSError):
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_stale(directory: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed writers left in a directory, and return the paths.

    A temporary directory goes when the process that made it has gone, if it ran on this host; when nothing in
    it changed for a day, wherever that was. Archives and other files are never touched.
    """
    removed = []
    for entry in _entries(directory):
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or entry.is_symlink() or not entry.is_dir():
            continue
        is_gone = match["host"] == host_token() and not is_alive(int(match["pid"]))
        if is_gone or _age(entry) > _DAY:
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry)
    return removed


def temporary_beside(path: Path) -> Path:
    """Return a name to write under until a path is whole; `remove_stale` knows what a killed process left."""
    return path.with_name(f".tmp-{path.name}-{os.getpid()}-{host_token()}{secrets.token_hex(4)}")


def _parts(tensors: Mapping[str, Tensor], limit: int) -> list[tuple[str, dict[str, Tensor]]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return [("state.safetensors", parts[0])]
    return [(f"state-{i:05}-of-{len(parts):05}.safetensors", part) for i, part in enumerate(parts, 1)]


def _parse(path: Path, body: Any) -> Manifest:
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        raise ArchiveError(f"{path} is not an archive of GradSentinel: its {_MANIFEST} is another program's")
    if body["format"] > _FORMAT:
        raise ArchiveError(_too_new(path, body["format"], _FORMAT))
    damaged = f"the archive {path} is damaged: its {_MANIFEST}"
    try:
        if body.pop("crc32", None) != _crc_of(body):
            raise ArchiveError(f"{damaged} does not match its checksum")
        files = {name: (int(facts["bytes"]), str(facts["crc32"])) for name, facts in body["files"].items()}
        kind, schema, meta = str(body["kind"]), int(body["schema"]), unflatten({}, body["meta"])
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ArchiveError(f"{damaged} is not as it was written: {error!r}") from error
    for name in (*files, _SKELETON):
        if name not in files or not _FILE_NAME.fullmatch(name):
            raise ArchiveError(f"{damaged} names a file that cannot be in an archive, or no {_SKELETON}")
    return Manifest(kind=kind, schema=schema, meta=meta, files=files)


def _crc_of(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _too_new(path: Path, found: int, known: int) -> str:
    return f"{path} was written by a newer GradSentinel (schema {found}, this one reads {known}): upgrade"


def _check_sum(path: Path, crc32: str) -> None:
    if checksum(path) != crc32:
        raise ArchiveError(f"the archive {path.parent} is damaged: {path.name} does not match its checksum")


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise ArchiveError(f"the archive {path.parent} is incomplete: it lacks {path.name}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ArchiveError(f"the archive {path.parent} is damaged: {path.name} is no regular file")
    if found.st_size < size:
        raise ArchiveError(
            f"the archive {path.parent} is truncated: {path.name} has {found.st_size} of {size} bytes"
        )
    if found.st_size > size:
        raise ArchiveError(f"the archive {path.parent} is damaged: {path.name} is longer than it was")


def _entries(directory: str | os.PathLike[str]) -> list[Path]:
    try:
        return list(Path(directory).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ArchiveError(f"cannot list {directory}: {error.strerror or error}") from error


def _age(path: Path) -> float:
    try:
        return time.time() - max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:  # it is being removed or renamed
        return 0.0
