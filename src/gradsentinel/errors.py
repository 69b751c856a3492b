"""What GradSentinel raises, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsentinel.incident import Incident


class GradSentinelError(Exception):
    """Base of everything GradSentinel raises on purpose."""


class ConfigurationError(GradSentinelError, ValueError):
    """A setting that cannot work; raised at construction or attach, never in the middle of a run."""


class TrainingAborted(GradSentinelError, RuntimeError):
    """The run stops because going on would do harm; incident and last good state, if any, are on disk."""

    incident: Incident | None = None
    """What stopped it."""
    snapshot: str | None = None
    """Where the last good state was saved, for `Sentinel.restore`."""


class RecoveryFailed(TrainingAborted):
    """A responder raised while it put the run back on its feet; the cause is chained."""


class StoreError(GradSentinelError, RuntimeError):
    """A run directory or one of its files cannot be used; the message says which and what to do."""


class ConsensusError(TrainingAborted):
    """The ranks could not agree because some did not answer; the message names them."""
