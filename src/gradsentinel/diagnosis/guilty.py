"""The operator call that a diagnosis blames: traced in the replay, or rehearsed with the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.diagnosis.diagnose import findings_of
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.record import Event
from gradsentinel.diagnosis.rehearsal import rehearse
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident
from gradsentinel.run import Run

_TRIED = 8
"""Bad parameters whose update is run again, until one shows it."""


@dataclass(frozen=True, slots=True)
class Guilty:
    """The operator, with what it was given."""

    event: Event
    findings: Findings | None
    """What the replay showed; None for an optimizer's operator."""

    @property
    def custom(self) -> str | None:
        """The user's own operator in which it ran, if it did."""
        return None if self.findings is None else self.findings.custom


def guilty_of(incident: Incident, diagnosis: Diagnosis, run: Run) -> Guilty | None:
    """Return the operator to blame as far as this rank knows it; call it while the incident is handled."""
    findings = findings_of(incident, run)
    if findings is not None:
        return Guilty(findings.origin, findings)
    if diagnosis.phase != "optimizer" or diagnosis.op is None:
        return None
    for optimizer, parameter, group in _bad_members(incident, run):
        found = rehearse(optimizer, parameter, group, grad_norm=run.last_grad_norm)
        if found is not None and found.event.op == diagnosis.op:
            return Guilty(found.event, None)
    return None


def _bad_members(incident: Incident, run: Run) -> Iterator[tuple[Optimizer, Tensor, Mapping[str, Any]]]:
    bad = {name for entry in incident.tensors for name in (entry.name, entry.name.rpartition(":")[0])}
    names = {id(parameter): name for name, parameter in run.host.named_parameters()}
    tried = 0
    for optimizer in run.host.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if names.get(id(parameter)) in bad and tried < _TRIED:
                    tried += 1
                    yield optimizer, parameter, group
