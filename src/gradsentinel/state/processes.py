"""Telling processes apart, also those that are gone."""

from __future__ import annotations

import os
import socket
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def host_token() -> str:
    """Return 8 hexadecimal digits that tell hosts, boots and containers apart.

    Within one token a process id means one process; beyond it, it says nothing.
    """
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return f"{zlib.crc32('|'.join(facts).encode()):08x}"


def is_alive(pid: int) -> bool:
    """Return whether there is a process of this id, here; True if that cannot be found out."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no process id at all
        return True
    return True
