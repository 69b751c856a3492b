"""GradSentinel: an immune system for training runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradsentinel._version import __version__

if TYPE_CHECKING:
    from gradsentinel.archive import ArchiveError
    from gradsentinel.callback import Callback, Detector, Responder
    from gradsentinel.callbacks import (
        CrossRankCallback,
        EventLog,
        MagnitudeCallback,
        NanCallback,
        Resync,
        Rollback,
        Skip,
        SnapshotSaver,
        TensorBoardCallback,
    )
    from gradsentinel.decision import Action, Kind, Severity
    from gradsentinel.errors import (
        ConfigurationError,
        ConsensusError,
        GradSentinelError,
        RecoveryFailed,
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
    from gradsentinel.sentinel import Sentinel
    from gradsentinel.snapshot import SnapshotMismatch

_HOMES = {
    "ArchiveError": "gradsentinel.archive",
    "SnapshotMismatch": "gradsentinel.snapshot",
    "Callback": "gradsentinel.callback",
    "Detector": "gradsentinel.callback",
    "Responder": "gradsentinel.callback",
    "CrossRankCallback": "gradsentinel.callbacks",
    "Resync": "gradsentinel.callbacks",
    "ConsensusError": "gradsentinel.errors",
    "EventLog": "gradsentinel.callbacks",
    "MagnitudeCallback": "gradsentinel.callbacks",
    "NanCallback": "gradsentinel.callbacks",
    "Rollback": "gradsentinel.callbacks",
    "Skip": "gradsentinel.callbacks",
    "SnapshotSaver": "gradsentinel.callbacks",
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
}
"""Public names and the modules they live in; loaded on first use, so that the doctor can help where
`import torch` fails, and the command line answers at once."""

__all__ = [
    "Action",
    "AfterBackward",
    "AfterStep",
    "ArchiveError",
    "Batch",
    "BeforeClip",
    "Callback",
    "ConfigurationError",
    "ConsensusError",
    "CrossRankCallback",
    "Detector",
    "Diagnosis",
    "DiagnosisEvent",
    "Event",
    "EventLog",
    "Evidence",
    "Finding",
    "GradSentinelError",
    "Incident",
    "IncidentEvent",
    "Kind",
    "MagnitudeCallback",
    "NanCallback",
    "Outcome",
    "Recovery",
    "RecoveryEvent",
    "RecoveryFailed",
    "Responder",
    "Resync",
    "Rollback",
    "RunEnd",
    "RunStart",
    "Sentinel",
    "Severity",
    "Skip",
    "SnapshotMismatch",
    "SnapshotSaver",
    "StepStart",
    "StoreError",
    "TensorBoardCallback",
    "TrainingAborted",
    "__version__",
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
