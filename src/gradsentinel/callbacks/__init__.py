"""The callbacks that come with GradSentinel, one per file."""

from gradsentinel.callbacks.batch import BatchCallback
from gradsentinel.callbacks.cross_rank import CrossRankCallback
from gradsentinel.callbacks.device_health import DeviceHealthCallback
from gradsentinel.callbacks.escalation import Escalation
from gradsentinel.callbacks.event_log import EventLog
from gradsentinel.callbacks.headroom import HeadroomCallback
from gradsentinel.callbacks.loss_scale import LossScaleCallback
from gradsentinel.callbacks.lr_backoff import LearningRateBackoff
from gradsentinel.callbacks.magnitude import MagnitudeCallback
from gradsentinel.callbacks.metrics import MetricsCallback
from gradsentinel.callbacks.nan import NanCallback
from gradsentinel.callbacks.notify import Notify
from gradsentinel.callbacks.prometheus import PrometheusCallback
from gradsentinel.callbacks.rescue import Rescue
from gradsentinel.callbacks.resync import Resync
from gradsentinel.callbacks.retry import Retry
from gradsentinel.callbacks.rollback import Rollback
from gradsentinel.callbacks.safe_mode import SafeMode
from gradsentinel.callbacks.saturation import SaturationCallback
from gradsentinel.callbacks.skip import Skip
from gradsentinel.callbacks.snapshot_saver import SnapshotSaver
from gradsentinel.callbacks.spike import SpikeCallback
from gradsentinel.callbacks.stagnation import StagnationCallback
from gradsentinel.callbacks.statistics import GradientStatistics
from gradsentinel.callbacks.tensorboard import TensorBoardCallback
from gradsentinel.callbacks.update_ratio import UpdateRatioCallback

__all__ = [
    "BatchCallback",
    "CrossRankCallback",
    "DeviceHealthCallback",
    "Escalation",
    "EventLog",
    "GradientStatistics",
    "HeadroomCallback",
    "LearningRateBackoff",
    "LossScaleCallback",
    "MagnitudeCallback",
    "MetricsCallback",
    "NanCallback",
    "Notify",
    "PrometheusCallback",
    "Rescue",
    "Resync",
    "Retry",
    "Rollback",
    "SafeMode",
    "SaturationCallback",
    "Skip",
    "SnapshotSaver",
    "SpikeCallback",
    "StagnationCallback",
    "TensorBoardCallback",
    "UpdateRatioCallback",
]
