"""Reading files that lie under one directory, whatever a name or a link says."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gradsentinel.wording import printable

LARGEST_JSON = 64 << 20
"""Bytes of a JSON file; a larger one was not written by us."""


class ViewError(Exception):
    """What was asked for is not there, or may not be looked at; the message is one sentence."""


class Files:
    """The files under one directory. A path that leads out of it, through `..` or a link, is refused.

    Args:
        root: the directory; all names are relative to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real = os.path.realpath(root)

    def path(self, *names: str) -> Path:
        """Return where a file or directory is; raises ViewError if that is not under the directory."""
        wanted = os.path.join(self._real, *names)  # noqa: PTH118 - an absolute name must win, and be refused
        try:
            real = os.path.realpath(wanted)
        except ValueError:  # a null character
            real = ""
        if real != self._real and not real.startswith(self._real.rstrip(os.sep) + os.sep):
            raise ViewError(f"{printable('/'.join(names))} is not in the directory that is looked at")
        return Path(real)

    def entries(self, *names: str) -> list[str]:
        """Return the names in a directory, sorted; none if there is no such directory."""
        try:
            return sorted(os.listdir(self.path(*names)))  # noqa: PTH208 - names, of which there may be many
        except (OSError, ViewError):
            return []

    def is_directory(self, *names: str) -> bool:
        """Return True if there is such a directory, here and not behind a link that leads out."""
        try:
            return self.path(*names).is_dir()
        except (OSError, ViewError):
            return False

    def stat(self, *names: str) -> os.stat_result | None:
        """Return what the system knows of a regular file; None if there is none."""
        try:
            found = self.path(*names).stat()
        except (OSError, ViewError):
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def open(self, *names: str) -> BinaryIO:
        """Open a regular file; raises OSError or ViewError."""
        path = self.path(*names)
        if self.stat(*names) is None:  # a pipe would never end
            raise FileNotFoundError(f"{path} is no file")
        return path.open("rb")

    def json(self, *names: str) -> Any:
        """Return what a JSON file holds.

        Raises:
            ViewError: if it is not there, too large, damaged, or leads out of the directory.
        """
        shown = printable("/".join(names))
        try:
            with self.open(*names) as file:
                text = file.read(LARGEST_JSON + 1)
        except FileNotFoundError:
            raise ViewError(f"{shown} does not exist") from None
        except OSError as error:
            raise ViewError(f"{shown} cannot be read: {error.strerror or error}") from error
        if len(text) > LARGEST_JSON:
            raise ViewError(f"{shown} is larger than {LARGEST_JSON >> 20} MiB")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ViewError(f"{shown} is truncated or not JSON") from None

    def sizes(self, *names: str, most: int) -> Iterator[tuple[str, int]]:
        """Yield the names and sizes of the files under a directory, at most so many, links left out."""
        found = 0
        base = self.path(*names)
        for folder, folders, files in os.walk(base):
            folders.sort()
            for name in sorted(files):
                path = Path(folder, name)
                if name.startswith(".") or path.is_symlink():
                    continue
                try:
                    size = path.stat().st_size
                except OSError:
                    continue
                yield path.relative_to(base).as_posix(), size
                found += 1
                if found >= most:
                    return
