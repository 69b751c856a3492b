"""The record of an incident: what, where, how bad, what was done about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from numbers import Integral
from typing import Any

from gradsentinel.decision import Action, Kind, Severity
from gradsentinel.errors import StoreError
from gradsentinel.evidence import Diagnosis, Sample, TensorEvidence
from gradsentinel.ranks.topology import Rank, fold_ranks

SCHEMA = 1
OF_THIS_STEP = "of_this_step"
"""In the details of an incident about the state: only the step in flight spoilt it, and can be undone."""
MAY_STAND = "may_stand"
"""In the details of an incident that asks for a retry: a step that comes out the same is made as it is."""
MOST_RANKS = 64
"""So many ranks of an incident are listed with their places; all of them are counted, and told in words."""


class Outcome(str, Enum):
    """What became of an incident."""

    RETRIED = "retried"
    RESCUED = "rescued"
    SKIPPED = "skipped"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"
    REPORTED = "reported"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a responder did."""

    outcome: Outcome
    apply: bool
    """True when gradients are ready now and the optimizer should step with them."""
    message: str
    step: int | None = None
    """The step the run goes on from, where it is not the next one."""
    overflow: bool = False
    """True when the loss scaler drops the step by itself, as it would have done without the fault."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one detector says in an incident: by this it is told from what was said before."""

    detector: str
    kind: Kind
    subject: str
    names: tuple[str, ...] = ()
    """What it is about; empty for the step as a whole."""
    once: bool = False
    """True if the detector asks until it is told, and not again."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """One decision above CONTINUE, with its evidence; completed while it is handled, then written."""

    id: str
    step: int
    kind: Kind
    action: Action
    """What was asked for; after recovery, the rung that was carried out."""
    message: str
    severity: Severity = Severity.WARNING
    outcome: Outcome = Outcome.REPORTED
    time: str = ""
    iteration: int = 0
    """Number of the attempted step; never goes back, so incidents sort by it."""
    detector: str = ""
    tensors: tuple[TensorEvidence, ...] = ()
    ranks: tuple[Rank, ...] = ()
    """Those concerned; of more than `MOST_RANKS` the first ones."""
    unlisted: int = 0
    """So many further ranks are concerned."""
    ranks_folded: str = ""
    """All ranks in words, where some are not listed; `who` says it in any case."""
    microbatch: int | None = None
    samples: tuple[Sample, ...] = ()
    diagnosis: Diagnosis | None = None
    recovery: str = ""
    """What was done, in one sentence."""
    loss: float | None = None
    grad_norm: float | None = None
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Of replicas that differ: the group in words, and the rank that holds what its majority holds. Not kept
    on disk."""
    claims: tuple[Said, ...] = field(default=(), repr=False, compare=False)
    """What each detector says in it, on whichever rank. Not kept on disk."""

    @property
    def rank_count(self) -> int:
        """The number of ranks concerned, listed or not."""
        return len(self.ranks) + self.unlisted

    @property
    def who(self) -> str:
        """The ranks in few words: 'rank 3', 'ranks 0-16383'."""
        return self.ranks_folded or fold_ranks(rank.rank for rank in self.ranks)

    def concern(self, ranks: Iterable[Rank]) -> None:
        """Say which ranks it is about, by rank."""
        ordered = sorted(ranks, key=lambda rank: rank.rank)
        self.ranks, self.unlisted = tuple(ordered[:MOST_RANKS]), max(0, len(ordered) - MOST_RANKS)
        self.ranks_folded = fold_ranks(rank.rank for rank in ordered) if self.unlisted else ""

    @property
    def can_be_undone(self) -> bool:
        """True if the state was good before the step in flight, which has not been made yet."""
        return bool(self.details.get(OF_THIS_STEP))

    @property
    def may_stand(self) -> bool:
        """True if the step is to be made as it is unless a second computation shows that it was a fault."""
        return bool(self.details.get(MAY_STAND)) and self.action is Action.RETRY

    @property
    def cured(self) -> bool:
        """True if the step was made after all, with gradients that are sound."""
        return self.outcome in (Outcome.RETRIED, Outcome.RESCUED)

    @property
    def where(self) -> str:
        """The place in a few words: the sample if the data is bad, else the module or the tensors."""
        known = self.diagnosis
        by_data = known is None or known.cause == "data"  # of any other cause samples only bring it out
        if self.samples and by_data:
            names = [
                f"sample {s.position}" + (f" (id {s.id})" if s.id is not None else "") for s in self.samples
            ]
            return fold(names)
        if self.diagnosis is not None and self.diagnosis.module:
            return self.diagnosis.module
        if self.kind is Kind.NONFINITE_LOSS:
            return "the loss"  # the gradients only follow
        count = self.details.get("tensor_count")  # of many, only the worst are listed
        return fold([tensor.name for tensor in self.tensors], total=count if isinstance(count, int) else None)

    def as_dict(self) -> dict[str, Any]:
        """JSON form, with the schema version; floats may be NaN or Inf and are written as strings."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "step": self.step,
            "time": self.time,
            "iteration": self.iteration,
            "kind": str(self.kind),
            "severity": self.severity.label,
            "action": self.action.label,
            "outcome": str(self.outcome),
            "message": self.message,
            "detector": self.detector,
            "parameters": [jsonable(tensor.as_dict()) for tensor in self.tensors],
            "ranks": [rank.as_dict() for rank in self.ranks],
            "rank_count": self.rank_count,
            "ranks_folded": self.who if self.ranks else "",
            "microbatch": self.microbatch,
            "samples": [
                {"position": s.position, "id": jsonable(s.id), "field": s.field} for s in self.samples
            ],
            "diagnosis": None if self.diagnosis is None else jsonable(self.diagnosis.as_dict()),
            "recovery": self.recovery,
            "loss": jsonable(self.loss),
            "grad_norm": jsonable(self.grad_norm),
            "notes": list(self.notes),
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
            "details": jsonable(self.details),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Incident:
        """Rebuild an incident from its JSON form; raises StoreError if it is foreign or too new."""
        schema = data.get("schema")
        if not isinstance(schema, int):
            raise StoreError("not an incident: it has no schema version")
        if schema > SCHEMA:
            raise StoreError(
                f"written by a newer GradSentinel (schema {schema}, this one reads {SCHEMA}); upgrade it"
            )
        try:
            diagnosis = data["diagnosis"]
            return cls(
                id=_text(data["id"]),
                step=int(data["step"]),
                time=_text(data["time"]),
                iteration=int(data.get("iteration", data["step"])),
                kind=Kind(data["kind"]),
                severity=Severity[data["severity"].upper()],
                action=Action.parse(data["action"]),
                outcome=Outcome(data["outcome"]),
                message=_text(data.get("message", "")),
                detector=_text(data.get("detector", "")),
                tensors=tuple(_tensor(entry) for entry in data["parameters"]),
                ranks=tuple(_rank(entry) for entry in data["ranks"]),
                unlisted=(unlisted := max(0, int(data.get("rank_count", 0)) - len(data["ranks"]))),
                ranks_folded=_text(data.get("ranks_folded", "")) if unlisted else "",
                microbatch=None if data["microbatch"] is None else int(data["microbatch"]),
                samples=tuple(_sample(entry) for entry in data["samples"]),
                diagnosis=None if diagnosis is None else _diagnosis(diagnosis),
                recovery=_text(data.get("recovery", "")),
                loss=_number(data.get("loss")),
                grad_norm=_number(data.get("grad_norm")),
                notes=_texts(data.get("notes", ())),
                seconds={name: float(value) for name, value in data["seconds"].items()},
                details=dict(data.get("details", {})),
            )
        except KeyError as error:
            raise StoreError(f"not a complete incident: it has no {error}") from error
        except (TypeError, AttributeError) as error:  # their words are about Python, not about the file
            raise StoreError("not a complete incident: a part of it has another form") from error
        except (ValueError, OverflowError) as error:
            raise StoreError(f"not a complete incident: {error}") from error


def now() -> str:
    """Return the time as in incident.json: UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def fold(names: Sequence[str], limit: int = 3, *, total: int | None = None) -> str:
    """Return the names as one phrase, the long tail counted instead of listed; `total` knows of more."""
    shown = ", ".join(names[:limit])
    count = max(len(names), total or 0)
    return shown if count <= limit else f"{shown} and {count - limit} more"


def jsonable(value: Any) -> Any:
    """JSON has no NaN and no Inf: write them as the strings that float() reads back; strangers as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry) for entry in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return int(value) if isinstance(value, Integral) else f"{value}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{values!r:.40} is no list")
    return tuple(_text(value) for value in values)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _tensor(entry: Mapping[str, Any]) -> TensorEvidence:
    index = entry.get("first_index")
    return TensorEvidence(
        name=_text(entry["name"]),
        nonfinite=int(entry["nonfinite"]),
        numel=int(entry["numel"]),
        norm=float(entry["norm"]),
        first_index=None if index is None else tuple(int(position) for position in index),
        counted=bool(entry.get("counted", True)),
    )


def _sample(entry: Mapping[str, Any]) -> Sample:
    return Sample(position=int(entry["position"]), id=entry.get("id"), field=_text(entry.get("field", "")))


def _rank(entry: Mapping[str, Any]) -> Rank:
    known = {"rank", "host", "device"}
    coordinates = {key: int(value) for key, value in entry.items() if key not in known}
    return Rank(
        rank=int(entry["rank"]),
        host=_text(entry["host"]),
        device=_text(entry["device"]),
        coordinates=coordinates,
    )


def _diagnosis(entry: Mapping[str, Any]) -> Diagnosis:
    places = {name: entry.get(name) for name in ("phase", "module", "op", "node", "source")}
    return Diagnosis(
        cause=_text(entry["cause"]),
        confidence=float(entry["confidence"]),
        **{name: None if value is None else _text(value) for name, value in places.items()},
        evidence=_texts(entry.get("evidence", ())),
        remedy=_texts(entry.get("remedy", ())),
    )
