"""GradSentinel's callbacks as Lightning callbacks, under the same names.

    from gradsentinel.integrations.lightning import NanCallback, Rollback
    Trainer(callbacks=[NanCallback(), Rollback()])

They are real callbacks of `lightning.pytorch` (and of `pytorch_lightning`), take the same arguments as ours,
and those of one Trainer share one run. `RunSettings` says where that is written; `adapt` makes a Lightning
callback of one of your own. For Fabric see `gradsentinel.integrations.lightning.fabric`.
"""

from gradsentinel import callbacks
from gradsentinel.integrations.lightning.base import SentinelCallback, adapt, native
from gradsentinel.integrations.settings import RunSettings as _RunSettings

BatchCallback = native(callbacks.BatchCallback)
CrossRankCallback = native(callbacks.CrossRankCallback)
DeviceHealthCallback = native(callbacks.DeviceHealthCallback)
Escalation = native(callbacks.Escalation)
EventLog = native(callbacks.EventLog)
GradientStatistics = native(callbacks.GradientStatistics)
HeadroomCallback = native(callbacks.HeadroomCallback)
LearningRateBackoff = native(callbacks.LearningRateBackoff)
LossScaleCallback = native(callbacks.LossScaleCallback)
MagnitudeCallback = native(callbacks.MagnitudeCallback)
MetricsCallback = native(callbacks.MetricsCallback)
NanCallback = native(callbacks.NanCallback)
Notify = native(callbacks.Notify)
PrometheusCallback = native(callbacks.PrometheusCallback)
Rescue = native(callbacks.Rescue)
Resync = native(callbacks.Resync)
Retry = native(callbacks.Retry)
Rollback = native(callbacks.Rollback)
SafeMode = native(callbacks.SafeMode)
SaturationCallback = native(callbacks.SaturationCallback)
Skip = native(callbacks.Skip)
SnapshotSaver = native(callbacks.SnapshotSaver)
SpikeCallback = native(callbacks.SpikeCallback)
StagnationCallback = native(callbacks.StagnationCallback)
TensorBoardCallback = native(callbacks.TensorBoardCallback)
UpdateRatioCallback = native(callbacks.UpdateRatioCallback)
RunSettings = native(_RunSettings)

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
    "RunSettings",
    "SafeMode",
    "SaturationCallback",
    "SentinelCallback",
    "Skip",
    "SnapshotSaver",
    "SpikeCallback",
    "StagnationCallback",
    "TensorBoardCallback",
    "UpdateRatioCallback",
    "adapt",
]
