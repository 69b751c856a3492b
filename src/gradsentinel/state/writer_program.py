"""What the process beside the training runs: takes files from a pipe, writes, syncs and checks them.

It is run by its path and imports nothing but the standard library, so that it starts within milliseconds and
takes little memory. What it is told and what it answers is written down in `gradsentinel.state.writer`.
"""

import json
import os
import signal
import struct
import sys
import zlib
from contextlib import suppress

_CHUNK = 1 << 20


def take(buffer: memoryview) -> bool:
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


def put(descriptor: int, data: memoryview) -> None:
    """Write all of it: a system may take a part only, and say by the next call why."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_file(path: bytes, buffer: memoryview) -> dict[str, object] | None:
    """Write a new file from the pipe, synced to disk; None if the training has gone."""
    size = crc = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        while left := take_number():
            while left:
                chunk = buffer[: min(left, _CHUNK)]
                if not take(chunk):
                    return None
                put(descriptor, chunk)
                crc = zlib.crc32(chunk, crc)
                size += len(chunk)
                left -= len(chunk)
        if left is None:
            return None
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def checksum(path: bytes, buffer: memoryview) -> dict[str, object]:
    """Read a file back, from the disk where the system can forget what it keeps of it."""
    crc = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while count := os.readv(descriptor, [buffer]):
            crc = zlib.crc32(buffer[:count], crc)
    finally:
        os.close(descriptor)
    return {"crc32": f"{crc:08x}"}


def main() -> int:
    """Do what the pipe says until it ends or a zero comes; an answer with `errno` is the last one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the training decides, and closes the pipe
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # not lower: an aborted run waits for it, beside loaders that take every core
        os.nice(5)
    buffer = memoryview(bytearray(_CHUNK))
    while size := take_number():
        order = bytearray(size)
        if not take(memoryview(order)):
            return 1
        what, path = bytes(order[:1]), bytes(order[1:])
        try:
            answer = write_file(path, buffer) if what == b"w" else checksum(path, buffer)
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
