"""What the process beside the training runs: takes files from a pipe, writes, syncs and checks them.

It is run by its path and imports nothing but the standard library, so that it starts within milliseconds and
takes little memory. What it is told and what it answers is written down in `gradsentinel.state.writer`; its
arguments are the training's process id and the descriptors of the memory that it shares with it, each with
its size.

What it writes goes past the system's cache where the file system can do that (Linux: O_DIRECT). The cache
would be a second copy, made with the memory bandwidth that the training needs, of what is not read again
before a restart; and what is read back comes from the disk.
"""

import errno
import fcntl
import json
import mmap
import os
import signal
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress

_CHUNK = 1 << 20
_LOOK = 5.0
"""Seconds."""
_SHARED = 1 << 63
_DIRECT = getattr(os, "O_DIRECT", 0)

Buffer = memoryview


def take(buffer: Buffer) -> bool:
    """Fill a buffer from the pipe; False if the training has gone before that."""
    while buffer:
        count = os.readv(0, [buffer])
        if not count:
            return False
        buffer = buffer[count:]
    return True


def take_number() -> int | None:
    """Return the next number of eight bytes, None at the end."""
    number = bytearray(8)
    return struct.unpack("<Q", number)[0] if take(memoryview(number)) else None


def past_the_cache(descriptor: int, wanted: bool) -> None:  # noqa: FBT001 - an internal switch
    """Have reads and writes go past the system's cache, or not; nothing changes where that is not known."""
    if _DIRECT:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        with suppress(OSError):  # a file system that cannot
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)


def put(descriptor: int, data: Buffer) -> None:
    """Write all of it: a system may take a part only, and say by the next call why."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:  # of a size or place that cannot go past the cache
            if error.errno != errno.EINVAL or not is_past_the_cache(descriptor):
                raise
            past_the_cache(descriptor, False)


def is_past_the_cache(descriptor: int) -> bool:
    """Whether reads and writes go past the system's cache."""
    return bool(_DIRECT) and bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def chunks(buffer: Buffer, shared: list[Buffer]) -> Iterator[Buffer | None]:
    """Yield the bytes of a file in the buffer, full but for the last time; None if the training has gone."""
    filled = 0
    while left := take_number():
        source = None
        if left & _SHARED:
            left &= ~_SHARED
            number, start = take_number(), take_number()
            if number is None or start is None:
                yield None
                return
            source = shared[number][start : start + left]
        while left:
            room = buffer[filled : min(filled + left, _CHUNK)]
            if source is not None:
                room[:], source = source[: len(room)], source[len(room) :]
            elif not take(room):
                yield None
                return
            filled += len(room)
            left -= len(room)
            if filled == _CHUNK:
                yield buffer
                filled = 0
    yield None if left is None else buffer[:filled]


def write_file(path: bytes, buffer: Buffer, shared: list[Buffer]) -> dict[str, object] | None:
    """Write a new file from the pipe, synced to disk; None if the training has gone."""
    size = crc = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        past_the_cache(descriptor, True)
        for chunk in chunks(buffer, shared):
            if chunk is None:
                return None
            if len(chunk) < _CHUNK:  # the end, which fills no block
                past_the_cache(descriptor, False)
            put(descriptor, chunk)
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def checksum(path: bytes, buffer: Buffer) -> dict[str, object]:
    """Read a file back, from the disk where the system can forget what it keeps of it."""
    crc = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        past_the_cache(descriptor, True)
        while count := read(descriptor, buffer):
            crc = zlib.crc32(buffer[:count], crc)
    finally:
        os.close(descriptor)
    return {"crc32": f"{crc:08x}"}


def read(descriptor: int, buffer: Buffer) -> int:
    """Read into the buffer, and return how much; 0 at the end."""
    try:
        return os.readv(descriptor, [buffer])
    except OSError as error:  # from a place that cannot be read past the cache
        if error.errno != errno.EINVAL or not is_past_the_cache(descriptor):
            raise
        past_the_cache(descriptor, False)
        return os.readv(descriptor, [buffer])


def give_way() -> None:
    """Have the training go first: it is never interrupted because this process has something to do."""
    with suppress(OSError):  # not lower: an aborted run waits for it, beside loaders that take every core
        os.nice(5)
    with suppress(OSError, AttributeError):  # Linux only
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def end_with(training: int) -> None:
    """Look every few seconds whether the training is there: workers that it forked may hold the pipe open."""

    def look(*_: object) -> None:
        if os.getppid() != training:
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)


def main() -> int:
    """Do what the pipe says until it ends or a zero comes; an answer with `errno` is the last one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the training decides, and closes the pipe
        signal.signal(number, signal.SIG_IGN)
    give_way()
    end_with(int(sys.argv[1]))
    places = [map(int, argument.split(":")) for argument in sys.argv[2:]]
    shared = [memoryview(mmap.mmap(place, size, prot=mmap.PROT_READ)) for place, size in places]
    buffer = memoryview(mmap.mmap(-1, _CHUNK))  # at the beginning of a page
    while size := take_number():
        order = bytearray(size)
        if not take(memoryview(order)):
            return 1
        what, path = bytes(order[:1]), bytes(order[1:])
        try:
            answer = write_file(path, buffer, shared) if what == b"w" else checksum(path, buffer)
        except OSError as error:
            answer = {"errno": error.errno, "why": error.strerror}
        if answer is None:
            return 1
        put(1, memoryview(json.dumps(answer).encode() + b"\n"))
        if "errno" in answer:
            return 1
    return 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the training has gone, and nobody is there to hear of it
        sys.exit(main())
