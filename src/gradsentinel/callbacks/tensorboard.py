"""Norms, counters, actions and incidents in TensorBoard."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gradsentinel.callback import Callback
from gradsentinel.callbacks.metrics import GathersNumbers
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Incident
from gradsentinel.measures.histogram import Histogram, count_exponents
from gradsentinel.measures.inspection import parts_of, readable, values_of
from gradsentinel.run import Run
from gradsentinel.sinks.markdown import markdown
from gradsentinel.sinks.rows import Picture, Row
from gradsentinel.sinks.tensorboard import TensorBoardSink
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

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


_WHAT = "TensorBoard's file"
_A_LITTLE = 1 << 16
"""Bytes that the disk must take before another file is begun."""
_MOST_SUSPECTS = 8
"""Histograms of an incident: of so many parameters at most."""


@dataclass(kw_only=True)
class TensorBoardCallback(GathersNumbers):
    """Writes scalars, and for each incident a readable text and histograms of the suspects.

    Needs gradsentinel[tensorboard]. The axis is the number of attempted steps, which never goes back, since
    TensorBoard drops what does. The numbers are those the sentinel read anyway: no further wait for the
    device. They are handed to the writer in bunches. Called on: every rank; rank 0 writes.
    """

    log_dir: str | Path | None = None
    """Where to write; None means into the run directory itself."""
    writer: Any = field(default=None, repr=False)  # an object of this process, no setting to compare
    """A SummaryWriter to write to instead of making one, such as a logger's own; it is not closed."""
    _sink: TensorBoardSink | None = field(default=None, init=False, repr=False)
    _owner: Run | None = field(default=None, init=False, repr=False)
    """The run that is written about, also at its end."""
    _is_missing: bool = field(default=False, init=False, repr=False)
    """True once something is missing from the file, until there is another one."""
    _unwrap: Callable[[], object] | None = field(default=None, init=False, repr=False)
    """Takes back what was done to a writer that was given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.writer is None and importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(
                "TensorBoardCallback needs tensorboard: pip install 'gradsentinel[tensorboard]'"
            )

    def _open(self, run: Run) -> None:
        """Open the writer, lay out the custom page and write the settings."""
        self._owner = run
        if self.writer is not None:
            self._unwrap = _before_closing(self.writer, self._hand_over_all)
        self._tried(run, self._begin)

    def _begin(self, run: Run) -> None:
        where = self.log_dir or run.directory.path
        sink = TensorBoardSink(where) if self.writer is None else TensorBoardSink(writer=self.writer)
        self._sink = sink
        sink.layout(_LAYOUT)
        sink.hparams(dict(settings_of(run.callbacks)))

    def _tried(self, run: Run, write: Callable[[Run], None]) -> None:
        """Write, or give the file up: after an error tensorboard's own thread takes nothing any more."""
        try:
            write(run)
        except OSError as error:
            if self.writer is not None:
                raise
            sink, self._sink = self._sink, None
            if sink is not None:
                with suppress(Exception):  # it says once more that it has failed
                    sink.close()
            lost = "" if self._is_missing else "what TensorBoard was given meanwhile"
            self._is_missing = True
            run.disk.refused(_WHAT, error, partial(self._again, run), lost=lost)

    def _again(self, run: Run) -> None:
        """Begin another file, which TensorBoard shows as one with the first, if the disk takes one."""
        try:
            _probe(Path(self.log_dir or run.directory.path))
        except OSError as error:
            run.disk.refused(_WHAT, error, partial(self._again, run))
            return
        self._tried(run, self._begin)
        if self._sink is not None:
            self._is_missing = False
            run.disk.taken(_WHAT)

    def _hand_over(self, rows: Sequence[Row], pictures: Sequence[Picture]) -> None:
        if self._owner is not None and (rows or pictures):
            self._tried(self._owner, lambda _: self._write(rows, pictures))

    def _write(self, rows: Sequence[Row], pictures: Sequence[Picture]) -> None:
        sink = self._sink
        if sink is None:
            return
        for row in rows:
            sink.scalars(row.step, row.numbers, row.time)
        for picture in pictures:
            sink.histogram(picture.step, picture.name, picture.histogram, picture.time)
        sink.flush()  # a process that is killed loses what is gathered next, and no more

    def _hand_over_all(self) -> None:
        if self._run is not None:
            self._gathered.take_published(self._run)
        self._hand_over(self._gathered.rows(), self._gathered.pictures())

    def _look_at(self, incident: Incident, run: Run) -> None:
        """Write how large the numbers in the suspects and their gradients are."""
        if self._sink is None or not incident.tensors:
            return
        self._tried(run, lambda run: self._show_suspects(incident, run))

    def _show_suspects(self, incident: Incident, run: Run) -> None:
        assert self._sink is not None
        try:
            for name, histogram in _histograms(incident, run):
                self._sink.histogram(incident.iteration, f"suspects/{name}", histogram)
        except OSError:
            raise
        except Exception as error:  # a picture is not worth the callback: the numbers go on
            logger.exception("step %d: the histograms of the suspects could not be written", incident.step)
            record_swallowed(error)

    def _show(self, incident: Incident) -> None:
        sink = self._sink
        if sink is not None and self._owner is not None:
            text = markdown(incident)
            self._tried(self._owner, lambda _: sink.text(incident.iteration, "incident", text))

    def _close(self) -> None:
        if self._unwrap is not None:
            self._unwrap()
        sink, self._sink = self._sink, None
        if sink is not None and self._owner is not None:
            self._tried(self._owner, lambda _: sink.close())


def _probe(directory: Path) -> None:
    """Raise OSError if the disk takes no more than a few bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"0" * _A_LITTLE)
        file.flush()
        os.fsync(file.fileno())


def settings_of(callbacks: Sequence[Callback]) -> Iterator[tuple[str, str | float | bool]]:
    """Yield the settings of callbacks as `NanCallback/action`; what they keep out of their repr is none."""
    for callback in callbacks:
        kind = type(callback).__name__
        yield kind, True
        for one in dataclasses.fields(callback) if dataclasses.is_dataclass(callback) else ():
            if not (one.init and one.repr) or one.name.startswith("_"):
                continue
            value = getattr(callback, one.name, None)
            if isinstance(value, Action):
                value = value.label
            if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
                value = str(value)
            yield f"{kind}/{one.name}", value


def _before_closing(writer: Any, hand_over: Callable[[], None]) -> Callable[[], object]:
    """Have this writer take what is gathered when its owner closes it; returns what undoes that.

    A framework may close its own writer before our run has ended; what came later would need a file anew.
    """
    close = getattr(writer, "close", None)
    if not callable(close) or "close" in getattr(writer, "__dict__", {"close": None}):
        return lambda: None

    def handed_over() -> Any:
        hand_over()
        return close()

    writer.close = handed_over
    return lambda: vars(writer).pop("close", None)


def _histograms(incident: Incident, run: Run) -> Iterator[tuple[str, Histogram]]:
    """Yield histograms of the tensors that an incident names, as held here; waits for the device."""
    names = {tensor.name for tensor in incident.tensors[:_MOST_SUSPECTS]}
    for name, parameter in run.host.named_parameters():
        if name not in names:
            continue
        yield from _histogram(f"{name}/values", parameter)
        if run.late_step is None and parameter.grad is not None:  # else the gradient is of another step
            yield from _histogram(f"{name}/gradient", parameter.grad)


def _histogram(name: str, tensor: Tensor) -> Iterator[tuple[str, Histogram]]:
    if readable(tensor) is None:
        values = parts_of(values_of(tensor)).flatten()
        yield name, Histogram(count_exponents(values).tolist())
