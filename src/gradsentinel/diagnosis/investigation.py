"""One rank finds out what its micro-batches of a bad step came to: replay, trace, swap."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis import swap
from gradsentinel.diagnosis.clean import CleanStep
from gradsentinel.diagnosis.custom import blame_function
from gradsentinel.diagnosis.fields import fields_behind
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.fingerprint import what_is_different
from gradsentinel.diagnosis.narrow import NarrowTrace
from gradsentinel.diagnosis.operands import bad_alike, finite_again
from gradsentinel.diagnosis.passed import Boundaries
from gradsentinel.diagnosis.progress import Progress
from gradsentinel.diagnosis.record import FROM_BUFFERS
from gradsentinel.diagnosis.remedy import for_records
from gradsentinel.diagnosis.replay import Computed, Replay
from gradsentinel.diagnosis.report import Report
from gradsentinel.diagnosis.scan import spoilt_by_forward
from gradsentinel.diagnosis.surroundings import Surroundings
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.diagnosis.verdict import came_in, decide
from gradsentinel.diagnosis.walk import Path, walk
from gradsentinel.evidence import Diagnosis, Sample
from gradsentinel.incident import Incident, fold
from gradsentinel.measures.inspection import parts_of
from gradsentinel.measures.named import gradient_of
from gradsentinel.run import Run
from gradsentinel.state.tree import tensors_in

_SWAPS = 4


class Investigation:
    """Runs the micro-batches of a step again, within the time allowed, and says what they showed.

    Args:
        incident: what it is about.
        run: the run; `replay.reason_against` must be None.
        progress: hears of every stage.
    """

    def __init__(self, incident: Incident, run: Run, progress: Progress) -> None:
        self.findings: Findings | None = None
        """Of a step that was traced to an operator."""
        self._incident = incident
        self._run = run
        self._progress = progress
        self._deadline = time.monotonic() + run.diagnosis_budget
        self._buffers = spoilt_by_forward(incident)
        self._replay = Replay(run, buffers=self._buffers)
        self._around = Surroundings(run)
        self._computed: list[Computed] = []
        """As far as computed, in the order of `_microbatches`."""
        self._boundaries = Boundaries(run)
        suspect = incident.microbatch
        self._microbatches = sorted(self._replay.microbatches, key=lambda m: m.index != suspect)

    def report(self) -> Report:
        """Find out; leaves the run as it is."""
        self._progress.expect(len(self._microbatches) + _SWAPS)
        if self._run.known_good is not None:
            self._run.known_good.settle()
        found = {n: g for n, p in self._run.host.named_parameters() if (g := gradient_of(p)) is not None}
        with self._replay.sheltered():
            try:
                guilty = self._find_guilty()
            except Exception as error:  # noqa: BLE001 - the user's own code: it may not like to run twice
                what = f"the step could not be run again: {type(error).__name__}: {error}"
                return Report(notes=(what,))
            if guilty is None:
                return self._clean(found)
            self._progress.stage("watching every operator")
            trace = self._trace()
            traced = self._replay.compute(guilty, mode=trace)
            path = walk(trace, traced)
            if path is None:
                return self._clean(found, flaky=True)
            if path.origin is None:
                by_function = self._by_function(path, traced, guilty)
                return by_function or self._came_in(trace, path, traced, guilty)
            findings = Findings.of(self._run, guilty, trace, traced, path)
            findings.fields = tuple(fields_behind(findings))
            self._swap(findings)
        self.findings = findings
        return self._decided(findings)

    def _clean(self, found: dict[str, Tensor], *, flaky: bool = False) -> Report:
        if self._buffers:
            return Report(diagnosis=_spoilt_once(self._incident))
        step = CleanStep(
            self._incident,
            self._replay,
            self._around,
            self._microbatches,
            self._computed,
            self._boundaries,
            stage=self._progress.stage,
            time_left=self._time_left,
            trace=self._trace,
        )
        return step.report(found, flaky=flaky)

    # -- the guilty micro-batch ----------------------------------------------------------------------

    def _find_guilty(self) -> MicroBatch | None:
        for number, microbatch in enumerate(self._microbatches):
            if number and not self._time_left():
                return None
            self._progress.stage(f"running micro-batch {microbatch.index} again")
            self._computed.append(self._replay.compute(microbatch))
            if not swap.is_finite(self._computed[-1]):
                return microbatch
            self._boundaries.take(microbatch, self._computed[-1])
        return None

    def _time_left(self) -> bool:
        """True if one more run, as long as the longest so far, fits into the budget."""
        return time.monotonic() + self._replay.slowest <= self._deadline

    def _trace(self) -> Trace:
        trace = Trace(self._run.host.modules(), self._run.host.named_parameters())
        for name, tensor in self._around.tensors():
            if trace.memory.known(tensor) is None:
                trace.declare(tensor, f"attribute {name}", FROM_BUFFERS)
        return trace

    def _by_function(self, path: Path, traced: Computed, guilty: MicroBatch) -> Report | None:
        """Look whether a custom Function made what no operator made."""
        functions = any(mine for _, mine in traced.nodes.values())
        if not functions or not path.leaves or path.leaves[0].leaf != "constant" or not self._time_left():
            return None
        self._progress.stage("watching custom Functions")
        diagnosis = blame_function(self._replay, guilty, traced, self._trace())
        return None if diagnosis is None else Report(diagnosis=diagnosis, microbatch=guilty.index)

    def _came_in(self, trace: Trace, path: Path, traced: Computed, guilty: MicroBatch) -> Report:
        diagnosis = came_in(trace, path, traced)
        if diagnosis.cause == "data" and guilty.written:
            return Report(diagnosis=_spoilt(diagnosis), microbatch=guilty.index)
        samples = _samples_of(path, guilty)
        if diagnosis.cause == "data":
            diagnosis = self._with_fingerprint(diagnosis, guilty, ())
        if diagnosis.cause == "data" and samples:
            rows, ids = [s.position for s in samples], guilty.ids
            diagnosis = replace(diagnosis, remedy=for_records(rows, ids, samples[0].field)[:1])
        return Report(diagnosis=diagnosis, microbatch=guilty.index, samples=samples)

    def _decided(self, findings: Findings) -> Report:
        diagnosis = decide(findings)
        if diagnosis.cause == "data":
            diagnosis = self._with_fingerprint(diagnosis, findings.microbatch, findings.finite_others)
        several = len(self._microbatches) > 1
        known = self._incident.microbatch
        return Report(
            diagnosis=diagnosis,
            microbatch=findings.microbatch.index if several or known is None else known,
            samples=_samples(findings, diagnosis),
            microbatches=tuple(sorted((findings.microbatch.index, *findings.bad_others))),
        )

    def _with_fingerprint(
        self, diagnosis: Diagnosis, guilty: MicroBatch, others: Sequence[MicroBatch]
    ) -> Diagnosis:
        """Say how the batch differs from the healthy ones."""
        healthy = [m.batch for m in (*self._run.scene.healthy, *others)]
        text = what_is_different(guilty.batch, healthy)
        return replace(diagnosis, evidence=(*diagnosis.evidence, text)) if text else diagnosis

    # -- one thing at a time ---------------------------------------------------------------------------

    def _swap(self, findings: Findings) -> None:
        """Change one thing at a time, as long as it can change the verdict and there is time."""
        size, microbatch, replay = findings.size, findings.microbatch, self._replay
        findings.finite_others, findings.bad_others = self._others(microbatch)
        _run_operator(findings)
        if findings.half is not None and self._time_left():
            self._progress.stage("computing in float32")
            findings.finite_in_wide = swap.finite_in_wide(replay, microbatch)
        elif findings.trace.narrow and self._time_left():
            self._lost_before(findings)
        good = self._run.known_good
        if good is not None and findings.overflowed and self._time_left():
            self._progress.stage(f"with the weights of step {good.step}")
            findings.finite_with_known_good = swap.finite_with_weights(replay, microbatch, good)
        healthy = self._run.scene.healthy
        if healthy and not findings.finite_others and self._time_left():
            self._progress.stage("with the batch of the last healthy step")
            findings.finite_with_healthy = swap.finite_with_batch(replay, microbatch, healthy[0].batch)
        self._move(findings)
        if size is None:
            return
        self._leave_out(findings, size)

    def _move(self, findings: Findings) -> None:
        """Look whether zeros that come from the batch alone are there whatever values it holds.

        Where another batch is finite they are not, and the batch is to blame.
        """
        everywhere = len(findings.rows) in (0, findings.size)
        if not everywhere or not findings.by_batch_alone or not findings.singular_at_zero():
            return
        if findings.finite_others or findings.finite_with_healthy:
            return
        other = swap.moved(findings.microbatch.batch, findings.fields)
        if other is None or not self._time_left():
            return
        self._progress.stage("with every value of the batch moved a little")
        trace = self._trace()
        computed = swap.compute_with_batch(self._replay, findings.microbatch, other, mode=trace)
        path = None if computed is None else walk(trace, computed)
        again = None if path is None else path.origin
        findings.singular_for_any_batch = again is not None and bad_alike(findings.origin, again)

    def _lost_before(self, findings: Findings) -> None:
        """Look for a narrow operator that lost what a wider one stumbles over, if all is finite without."""
        self._progress.stage("computing in float32")
        findings.finite_in_wide = swap.finite_in_wide(self._replay, findings.microbatch)
        if not findings.finite_in_wide or findings.origin.backward or not self._time_left():
            return
        host = self._run.host
        trace = NarrowTrace(host.modules(), host.named_parameters(), until=findings.origin.index)
        self._replay.compute(findings.microbatch, mode=trace)
        findings.lost = trace.lost

    def _leave_out(self, findings: Findings, size: int) -> None:
        """Try without the samples that are far from the others, and without those with bad results."""
        microbatch = findings.microbatch
        outliers = swap.outlier_rows(microbatch.batch, size)
        far = sorted({row for guilty in outliers.values() for row in guilty})
        for rows in (far, list(findings.rows)):
            if not rows or len(rows) >= size or findings.finite_without_rows or not self._time_left():
                continue
            self._progress.stage("without the suspicious samples")
            findings.finite_without_rows = swap.finite_without(self._replay, microbatch, rows, size)
            if not findings.finite_without_rows and len(findings.fields) == 1 and self._time_left():
                # As a whole they may not fit among the others: lengths, offsets, edges of a graph.
                field_alone = swap.finite_without(self._replay, microbatch, rows, size, findings.fields[0])
                findings.finite_without_rows = field_alone or findings.finite_without_rows
            if findings.finite_without_rows and rows is far:
                alone = self._cures(findings, outliers, size)
                findings.outliers = outliers if alone is None else {alone: outliers[alone]}
        if findings.finite_without_rows and len(findings.fields) > 1:
            alone = self._cures(findings, dict.fromkeys(findings.fields, findings.guilty_rows), size)
            findings.fields = findings.fields if alone is None else (alone,)

    def _cures(self, findings: Findings, fields: Mapping[str, list[int]], size: int) -> str | None:
        """Return, of several fields, the one that cures the step by itself when some rows are replaced."""
        for path, rows in fields.items() if len(fields) > 1 else ():
            if not self._time_left():
                break
            if swap.finite_without(self._replay, findings.microbatch, rows, size, path):
                return path
        return None

    def _others(self, guilty: MicroBatch) -> tuple[tuple[MicroBatch, ...], tuple[int, ...]]:
        """Run the other micro-batches of the step, too; return those that are finite, and which are not."""
        finite, bad = [], []
        for number, other in enumerate(self._microbatches):
            if other is guilty:
                continue
            if number >= len(self._computed):
                if not self._time_left():
                    break
                self._progress.stage(f"running micro-batch {other.index}, too")
                if not swap.is_finite(self._replay.compute(other)):
                    bad.append(other.index)
                    continue
            finite.append(other)
        return tuple(finite), tuple(sorted(bad))


def _spoilt_once(incident: Incident) -> Diagnosis:
    """Loss and gradients were finite, so nothing shows that the replay is what the loop computed."""
    names = fold([tensor.name for tensor in incident.tensors])
    return Diagnosis(
        cause="unknown",
        confidence=0.3,
        phase="forward",
        evidence=(f"run again from the same batch, buffers and random state, {names} stay finite",),
        remedy=(
            "look at what the loop writes to these buffers, and at whether forward= computes what it does",
            "if it does, test the device",
        ),
    )


def _spoilt(diagnosis: Diagnosis) -> Diagnosis:
    """The batch holds bad values now, and the step itself has written to it."""
    return replace(
        diagnosis,
        cause="unknown",
        confidence=0.3,
        phase="forward",
        evidence=("the step wrote to its own batch, in which there are bad values now", *diagnosis.evidence),
        remedy=(
            "let the forward pass leave its input alone (no operators in place on it) to have it traced",
        ),
    )


def _run_operator(findings: Findings) -> None:
    """Run the bad operator alone, here and on the CPU."""
    if findings.origin.allocation or findings.custom is not None:
        return
    finite = finite_again(findings.origin)
    findings.repeatable = None if finite is None else not finite
    if findings.run.host.device.type != "cpu":
        findings.finite_on_cpu = finite_again(findings.origin, torch.device("cpu"))


def _samples(findings: Findings, diagnosis: Diagnosis) -> tuple[Sample, ...]:
    """Name samples only when replacing them cured the step, and, if it is not data, when they are few."""
    rows, data = findings.guilty_rows, diagnosis.cause == "data"
    few = 2 * len(rows) <= (findings.size or 0)
    if not findings.finite_without_rows or not (data or few):
        return ()
    known = (list(findings.outliers) or findings.fields) if data else ()
    field, ids = known[0] if len(known) == 1 else "", findings.ids()
    return tuple(Sample(position=row, id=ids.get(row), field=field) for row in rows)


def _samples_of(path: Path, microbatch: MicroBatch) -> tuple[Sample, ...]:
    """Name the samples of a bad tensor of the batch."""
    leaf = path.leaves[0].leaf if path.leaves else ""
    ids = microbatch.ids
    for name, tensor in tensors_in(microbatch.batch):
        if leaf == f"batch {name}".strip() and tensor.dim() and tensor.layout is torch.strided:
            rows = (~torch.isfinite(parts_of(tensor))).reshape(tensor.shape[0], -1).any(1).nonzero()
            return tuple(Sample(position=r, id=ids.get(r), field=name) for r in rows.flatten().tolist())
    return ()
