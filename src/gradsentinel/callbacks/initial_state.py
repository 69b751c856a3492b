"""A state that is not finite before the first step: what is said of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence


def certain(evidence: Evidence) -> Finding:
    """Return the finding of what is known already."""
    return Finding(
        kind=evidence.kind, value=torch.tensor(True), action=evidence.action, confirm=lambda: evidence
    )


def initial(what: str, tensors: Sequence[TensorEvidence], kind: Kind, action: Action) -> Evidence:
    """Return the evidence of what was not finite before anything was computed."""
    first = tensors[0]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return Evidence(
        kind=kind,
        action=action,
        message=f"before the first step, {what} {first.name!r} holds {first.nonfinite} non-finite of "
        f"{first.numel} values{more}",
        tensors=tuple(tensors),
        diagnosis=Diagnosis(
            cause="setup",
            confidence=0.95,
            phase="setup",
            module=first.name.rpartition(".")[0],
            evidence=(f"{first.name} was not finite before anything was computed",),
            remedy=(f"initialise {first.name!r}, or load a checkpoint that holds it",),
        ),
    )
