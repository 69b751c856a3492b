"""GradSentinel: an immune system for training runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradsentinel._version import __version__

if TYPE_CHECKING:
    from gradsentinel.callback import Callback, Detector, Responder, check_every
    from gradsentinel.callbacks import (
        BatchCallback,
        CrossRankCallback,
        DeviceHealthCallback,
        Escalation,
        EventLog,
        GradientStatistics,
        HeadroomCallback,
        LearningRateBackoff,
        LossScaleCallback,
        MagnitudeCallback,
        MetricsCallback,
        NanCallback,
        Notify,
        PrometheusCallback,
        Rescue,
        Resync,
        Retry,
        Rollback,
        SafeMode,
        SaturationCallback,
        Skip,
        SnapshotSaver,
        SpikeCallback,
        StagnationCallback,
        TensorBoardCallback,
        UpdateRatioCallback,
    )
    from gradsentinel.data.sampler import SkipBatches
    from gradsentinel.decision import Action, Kind, Severity
    from gradsentinel.errors import (
        ConfigurationError,
        ConsensusError,
        GradSentinelError,
        RecoveryFailed,
        SnapshotMismatch,
        StoreError,
        TrainingAborted,
    )
    from gradsentinel.events import (
        AfterBackward,
        AfterStep,
        Batch,
        BeforeClip,
        DiagnosisEvent,
        Event,
        IncidentEvent,
        RecoveryEvent,
        RunEnd,
        RunStart,
        StepStart,
    )
    from gradsentinel.evidence import Diagnosis, Evidence, Finding
    from gradsentinel.incident import Incident, Outcome, Recovery
    from gradsentinel.presets import standard
    from gradsentinel.risks.preflight import preflight
    from gradsentinel.sentinel import Sentinel
    from gradsentinel.state.archive import ArchiveError

_HOMES = {
    "ArchiveError": "gradsentinel.state.archive",
    "SnapshotMismatch": "gradsentinel.errors",
    "Callback": "gradsentinel.callback",
    "check_every": "gradsentinel.callback",
    "Detector": "gradsentinel.callback",
    "Responder": "gradsentinel.callback",
    "BatchCallback": "gradsentinel.callbacks",
    "CrossRankCallback": "gradsentinel.callbacks",
    "DeviceHealthCallback": "gradsentinel.callbacks",
    "Resync": "gradsentinel.callbacks",
    "ConsensusError": "gradsentinel.errors",
    "Escalation": "gradsentinel.callbacks",
    "EventLog": "gradsentinel.callbacks",
    "GradientStatistics": "gradsentinel.callbacks",
    "HeadroomCallback": "gradsentinel.callbacks",
    "MagnitudeCallback": "gradsentinel.callbacks",
    "MetricsCallback": "gradsentinel.callbacks",
    "NanCallback": "gradsentinel.callbacks",
    "Notify": "gradsentinel.callbacks",
    "PrometheusCallback": "gradsentinel.callbacks",
    "Rollback": "gradsentinel.callbacks",
    "SaturationCallback": "gradsentinel.callbacks",
    "LearningRateBackoff": "gradsentinel.callbacks",
    "Rescue": "gradsentinel.callbacks",
    "Retry": "gradsentinel.callbacks",
    "SafeMode": "gradsentinel.callbacks",
    "Skip": "gradsentinel.callbacks",
    "SkipBatches": "gradsentinel.data.sampler",
    "SnapshotSaver": "gradsentinel.callbacks",
    "SpikeCallback": "gradsentinel.callbacks",
    "StagnationCallback": "gradsentinel.callbacks",
    "UpdateRatioCallback": "gradsentinel.callbacks",
    "LossScaleCallback": "gradsentinel.callbacks",
    "TensorBoardCallback": "gradsentinel.callbacks",
    "Action": "gradsentinel.decision",
    "Kind": "gradsentinel.decision",
    "Severity": "gradsentinel.decision",
    "ConfigurationError": "gradsentinel.errors",
    "GradSentinelError": "gradsentinel.errors",
    "RecoveryFailed": "gradsentinel.errors",
    "StoreError": "gradsentinel.errors",
    "TrainingAborted": "gradsentinel.errors",
    "AfterBackward": "gradsentinel.events",
    "AfterStep": "gradsentinel.events",
    "Batch": "gradsentinel.events",
    "BeforeClip": "gradsentinel.events",
    "DiagnosisEvent": "gradsentinel.events",
    "Event": "gradsentinel.events",
    "IncidentEvent": "gradsentinel.events",
    "RecoveryEvent": "gradsentinel.events",
    "RunEnd": "gradsentinel.events",
    "RunStart": "gradsentinel.events",
    "StepStart": "gradsentinel.events",
    "Diagnosis": "gradsentinel.evidence",
    "Evidence": "gradsentinel.evidence",
    "Finding": "gradsentinel.evidence",
    "Incident": "gradsentinel.incident",
    "Outcome": "gradsentinel.incident",
    "Recovery": "gradsentinel.incident",
    "Sentinel": "gradsentinel.sentinel",
    "preflight": "gradsentinel.risks.preflight",
    "standard": "gradsentinel.presets",
}
"""Public names and the modules they live in; loaded on first use, so that the doctor can help where
`import torch` fails, and the command line answers at once."""

__all__ = [
    "Action",
    "AfterBackward",
    "AfterStep",
    "ArchiveError",
    "Batch",
    "BatchCallback",
    "BeforeClip",
    "Callback",
    "ConfigurationError",
    "ConsensusError",
    "CrossRankCallback",
    "Detector",
    "DeviceHealthCallback",
    "Diagnosis",
    "DiagnosisEvent",
    "Escalation",
    "Event",
    "EventLog",
    "Evidence",
    "Finding",
    "GradSentinelError",
    "GradientStatistics",
    "HeadroomCallback",
    "Incident",
    "IncidentEvent",
    "Kind",
    "LearningRateBackoff",
    "LossScaleCallback",
    "MagnitudeCallback",
    "MetricsCallback",
    "NanCallback",
    "Notify",
    "Outcome",
    "PrometheusCallback",
    "Recovery",
    "RecoveryEvent",
    "RecoveryFailed",
    "Rescue",
    "Responder",
    "Resync",
    "Retry",
    "Rollback",
    "RunEnd",
    "RunStart",
    "SafeMode",
    "SaturationCallback",
    "Sentinel",
    "Severity",
    "Skip",
    "SkipBatches",
    "SnapshotMismatch",
    "SnapshotSaver",
    "SpikeCallback",
    "StagnationCallback",
    "StepStart",
    "StoreError",
    "TensorBoardCallback",
    "TrainingAborted",
    "UpdateRatioCallback",
    "__version__",
    "check_every",
    "preflight",
    "standard",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gradsentinel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
