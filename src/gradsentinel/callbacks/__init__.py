"""The callbacks that come with GradSentinel, one per file."""

from gradsentinel.callbacks.cross_rank import CrossRankCallback
from gradsentinel.callbacks.event_log import EventLog
from gradsentinel.callbacks.magnitude import MagnitudeCallback
from gradsentinel.callbacks.nan import NanCallback
from gradsentinel.callbacks.resync import Resync
from gradsentinel.callbacks.rollback import Rollback
from gradsentinel.callbacks.skip import Skip
from gradsentinel.callbacks.snapshot_saver import SnapshotSaver
from gradsentinel.callbacks.tensorboard import TensorBoardCallback

__all__ = [
    "CrossRankCallback",
    "EventLog",
    "MagnitudeCallback",
    "NanCallback",
    "Resync",
    "Rollback",
    "Skip",
    "SnapshotSaver",
    "TensorBoardCallback",
]
