"""The incident bundle: what somebody else needs to look at the fault on another machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsentinel import events
from gradsentinel.callback import Callback, Findings
from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis import custom
from gradsentinel.diagnosis.bundle import BundleFacts, BundleWriter
from gradsentinel.diagnosis.collect import Level, add_microbatch, collect
from gradsentinel.diagnosis.findings import Findings as Traced
from gradsentinel.diagnosis.guilty import Guilty, guilty_of
from gradsentinel.diagnosis.lost import lost_of
from gradsentinel.diagnosis.operator import CannotRun, OperatorCall, call_of
from gradsentinel.diagnosis.repro import write_program
from gradsentinel.diagnosis.storable import nbytes
from gradsentinel.diagnosis.stored_call import call_to_tree, encode
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding
from gradsentinel.incident import Incident, Outcome
from gradsentinel.run import Run
from gradsentinel.state.background import Background
from gradsentinel.state.disk import Refused, is_of_the_disk
from gradsentinel.state.tree import UnsupportedStateError, flatten

logger = logging.getLogger("gradsentinel")

_FOR_OPERATOR = 1 << 27
"""So many bytes, but at most an eighth of all, are reserved for the bad operator's inputs."""
_WHAT = "the bundles"
_PATIENCE = 300.0
"""Seconds that the end of a run waits for what is still being written."""


@dataclass(slots=True)
class _Open:
    """The bundle of the incident that is being handled."""

    incident: Incident
    scene: Mapping[str, Any]
    writer: BundleWriter
    saved: tuple[int, ...]
    """Numbers of the micro-batches that are in it."""
    room: int
    """Bytes that are left."""


@dataclass(kw_only=True)
class SnapshotSaver(Callback):
    """Saves a bundle for each incident, to look at the fault and run it again on another machine.

    JSON and safetensors only, so that opening it is safe. Copies are taken at once, a thread writes
    them. What cannot be stored, or is too large, is left out and named in `bundle.json`. A disk that
    refuses is reported as an incident of its own; the run goes on. Called on: every rank, each writes
    its own part.
    """

    level: Level | str = "standard"
    """`"light"`: facts and statistics. `"standard"`: also the micro-batch, random states, the bad operator's
    inputs and a program that runs it. `"full"`: also weights, buffers, optimizer state and gradients."""
    max_bundles: int = 20
    """So many bundles are written per run; incidents beyond have their incident.json only."""
    max_bytes: int = 1 << 30
    """What would make a rank's part of a bundle larger than this is left out, which the bundle says."""
    min_action: Action | str = Action.WARN
    """Incidents below this action get no bundle."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _background: Background | None = field(default=None, init=False, repr=False)
    _open: _Open | None = field(default=None, init=False, repr=False)
    _written: int = field(default=0, init=False, repr=False)
    _is_said: bool = field(default=False, init=False, repr=False)
    """True if the disk refused the last one, which `Disk` has said."""

    def __post_init__(self) -> None:
        self.level = Level.parse(self.level)
        self.min_action = Action.parse(self.min_action)
        if self.max_bundles < 0 or self.max_bytes < 0:
            raise ConfigurationError("max_bundles and max_bytes must be 0 or more")

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run
        self._background = Background(max_bytes=2 * self.max_bytes)

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Copy the scene and have it written beside incident.json."""
        run, incident = self._run, event.incident
        self._open = None
        if run is None or self._background is None or not self._wanted(incident):
            return
        self._written += 1
        level = Level.parse(self.level)
        reserved = min(self.max_bytes // 8, _FOR_OPERATOR) if level >= Level.STANDARD else 0
        parts = collect(
            incident,
            event.scene["microbatches"],
            event.scene["rng"],
            run,
            level=level,
            room=self.max_bytes - reserved,
        )
        facts = BundleFacts(
            incident=incident.id,
            step=incident.step,
            level=level,
            rank=run.rank.rank,
            world_size=run.consensus.world_size,
        )
        writer = BundleWriter(run.directory.incidents / incident.id, facts)
        scene = parts.archives.get("scene")
        saved = () if scene is None else tuple(int(entry["index"]) for entry in scene[0]["microbatches"])
        self._open = _Open(incident, event.scene, writer, saved, self.max_bytes - parts.nbytes)
        self._submit(self._what(incident), lambda: writer.write(parts), parts.nbytes)

    def on_diagnosis(self, event: events.DiagnosisEvent) -> None:
        """Add the bad operator, its inputs, and the program that runs it."""
        bundle, run = self._open, self._run
        if bundle is None or run is None or bundle.incident is not event.incident:
            return
        if Level.parse(self.level) < Level.STANDARD:
            return
        self._add_microbatch(bundle, run)
        guilty = guilty_of(event.incident, event.diagnosis, run)
        if guilty is not None:
            self._add_operator(bundle, guilty, event.diagnosis, run)

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Finish writing before a run that is aborted may be gone."""
        if self._background is not None and event.recovery.outcome is Outcome.ABORTED:
            self._background.finish(_PATIENCE)

    def on_after_step(self, event: events.AfterStep) -> Findings:
        """Let go of the scene, and report what could not be written."""
        self._open = None
        return self._reports()

    def on_run_end(self, event: events.RunEnd) -> Findings:
        """Finish writing, and report what could not be written."""
        self._open = None
        if self._background is not None:
            self._background.finish(_PATIENCE)
        return self._reports()

    def _wanted(self, incident: Incident) -> bool:
        mine = incident.kind is Kind.CALLBACK_ERROR and incident.detector.startswith(type(self).__name__)
        if mine or "unsaved" in incident.details:  # a disk that refuses would refuse this, too
            return False
        return incident.action >= Action.parse(self.min_action) and self._written < self.max_bundles

    def _add_microbatch(self, bundle: _Open, run: Run) -> None:
        """Keep the guilty micro-batch, if the diagnosis found it to be another one than was suspected."""
        wanted = bundle.incident.microbatch
        if wanted is None or wanted in bundle.saved or not bundle.saved or self._background is None:
            return
        parts = add_microbatch(bundle.incident, bundle.scene["microbatches"], wanted, run, room=bundle.room)
        parts.archives = {f"scene-microbatch{wanted}": archive for archive in parts.archives.values()}
        bundle.room -= parts.nbytes
        what, writer = self._what(bundle.incident), bundle.writer
        self._submit(what, lambda: writer.write(parts), parts.nbytes)

    def _add_operator(self, bundle: _Open, guilty: Guilty, diagnosis: Diagnosis, run: Run) -> None:
        assert self._background is not None
        writer, what = bundle.writer, self._what(bundle.incident)
        try:
            call, reason = call_of(guilty.event, device=run.host.device, limit=bundle.room)
            if reason:
                self._submit(what, lambda: writer.leave_out(reason))
            if call is None:
                return
            state, meta, program = self._program(bundle, guilty, diagnosis, call)
        except (CannotRun, RuntimeError, TypeError, ValueError) as error:
            refused = f"the bad operator: {error}"
            self._submit(what, lambda: writer.leave_out(refused))
            return
        self._submit(what, lambda: writer.write_operator(state, meta, program), nbytes(state))

    @staticmethod
    @torch.no_grad()
    def _program(
        bundle: _Open, guilty: Guilty, diagnosis: Diagnosis, call: OperatorCall
    ) -> tuple[dict[str, Any], dict[str, Any], str]:
        """Return what the archive of the operator holds, and the text of repro.py."""
        operator, meta = call_to_tree(call)
        function, given = _function_of(guilty.findings, bundle.room - nbytes(operator))
        lost, before = lost_of(guilty, diagnosis, bundle.room - nbytes(operator))
        program = write_program(
            bundle.incident,
            diagnosis,
            call,
            operator,
            folder=f"operator{bundle.writer.suffix}",
            function=function,
            function_state=given,
            lost=lost,
            lost_state=before,
            allocation=guilty.event.allocation,
        )
        meta["allocation"] = guilty.event.allocation
        meta["custom"] = guilty.custom
        meta["function"] = None if function is None else f"{function.module}:{function.qualname}"
        return {"operator": operator, "function": given, "lost": before}, meta, program

    def _submit(self, what: str, work: Callable[[], None], nbytes: int = 0) -> None:
        assert self._background is not None
        assert self._run is not None
        disk = self._run.disk

        def write() -> None:
            try:
                work()
            except (OSError, RuntimeError) as error:
                if is_of_the_disk(error):
                    # What it held is gone, and nothing to try again: it is over when another thing is taken.
                    self._is_said = True
                    disk.refused(_WHAT, error, lambda: disk.taken(_WHAT), lost=what)
                    raise Refused(str(error)) from error
                raise
            disk.taken(_WHAT)

        self._background.submit(what, write, nbytes)

    @staticmethod
    def _what(incident: Incident) -> str:
        return f"the bundle of {incident.id}"

    def _reports(self) -> Findings:
        failures = [] if self._background is None or not self._written else self._background.failures()
        if not failures:
            return None
        said, self._is_said = self._is_said, False
        return [self._report(failure, said=said) for failure in failures]

    def _report(self, failure: str, *, said: bool) -> Finding:
        evidence = Evidence(
            kind=Kind.CALLBACK_ERROR,
            action=Action.WARN,
            message=f"{type(self).__name__}: {failure}; the run goes on",
            details={"said": True} if said else {},
        )
        value = torch.tensor(True)
        return Finding(kind=evidence.kind, action=evidence.action, value=value, confirm=lambda: evidence)


def _function_of(
    findings: Traced | None, room: int
) -> tuple[custom.FunctionCall | None, dict[str, Any] | None]:
    """Return the custom Function to blame and what it was given, if both can be stored."""
    if findings is None or findings.custom is None:
        return None, None
    try:
        function = custom.catch(findings)
    except Exception as error:  # noqa: BLE001 - the user's own code, run once more
        logger.warning("the custom operator could not be run once more: %s: %s", type(error).__name__, error)
        return None, None
    if function is None:
        return None, None
    given = {"args": encode(list(function.args)), "grads": function.grads and encode(list(function.grads))}
    try:
        flatten(given, copy_views=False)
    except UnsupportedStateError:
        return None, None
    return (function, given) if nbytes(given) <= room else (None, None)
