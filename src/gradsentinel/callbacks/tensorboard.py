"""Norms, counters, actions and incidents in TensorBoard."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsentinel import events
from gradsentinel.callback import Callback
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Incident
from gradsentinel.measures.histogram import Histogram
from gradsentinel.run import Run

_LAYOUT = {
    "GradSentinel": {
        "Loss": ["Multiline", ["gradsentinel/loss$"]],
        "Gradient norm": ["Multiline", ["gradsentinel/grad_norm$"]],
        "Incidents and what was done": [
            "Multiline",
            [
                "gradsentinel/incidents",
                "gradsentinel/skipped",
                "gradsentinel/rolled_back",
                "gradsentinel/scaler_skips",
            ],
        ],
        "Learning rate": ["Multiline", ["gradsentinel/learning_rate$"]],
    }
}


@dataclass(kw_only=True)
class TensorBoardCallback(Callback):
    """Writes scalars every `every` steps and one readable text per incident; needs gradsentinel[tensorboard].

    The axis is the number of attempted steps, which never goes back, since TensorBoard drops what
    does. The numbers are those the sentinel read anyway: no further wait for the device. Called on: every
    rank; rank 0 writes.
    """

    every: int = 1
    """Scalars every so many steps; incidents are written always."""
    log_dir: str | Path | None = None
    """Where to write; None means into the run directory itself."""
    writer: Any = field(default=None, repr=False)  # an object of this process, no setting to compare
    """A SummaryWriter to write to instead of making one, such as a logger's own; it is not closed."""
    _own: Any = field(default=None, init=False, repr=False)
    _silent: bool = field(default=False, init=False, repr=False)
    """True on the ranks that leave the writing to rank 0."""
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _published: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """The attempted step of each number that other callbacks publish, as written last."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigurationError(f"every={self.every} must be at least 1 step")
        if self.writer is None:
            try:
                import torch.utils.tensorboard  # noqa: F401, PLC0415 - an optional dependency
            except ImportError as error:
                raise ConfigurationError(
                    "TensorBoardCallback needs tensorboard: pip install 'gradsentinel[tensorboard]'"
                ) from error

    def on_run_start(self, event: events.RunStart) -> None:
        """Open the writer on rank 0 and lay out the custom page."""
        self._silent = event.run.consensus.rank > 0
        if self._silent:
            return
        self._run = event.run
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional dependency

            self._own = SummaryWriter(log_dir=str(self.log_dir or event.run.directory.path))
        self._writer.add_custom_scalars(_LAYOUT)

    def on_after_step(self, event: events.AfterStep) -> None:
        """Write the step's numbers; a loss or norm that is not finite leaves a gap, the text says why."""
        if self._writer is None:
            return
        self._counts["scaler_skips"] += event.scaler_skipped
        self._write_published()
        if event.step % self.every and event.action is Action.CONTINUE:
            return
        numbers = {"loss": event.loss, "grad_norm": event.grad_norm, "loss_scale": event.loss_scale}
        if event.learning_rates:
            numbers["learning_rate"] = event.learning_rates[0]
        for name in ("incidents", "skipped", "rolled_back", "scaler_skips"):
            numbers[name] = float(self._counts[name])
        numbers["action"] = float(event.action)
        for name, value in numbers.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(f"gradsentinel/{name}", value, event.iteration)

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Count it."""
        self._counts["incidents"] += 1
        if self._writer is not None and event.incident.action is Action.WARN:
            self._show(event.incident)

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Write the whole story of the incident as one text."""
        self._counts[str(event.recovery.outcome)] += 1
        if self._writer is not None:
            self._show(event.incident)

    def on_run_end(self, event: events.RunEnd) -> None:
        """Close what was opened here."""
        self._write_published()
        if self._own is not None:
            self._own.close()
        elif self._writer is not None:
            self._writer.flush()

    @property
    def _writer(self) -> Any:
        if self._silent:
            return None
        return self.writer if self.writer is not None else self._own

    def _write_published(self) -> None:
        """Write what other callbacks measured on steps of their own choice, once."""
        if self._run is None or self._writer is None:
            return
        for name, (step, value) in self._run.metrics.items():
            if step > self._published.get(name, -1) and math.isfinite(value):
                self._writer.add_scalar(f"gradsentinel/{name}", value, step)
                self._published[name] = step
        for name, (step, histogram) in self._run.histograms.items():
            if step > self._published.get(name, -1):
                self._write_histogram(f"gradsentinel/{name}", histogram, step)
                self._published[name] = step

    def _write_histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        """Write the powers of two that occur; TensorBoard's own buckets would put them all into one."""
        limits, counts = histogram.log2()
        if not limits:
            return
        self._writer.add_histogram_raw(
            tag,
            min=limits[0] - 1,
            max=limits[-1],
            num=sum(counts),
            sum=sum((limit - 0.5) * count for limit, count in zip(limits, counts, strict=True)),
            sum_squares=sum((limit - 0.5) ** 2 * count for limit, count in zip(limits, counts, strict=True)),
            bucket_limits=limits,
            bucket_counts=counts,
            global_step=step,
        )

    def _show(self, incident: Incident) -> None:
        self._writer.add_text("gradsentinel/incident", markdown(incident), incident.iteration)
        self._writer.flush()


def markdown(incident: Incident) -> str:
    """Return the incident as a short Markdown page."""
    lines = [
        f"### Step {incident.step}: {str(incident.kind).replace('_', ' ')}, {incident.outcome}".replace(
            "_", " "
        ),
        "",
        incident.message + ".",
        "",
        "| what | |",
        "|---|---|",
        f"| severity | {incident.severity.label} |",
        f"| where | {_cell(incident.where) or 'unknown'} |",
        f"| action | {incident.action.label} |",
        f"| recovery | {_cell(incident.recovery) or 'none'} |",
        f"| bundle | {incident.id} |",
    ]
    if incident.microbatch is not None:
        lines.append(f"| micro-batch | {incident.microbatch} |")
    if incident.ranks:
        lines.append(f"| ranks | {incident.who.split(' ', 1)[1]} |")
    if incident.tensors:
        lines += ["", "| tensor | non-finite | elements | norm |", "|---|---|---|---|"]
        lines += [f"| {t.name} | {t.nonfinite} | {t.numel} | {t.norm:.4g} |" for t in incident.tensors[:10]]
        if len(incident.tensors) > 10:
            lines.append(f"| and {len(incident.tensors) - 10} more | | | |")
    if incident.diagnosis is not None:
        diagnosis = incident.diagnosis
        sure = f" ({diagnosis.confidence:.0%} sure)" if diagnosis.confidence else ""
        lines += ["", f"**Cause**: {diagnosis.cause}{sure}", ""]
        lines += [f"- {fact}" for fact in diagnosis.evidence]
        lines += [f"- **do**: {remedy}" for remedy in diagnosis.remedy]
    lines += ["", *(f"- {note}" for note in incident.notes)]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
