"""A process beside the training that writes files: no lock of the interpreter, no priority to share.

A thread that writes needs the interpreter's lock between any two calls. If it has a low priority it may be
put aside while it holds the lock, and the training waits until the system lets it go on: on a machine whose
cores are all taken that was most of what a snapshot on disk cost. If it has none, it takes half a core. A
process may have a low priority without harm. What is left to the thread is to say where the memory is that
both see, and to hand over the rest, in a few calls that need no lock. It is kept from one state to the next:
to start one holds the interpreter's lock until the system has loaded the program, milliseconds where every
core is taken, and each new one has to find the shared memory again, page by page.

On the pipe: an order is a number of eight bytes and so many bytes, ``w`` or ``c`` (write, check) and a path;
after ``w`` follow pieces, likewise with their length, and a zero. A length with the highest bit set is that
of a piece in shared memory: two more numbers say in which segment it lies and where. Each order is answered
by a line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from gradsentinel.errors import GradSentinelError
from gradsentinel.state.archive_files import Piece, octets
from gradsentinel.state.shared import SharedMemory

logger = logging.getLogger("gradsentinel")

T = TypeVar("T")
fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, which has no writev either
    fcntl = None

_PROGRAM = Path(__file__).with_name("writer_program.py")
_AT_ONCE = 64 << 20
"""So much is handed over by one call: copies of what is not contiguous are held that long."""
_PARTS = 250
"""About so many pieces of memory one call may take, at the least, on every system."""
_COPIED = 1 << 16
"""Up to so many bytes are put together: to take each piece by itself costs more."""
_PIPE = 1 << 20
_SHARED = 1 << 63


_CHANCES = 4
"""So many processes may be lost."""
_FORGOTTEN = 50
"""After so many states in a row that a process has written, those that were lost before do not count."""


class WriterGone(GradSentinelError, RuntimeError):
    """There is no such process, or it has ended: the caller writes by itself."""


class NoWriter(WriterGone):
    """There can be no such process here, ever."""


class Reliance:
    """Says whether the next state is written by a process, or by the thread that would have started it.

    One that is lost (killed for its memory, say) is replaced, but not at once for ever: after the second time
    the next state is left to the thread, after the third the next three, after the fourth all of them.
    """

    def __init__(self) -> None:
        self._lost = 0
        self._left_out = 0
        self._in_a_row = 0

    def __bool__(self) -> bool:
        return self._lost < _CHANCES and not self._left_out

    def left_out(self) -> None:
        """Hear that a state was left to the thread."""
        self._left_out = max(0, self._left_out - 1)

    def kept(self) -> None:
        """Hear that a process has done its work."""
        self._in_a_row += 1
        if self._in_a_row >= _FORGOTTEN:
            self._lost = 0

    def lost(self, why: WriterGone) -> None:
        """Hear that a process was lost; logs the first of a series, and the last."""
        self._lost = _CHANCES if isinstance(why, NoWriter) else self._lost + 1
        self._in_a_row = 0
        if self._lost >= _CHANCES:
            logger.warning("snapshots are written by a thread from now on: %s", why)
            return
        self._left_out = 2 ** (self._lost - 1) - 1
        if self._lost == 1:
            logger.warning("a thread writes this snapshot, then another process is started: %s", why)


class Writer:
    """Writes files in a process of its own, one after the other; used as a context.

    It ends with the context, with this object or with this process, however that ends, and renames nothing:
    what it was writing when the training was killed keeps its temporary name.

    Args:
        memory: what it is to see of the training's memory; what lies elsewhere goes through the pipe.

    Raises:
        WriterGone: none can be started; NoWriter if that will not change.
    """

    def __init__(self, memory: SharedMemory | None = None) -> None:
        segments = () if memory is None else memory.segments
        self.memory, self._segments = memory, len(segments)
        restartable = sys.executable and not getattr(sys, "frozen", False) and _PROGRAM.is_file()
        if not restartable or not hasattr(os, "writev"):
            raise NoWriter("this program is not run by a Python that could be started again")
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [
                    *(sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid())),
                    *(f"{segment.descriptor}:{segment.size}" for segment in segments),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                pass_fds=[segment.descriptor for segment in segments],
            )
        except (OSError, RuntimeError, ValueError) as error:  # no memory, no process left, interpreter ending
            raise WriterGone(f"no process can be started: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: PT018 - both are asked for
        self._orders, self._answers = self._process.stdin, self._process.stdout
        self._forgotten = weakref.finalize(self, _end, os.getpid(), self._process)
        self._forgotten.atexit = False  # the end of the pipe is its end
        with suppress(OSError, AttributeError):  # fewer changes between the two; Linux only
            fcntl.fcntl(self._orders, fcntl.F_SETPIPE_SZ, _PIPE)

    @property
    def sees_all(self) -> bool:
        """False once the training has made memory that it does not see."""
        return self.memory is None or len(self.memory.segments) == self._segments

    def __enter__(self) -> Writer:  # noqa: PYI034 - Self is in Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=error is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End it: when it has done what it was told, or at once, as it may wait for the rest of a file."""
        self._forgotten.detach()
        # To close the pipe is not enough: a worker that the training has forked meanwhile holds it open.
        if not at_once:
            with suppress(OSError):  # it has ended already
                self._put([_number(0)])
        else:
            self._process.kill()
        self._orders.close()
        self._answers.close()
        self._process.wait()

    def write_file(self, path: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Write a new file, synced to disk, and return its ``bytes`` and ``crc32``.

        Raises:
            OSError: as the other process met it.
            WriterGone: it has ended.
        """
        with suppress(BrokenPipeError):  # then its answer says why
            self._order(b"w", path)
            for batch in _batches(map(self._told, pieces)):
                self._put(batch)
            self._put([_number(0)])
        return self._answer()

    def checksum(self, path: Path) -> str:
        """Return the CRC-32 of a file as it is read back from the disk; raises as `write_file`."""
        with suppress(BrokenPipeError):
            self._order(b"c", path)
        return str(self._answer()["crc32"])

    def _told(self, piece: Piece) -> list[bytes | memoryview]:
        """Return what goes through the pipe for a piece: it, or where the process finds it."""
        if isinstance(piece, Tensor):
            size = piece.nbytes
            if self.memory is not None and size:
                where = self.memory.find(piece.data_ptr(), size)
                if where is not None and where[0] < self._segments:  # not one that was made since
                    return [struct.pack("<QQQ", size | _SHARED, *where)]
            piece = octets(piece)
        return [_number(len(piece)), piece] if len(piece) else []

    def _order(self, what: bytes, path: Path) -> None:
        order = what + os.fsencode(path.absolute())
        self._put([_number(len(order)), order])

    def _put(self, pieces: list[bytes | memoryview]) -> None:
        """Hand memory over; the calls wait without the interpreter's lock, and may take a part only."""
        if sum(map(len, pieces)) < _COPIED:
            pieces = [b"".join(pieces)]
        waiting = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        while waiting:
            taken = os.writev(self._orders.fileno(), waiting)
            while waiting and taken >= len(waiting[0]):
                taken -= len(waiting.pop(0))
            if taken:
                waiting[0] = waiting[0][taken:]

    def _answer(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n") and (part := os.read(self._answers.fileno(), 4096)):
            line += part
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise WriterGone("the process that writes has ended") from None
        if "errno" in answer:
            raise OSError(answer["errno"], answer["why"])
        return answer


class KeptWriter:
    """Has work done with a writer that is kept from the first time on, and replaced where it was lost."""

    def __init__(self) -> None:
        self._reliance = Reliance()
        self._writer: Writer | None = None
        self._owner = os.getpid()

    def do(self, work: Callable[[Writer | None], T], memory: SharedMemory | None) -> T:
        """Return what the work returns; it gets None where this thread is to write, and may be done twice.

        Args:
            work: what is to be done; it raises WriterGone if the writer has ended.
            memory: what the writer is to see.
        """
        if not self._reliance:
            self._reliance.left_out()
            return work(None)
        try:
            done = work(self._ready(memory))
        except WriterGone as gone:
            self.close(at_once=True)
            self._reliance.lost(gone)
            return work(None)
        except BaseException:
            self.close(at_once=True)
            raise
        self._reliance.kept()
        return done

    def close(self, *, at_once: bool = False) -> None:
        """End the process, if there is one; not while work is done."""
        writer, self._writer = self._writer, None
        if writer is not None and self._owner == os.getpid():
            writer.close(at_once=at_once)

    def _ready(self, memory: SharedMemory | None) -> Writer:
        if self._owner != os.getpid():  # a forked child: that one is its parent's
            self._writer, self._owner = None, os.getpid()
        if self._writer is not None and not (self._writer.sees_all and self._writer.memory is memory):
            self.close()
        if self._writer is None:
            self._writer = Writer(memory)
        return self._writer


def _end(owner: int, process: subprocess.Popen[bytes]) -> None:
    """End a process that nobody can give orders any more; not that of a parent."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if owner == os.getpid():
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # not this one's to wait for


def _batches(told: Iterable[list[bytes | memoryview]]) -> Iterable[list[bytes | memoryview]]:
    batch: list[bytes | memoryview] = []
    size = 0
    for parts in told:
        batch += parts
        size += sum(map(len, parts))
        if size >= _AT_ONCE or len(batch) >= _PARTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _number(value: int) -> bytes:
    return struct.pack("<Q", value)
