"""What GradSentinel raises, and when."""

from __future__ import annotations


class GradSentinelError(Exception):
    """Base of everything GradSentinel raises on purpose."""


class ConfigurationError(GradSentinelError, ValueError):
    """A setting that cannot work; raised at construction or attach, never in the middle of a run."""


class TrainingAborted(GradSentinelError, RuntimeError):
    """The run stops because going on would do harm; the incident and the last good state are on disk."""


class RecoveryFailed(TrainingAborted):
    """A responder raised while it put the run back on its feet; the cause is chained."""


class StoreError(GradSentinelError, RuntimeError):
    """A run directory or one of its files cannot be used; the message says which and what to do."""
