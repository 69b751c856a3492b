"""The health of the cards: watched beside the training, told in incidents, and which card is a suspect."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.callbacks.health_evidence import add_tests, of_alarm, of_suspect, of_worries
from gradsentinel.callbacks.silent_check import SilentCheckLog
from gradsentinel.callbacks.suspicion import Seat, Suspect, Suspicion, part_of
from gradsentinel.callbacks.worries import Worries
from gradsentinel.decision import Action, Kind
from gradsentinel.devices import device_of
from gradsentinel.devices.health import HealthSource, Reading
from gradsentinel.devices.polling import Poller
from gradsentinel.diagnosis.self_test import KINDS, SelfTest, run_self_test
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.incident import Incident, jsonable
from gradsentinel.run import Run
from gradsentinel.store import write_json

logger = logging.getLogger("gradsentinel")

FILE = "device-health.json"
"""In the run directory: what was counted against each card. In an incident's: the readings."""
SCHEMA = 1
_COUNTED = frozenset(
    {
        Kind.NONFINITE_LOSS,
        Kind.NONFINITE_GRADIENT,
        Kind.NONFINITE_PARAMETER,
        Kind.NONFINITE_STATE,
        Kind.SATURATION,
        Kind.MAGNITUDE,
        Kind.RANK_DIVERGENCE,
    }
)
"""Incidents that a faulty card can be the cause of."""
_NOT_THE_CARD = frozenset({"data", "math", "precision", "operator", "optimizer", "setup"})
_SURE = 0.5
_MOST_TOLD = 8
"""Of more ranks that an incident names, the cards of the first ones are told."""


@dataclass(frozen=True, slots=True)
class _Testimony:
    """What one rank has to say of its card."""

    card: str
    reading: Mapping[str, Any] | None
    failure: str
    test: SelfTest | None


@dataclass(kw_only=True)
class DeviceHealthCallback(Detector):
    """Watches the health of the cards, puts it into each incident, and says if it is always the same card.

    A thread asks `npu-smi` (Ascend) or NVML (CUDA, with `nvidia-ml-py`) for temperature, power, health and
    memory errors; the training never waits for it. A card that gets hot, unhealthy, or counts new errors is
    told with a warning. Incidents that began on one card are counted, over restarts too; if they are more on
    one card than chance explains, a warning names it. On Ascend, alarms of torch_npu's own check for silent
    errors become warnings. On devices nobody can ask, such as a CPU, only the counting is left.
    Called on: every rank, each asks for its own card.
    """

    judges_steps: ClassVar[bool] = False
    """Beside it a run still needs somebody who looks at gradients."""
    every: float = 60.0
    """Seconds between two questions to the card."""
    max_temperature: float | None = None
    """Degrees Celsius from which on it warns; None takes the card's own limit, or 90 if it tells none."""
    max_corrected: int = 100
    """It warns of so many new memory errors that the card corrected; of one that it could not, always."""
    max_chance: float = 0.01
    """A card is a suspect if chance alone would make any card look as bad with at most this probability."""
    silent_check: bool = True
    """Turn warnings of the logger `torch_npu.silent_check` into incidents."""
    self_test: str | None = None
    """After a fault that may be the hardware's, have the named device test itself: "aic" for its cores,
    "hccs" for the links. Takes minutes and 10 GiB of device memory; once per card and run. None: never."""
    keep: int = 64
    """So many readings are kept, and written beside each incident."""
    source: HealthSource | None = field(default=None, repr=False)
    """Who is asked instead; for cards that neither tool knows."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _poller: Poller | None = field(default=None, init=False, repr=False)
    _log: SilentCheckLog | None = field(default=None, init=False, repr=False)
    _worries: Worries | None = field(default=None, init=False, repr=False)
    _suspicion: Suspicion | None = field(default=None, init=False, repr=False)
    _card: str = field(default="", init=False, repr=False)
    _seen: int = field(default=0, init=False, repr=False)
    """How many answers were judged."""
    _accused: dict[str, Suspect] = field(default_factory=dict, init=False, repr=False)
    """Suspects that were told, by card."""
    _to_accuse: list[Suspect] = field(default_factory=list, init=False, repr=False)
    _tested: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.every > 0:
            raise ConfigurationError(f"every={self.every} must be more than 0 seconds")
        if self.max_corrected < 1 or self.keep < 1:
            raise ConfigurationError("max_corrected and keep must be at least 1")
        if not 0 < self.max_chance < 1:
            raise ConfigurationError(f"max_chance={self.max_chance} is a probability between 0 and 1")
        if self.self_test is not None and self.self_test not in KINDS:
            raise ConfigurationError(
                f"self_test={self.self_test!r} must be one of {', '.join(KINDS)}, or None"
            )
        if self.source is not None and not (
            hasattr(self.source, "card") and callable(getattr(self.source, "read", None))
        ):
            raise ConfigurationError("source needs a card, its name, and read(), which returns a Reading")

    def norm_bound(self) -> float:
        """Return infinity: it does not judge gradients."""
        return float("inf")

    def readings(self) -> list[Reading]:
        """Return the latest readings of this rank's card, the newest last."""
        return [] if self._poller is None else self._poller.readings()

    def suspects(self) -> list[Suspect]:
        """Return what speaks against each card that had an incident, the most suspicious one first."""
        if self._suspicion is None:
            return []
        found = map(self._suspicion.suspect, self._suspicion.as_dict())
        return sorted((s for s in found if s is not None), key=lambda suspect: suspect.chance)

    # -- events ----------------------------------------------------------------------------------------

    def on_run_start(self, event: events.RunStart) -> None:
        """Tell the other ranks where this one sits, and begin to ask."""
        run = self._run = event.run
        run.diagnosers.append(self._complete)
        self._end()  # of a run before this one that nobody closed
        self._seen = 0
        for memory in (self._accused, self._to_accuse, self._tested):
            memory.clear()
        source, account = self._find_source(run), _read(run)
        self._card = f"{run.rank.host} {run.rank.device if source is None else source.card}"
        seat = Seat(self._card, part_of(run.rank.coordinates))
        everyone = run.consensus.gather((seat, account))
        self._suspicion = Suspicion([seat for seat, _ in everyone])
        self._take_up(self._suspicion, everyone[0][1])
        self._worries = Worries(self.max_temperature, self.max_corrected)
        if source is not None:
            self._poller = Poller(source, every=self.every, keep=self.keep)
            self._poller.start()
        if self.silent_check:
            self._log = SilentCheckLog(run.rank.rank if run.consensus.world_size > 1 else None)
            self._log.install()

    def on_after_step(self, event: events.AfterStep) -> Sequence[Finding]:
        """Tell what is new: a reading that is cause for worry, an alarm of the silent check, a suspect."""
        heard = self._poller is not None and self._poller.count != self._seen
        if not (heard or self._to_accuse or (self._log is not None and self._log.waiting)):
            return ()
        with self._ends_on_failure():
            found = self._judge(event.iteration) if heard else []
            if self._log is not None:
                found += [of_alarm(alarm) for alarm in self._log.take()]
            found += [of_suspect(suspect) for suspect in self._to_accuse if suspect.card == self._card]
            self._to_accuse.clear()
            return [
                Finding(kind=Kind.DEVICE_HEALTH, value=True, action=Action.WARN, confirm=lambda e=e: e)  # type: ignore[arg-type, misc]
                for e in found
            ]

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Write the latest readings beside the incident."""
        run = self._run
        if run is None or self._poller is None:
            return
        own = any(rank.rank == run.rank.rank for rank in event.incident.ranks)
        if not (own or run.rank.rank == 0):
            return
        suffix = f"-rank{run.rank.rank}" if run.consensus.world_size > 1 else ""
        directory = run.directory.incidents / event.incident.id
        with _disk("the readings of the card"):
            directory.mkdir(parents=True, exist_ok=True)
            write_json(
                directory / FILE.replace(".json", f"{suffix}.json"),
                {
                    "schema": SCHEMA,
                    "card": self._card,
                    "failure": self._poller.failure,
                    "silent_check_spikes": 0 if self._log is None else self._log.spikes,
                    "readings": [jsonable(reading.as_dict()) for reading in self._poller.readings()],
                },
            )

    def on_run_end(self, event: events.RunEnd) -> None:
        """Stop asking."""
        self._end()

    # -- in an incident, on every rank -------------------------------------------------------------------

    def _complete(self, incident: Incident, run: Run) -> None:
        """Add what the cards say, and what speaks against them; called on every rank, after the diagnosis."""
        told: _Testimony | None = None
        failure: Exception | None = None
        try:
            told = self._testify(incident, run)
        except Exception as error:  # noqa: BLE001 - raised below, after the ranks have met
            failure = error
        everyone = run.consensus.gather(told)
        if failure is not None:
            raise failure
        named = [(rank.rank, everyone[rank.rank]) for rank in incident.ranks[:_MOST_TOLD]]
        testified = {rank: testimony for rank, testimony in named if testimony is not None}
        if any(testimony.reading or testimony.failure for testimony in testified.values()):
            incident.details["device_health"] = {
                f"rank {rank}": testimony.reading or {"card": testimony.card, "failure": testimony.failure}
                for rank, testimony in testified.items()
            }
        add_tests(incident, [t.test for t in everyone if t is not None and t.test is not None])
        self._count(incident, run)

    def _testify(self, incident: Incident, run: Run) -> _Testimony | None:
        mine = any(rank.rank == run.rank.rank for rank in incident.ranks)
        test = self._test(incident, run, mine=mine)
        if not mine and test is None:
            return None
        readings = self.readings()
        failure = "" if self._poller is None else self._poller.failure
        return _Testimony(self._card, readings[-1].as_dict() if readings else None, failure, test)

    def _test(self, incident: Incident, run: Run, *, mine: bool) -> SelfTest | None:
        """Have the device test itself, if that was asked for; decided alike on every rank."""
        kind, cause = self.self_test, incident.diagnosis
        unknown = cause is None or cause.cause in {"hardware", "unknown"} or cause.confidence < _SURE
        if kind is None or incident.action < Action.RETRY or incident.kind not in _COUNTED or not unknown:
            return None
        together = kind == "hccs"
        card = "all" if together else self._card
        if card in self._tested or not (mine or together):
            return None
        self._tested.add(card)
        return run_self_test(kind, run.host.device)

    def _count(self, incident: Incident, run: Run) -> None:
        cause = incident.diagnosis
        cleared = cause is not None and cause.cause in _NOT_THE_CARD and cause.confidence >= _SURE
        if incident.kind not in _COUNTED or cleared or incident.unlisted or self._suspicion is None:
            return
        card = self._suspicion.count((rank.rank for rank in incident.ranks), incident.step)
        suspect = None if card is None else self._suspicion.suspect(card)
        if card is None or suspect is None:
            return
        if suspect.hits > 1:
            incident.notes += (suspect.words,)
        if suspect.chance <= self.max_chance and card not in self._accused:
            self._accused[card] = suspect
            self._to_accuse.append(suspect)
        self._save(run)

    # -- on this rank --------------------------------------------------------------------------------------

    def _find_source(self, run: Run) -> HealthSource | None:
        try:
            return self.source if self.source is not None else device_of(run.host.device).health_source()
        except Exception as error:  # noqa: BLE001 - whatever the driver says: training does without
            logger.warning("the health of %s is not watched: %s", run.host.device, error)
            return None

    def _judge(self, iteration: int) -> list[Evidence]:
        assert self._poller is not None
        assert self._worries is not None
        self._seen = self._poller.count
        readings = self._poller.readings()
        if not readings or self._poller.failure:
            return []
        reading = readings[-1]
        if self._run is not None:
            for name, value in (("temperature", reading.temperature), ("power", reading.power)):
                if value is not None:
                    self._run.metrics[f"device/{name}"] = (iteration, value)
        worries = self._worries.judge(reading)
        return [of_worries(reading, worries)] if worries else []

    def _take_up(self, suspicion: Suspicion, account: Mapping[str, Any] | None) -> None:
        if account is None:
            return
        try:
            suspicion.take_up(account["cards"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("%s makes no sense, so the count begins anew: %s", FILE, error)
        for suspect in self.suspects():
            if suspect.chance <= self.max_chance:
                self._accused[suspect.card] = suspect

    def _save(self, run: Run) -> None:
        if run.consensus.rank or not run.explicit_directory or self._suspicion is None:
            return
        with _disk(FILE):
            run.directory.path.mkdir(parents=True, exist_ok=True)
            write_json(run.directory.path / FILE, {"schema": SCHEMA, "cards": self._suspicion.as_dict()})

    @contextmanager
    def _ends_on_failure(self) -> Iterator[None]:
        """A callback that raises is heard of no more: nobody would end its thread later."""
        try:
            yield
        except Exception:  # whatever it is: it goes on to the bus, which switches this callback off
            self._end()
            raise

    def _end(self) -> None:
        if self._poller is not None:
            self._poller.stop()
        if self._log is not None:
            self._log.remove()


@contextmanager
def _disk(what: str) -> Iterator[None]:
    """Have a disk that refuses told in the log: what was to be written is no reason to stop."""
    try:
        yield
    except OSError as error:
        logger.error("%s could not be written: %s", what, error)  # noqa: TRY400 - the reason is in the text


def _read(run: Run) -> Mapping[str, Any] | None:
    """Return what processes before this one counted; rank 0 reads for all."""
    if run.consensus.rank or not run.explicit_directory:
        return None
    path = run.directory.path / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] == SCHEMA:
            return dict(data)
        logger.warning("%s was written by another version, so the count begins anew", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read, so the count begins anew: %s", path, error)
    return None
