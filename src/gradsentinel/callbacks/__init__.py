"""The callbacks that come with GradSentinel, one per file."""

from gradsentinel.callbacks.event_log import EventLog
from gradsentinel.callbacks.magnitude import MagnitudeCallback
from gradsentinel.callbacks.nan import NanCallback
from gradsentinel.callbacks.rollback import Rollback
from gradsentinel.callbacks.skip import Skip
from gradsentinel.callbacks.snapshot_saver import SnapshotSaver
from gradsentinel.callbacks.tensorboard import TensorBoardCallback

__all__ = [
    "EventLog",
    "MagnitudeCallback",
    "NanCallback",
    "Rollback",
    "Skip",
    "SnapshotSaver",
    "TensorBoardCallback",
]
