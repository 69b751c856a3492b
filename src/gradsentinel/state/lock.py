"""One run at a time in a run directory: each rank locks its part, and a dead process locks nothing."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import socket
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import now
from gradsentinel.state.processes import host_token, is_alive

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger("gradsentinel")

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_mine: weakref.WeakValueDictionary[tuple[int, str], RunLock] = weakref.WeakValueDictionary()
"""The locks of this process: the system would let it lock a file a second time."""


class RunLock:
    """This rank's claim on a run directory: `.lock-rank<N>`, held until `release` or the process ends.

    The lock is a POSIX record lock (lockf): the system takes it back when the process ends, however it
    does, workers that were forked do not hold on to it, and network file systems know it. The file says
    who holds it. Where there are no such locks, that alone decides: a process of this host that is gone
    holds nothing, one of another host does, unless it belonged to the same torchrun or Slurm job.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._descriptor = descriptor
        self._give_back = weakref.finalize(self, _give_back, descriptor, os.getpid())
        _mine[os.getpid(), os.path.realpath(path)] = self

    @classmethod
    def take(cls, directory: Path, rank: int) -> RunLock:
        """Claim a run directory, which is made if need be.

        Raises:
            ConfigurationError: if another run is using it, saying which.
            OSError: if the directory cannot be made or written to.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f".lock-rank{rank}"
        if _is_mine(path):
            raise ConfigurationError(
                f"{directory} is in use by another Sentinel of this process: close() that one first "
                "(a with statement does), or give another run_dir"
            )
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = _read(descriptor)
        try:
            is_held = _is_held(descriptor, holder)
        except OSError:
            os.close(descriptor)
            raise
        if is_held:
            os.close(descriptor)
            raise ConfigurationError(
                f"{directory} is in use by {_describe(holder)}: wait for it to end, end it, or give another "
                f"run_dir (should it be gone: delete {path})"
            )
        lock = cls(path, descriptor)
        lock._write({"schema": 1, "rank": rank, "time": now(), **_identity()})
        return lock

    def release(self) -> None:
        """Give the directory back; a second call does nothing, nor does one in a forked process."""
        self._give_back()

    @property
    def held(self) -> bool:
        """False once it was released."""
        return self._give_back.alive

    def _write(self, entry: Mapping[str, Any]) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, (json.dumps(entry) + "\n").encode(), 0)


def _give_back(descriptor: int, process: int) -> None:
    if process != os.getpid():  # a forked child has a copy of the descriptor, and not the lock
        return
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
    with suppress(OSError):
        os.close(descriptor)


def _is_mine(path: Path) -> bool:
    key = os.getpid(), os.path.realpath(path)
    if key in _mine and _mine[key].held:
        gc.collect()  # a run that nobody refers to any more is over, also without close()
    return key in _mine and _mine[key].held


def _is_held(descriptor: int, holder: Mapping[str, Any]) -> bool:
    """Lock the file if it can be locked; True if another process has."""
    if fcntl is None:
        return _seems_alive(holder)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return _seems_alive(holder)
        if error.errno in {errno.EACCES, errno.EAGAIN}:
            return True
        raise
    if holder.get("token") not in {None, host_token()} and not _is_same_job(holder):
        logger.warning(
            "the run directory was not given back by %s; should that still be running, end one of the two",
            _describe(holder),
        )
    return False


def _seems_alive(holder: Mapping[str, Any]) -> bool:
    pid = holder.get("pid")
    if not isinstance(pid, int):
        return False
    if holder.get("token") == host_token():
        return pid != os.getpid() and is_alive(pid)
    return not _is_same_job(holder)


def _is_same_job(holder: Mapping[str, Any]) -> bool:
    """True if the job that started the holder started this process too: it does so one after the other."""
    job = _job()
    return job is not None and holder.get("job") == job


def _job() -> str | None:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id and run_id != "none":
        return f"torchrun {run_id}"
    slurm = os.environ.get("SLURM_JOB_ID")
    return f"slurm {slurm}" if slurm else None


def _identity() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "token": host_token(), "job": _job()}


def _read(descriptor: int) -> dict[str, Any]:
    try:
        entry = json.loads(os.pread(descriptor, 1 << 16, 0))
    except (OSError, ValueError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _describe(holder: Mapping[str, Any]) -> str:
    if "pid" not in holder:
        return "another run"
    return f"process {holder['pid']} on {holder.get('host', 'another host')} since {holder.get('time', '?')}"
