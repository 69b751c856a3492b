"""Which warnings are news and which go on: one incident for what is the same, none lost of what is not."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradsentinel.decision import Kind
from gradsentinel.incident import Incident, Said, fold

QUIET_STEPS = 100
"""A warning that comes back within so many steps is the same one going on."""
_AT_ONCE = 8
"""So many warnings of one subject, each about other names, are told as they come; then they wait for each
other until they have become as many names as were told before, or until the quiet steps are over."""

_Key = tuple[str, Kind, str]


@dataclass(slots=True)
class _Subject:
    """What was told of one subject lately."""

    last: int
    """The attempted step of its last warning, told or not."""
    written: int
    """That of the last one that was told."""
    told_in: Incident
    times: int = 0
    """So many were told since it was quiet last."""
    names: dict[str, int] = field(default_factory=dict)
    """What was told, and when it was heard of last."""
    waiting: dict[str, None] = field(default_factory=dict)
    """What was not told yet."""
    held: Incident | None = None
    """The newest warning about what waits."""

    def is_fresh(self, name: str, now: int) -> bool:
        """Return True unless it was told, and heard of within the quiet steps."""
        before = self.names.get(name)
        return before is None or now - before > QUIET_STEPS


class Repeats:
    """Folds warnings by what they are about; the same on every rank, as incidents are."""

    def __init__(self) -> None:
        self._subjects: dict[_Key, _Subject] = {}
        self.any_wait = False
        """True if some were not told yet: asked in each step."""

    def goes_on(self, incident: Incident) -> Incident | None:
        """Return the incident that a warning goes on with; None if it is news, which counts as told then."""
        now = incident.iteration
        news, before = False, None
        for claim in _claims(incident):
            subject = self._subjects.get(_key(claim))
            if subject is None or now - subject.last > QUIET_STEPS:
                news = True
                continue
            before = before or subject.told_in
            subject.last = now
            names = claim.names or ("",)
            fresh = [name for name in names if subject.is_fresh(name, now)]
            if not claim.once:  # what asks until it is told would otherwise put itself off
                subject.names.update(dict.fromkeys(set(names).difference(fresh), now))
            if fresh:
                subject.waiting.update(dict.fromkeys(fresh))
                subject.held = incident
                news = news or self._is_due(subject, now)
        if news or before is None:
            self.tell(incident)
            return None
        self.any_wait = any(subject.waiting for subject in self._subjects.values())
        return before

    def _is_due(self, subject: _Subject, now: int) -> bool:
        late = now - subject.written > QUIET_STEPS
        return late or subject.times < _AT_ONCE or len(subject.waiting) >= len(subject.names)

    def tell(self, incident: Incident) -> None:
        """Note that all of an incident is told, with all that waited of the same subjects."""
        now = incident.iteration
        for claim in _claims(incident):
            key, names = _key(claim), claim.names or ("",)
            subject = self._subjects.get(key)
            waited: list[str] = []
            if subject is not None:
                waited = [name for name in subject.waiting if name not in names]
            if subject is None or (now - subject.last > QUIET_STEPS and not waited):
                subject = self._subjects[key] = _Subject(now, now, incident)
            elif waited:
                incident.notes += (f"since the last warning also: {fold(waited)}",)
            subject.names.update(dict.fromkeys((*waited, *names), now))
            subject.waiting.clear()
            subject.held = None
            subject.last = subject.written = now
            subject.told_in, subject.times = incident, subject.times + 1
        self.any_wait = any(subject.waiting for subject in self._subjects.values())

    def overdue(self, iteration: int, *, all_of_them: bool = False) -> list[Incident]:
        """Return the warnings whose quiet steps are over; with `all_of_them`, whatever waits."""
        if not self.any_wait:
            return []
        due = [
            subject.held
            for subject in self._subjects.values()
            if subject.held is not None and (all_of_them or iteration - subject.written > QUIET_STEPS)
        ]
        return list({id(incident): incident for incident in due}.values())


def _claims(incident: Incident) -> tuple[Said, ...]:
    if incident.claims:
        return incident.claims
    return (Said(incident.detector, incident.kind, str(incident.details.get("subject", ""))),)


def _key(claim: Said) -> _Key:
    return claim.detector, claim.kind, claim.subject
