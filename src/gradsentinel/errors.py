"""What GradSentinel raises, and when."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from gradsentinel.incident import Incident


class GradSentinelError(Exception):
    """Base of everything GradSentinel raises on purpose."""


class ConfigurationError(GradSentinelError, ValueError):
    """A setting that cannot work; raised at construction or attach, never in the middle of a run."""


class TrainingAborted(GradSentinelError, RuntimeError):
    """The run stops because going on would do harm; incident and last good state, if any, are on disk.

    A script that it ends leaves with `exit_code`, after the usual traceback, so that whatever started it
    (torchrun, a scheduler) can tell: start it again, and `Sentinel(resume="auto")` goes on.
    """

    exit_code: ClassVar[int] = 75
    """EX_TEMPFAIL of sysexits.h: it may be tried again. The same for all subclasses, on every rank."""

    incident: Incident | None = None
    """What stopped it."""
    snapshot: str | None = None
    """Where the last good state was saved, for `Sentinel.restore`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _leave_with_its_code()


class RecoveryFailed(TrainingAborted):
    """A responder raised while it put the run back on its feet; the cause is chained."""


class StoreError(GradSentinelError, RuntimeError):
    """A run directory or one of its files cannot be used; the message says which and what to do."""


class SnapshotMismatch(GradSentinelError, RuntimeError):
    """A snapshot is malformed, or does not fit the model or optimizer it should be restored into."""


class ConsensusError(TrainingAborted):
    """The ranks could not agree because some did not answer; the message names them."""


_hooked: list[Callable[..., Any]] = []
"""What `sys.excepthook` was before ours, once that is there."""


def _leave_with_its_code() -> None:
    """Have the interpreter end with the exit code of a TrainingAborted that nobody catches.

    Done when the first one is made, and never before: other programs keep the hook they have.
    """
    if not _hooked:
        _hooked.append(sys.excepthook)
        sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _hooked[0](kind, error, trace)
    if isinstance(error, TrainingAborted) and not hasattr(sys, "ps1"):  # an interactive session goes on
        raise SystemExit(error.exit_code)
