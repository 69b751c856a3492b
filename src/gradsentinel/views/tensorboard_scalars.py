"""Scalars of a run from TensorBoard's own files, for runs whose event log has no numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from gradsentinel.views.event_lines import PATIENCE
from gradsentinel.views.files import Files
from gradsentinel.views.series import Series

logger = logging.getLogger("gradsentinel")

_PREFIX = "gradsentinel/"
_MOST_TAGS = 500
_MOST_FILES = 100


class TensorBoardScalars:
    """The scalars in `events.out.tfevents.*` of a run directory; what is new is read in slices.

    Without tensorboard there are none.
    """

    def __init__(self, files: Files, *names: str) -> None:
        self._files = files
        self._names = names
        self._loaders: dict[str, Any] = {}
        self._reading: Iterator[Any] | None = None
        self._waiting: list[str] = []
        self.series: dict[str, Series] = {}
        self.complete = True
        """False while there is more to read."""

    def refresh(self, patience: float = PATIENCE) -> None:
        """Read what is new, for so many seconds at most."""
        deadline = time.monotonic() + patience
        if self._reading is None and not self._waiting:
            self._waiting = self._event_files()
        while self._reading is not None or self._waiting:
            if self._reading is None:
                loader = self._loader(self._waiting.pop(0))
                self._reading = None if loader is None else loader.Load()
                continue
            for event in self._reading:
                self._take(event)
                if time.monotonic() > deadline:
                    self.complete = False
                    return
            self._reading = None
        self.complete = True

    def _event_files(self) -> list[str]:
        found = [name for name in self._files.entries(*self._names) if ".tfevents." in name]
        return [name for name in found if self._files.stat(*self._names, name) is not None][:_MOST_FILES]

    def _loader(self, name: str) -> Any:
        if name not in self._loaders:
            try:
                from tensorboard.backend.event_processing import event_file_loader  # noqa: PLC0415 - optional
            except ImportError:
                return None
            path = self._files.path(*self._names, name)
            self._loaders[name] = event_file_loader.EventFileLoader(str(path))
        return self._loaders[name]

    def _take(self, event: Any) -> None:
        for value in event.summary.value:
            if value.tensor.dtype not in {1, 2} or value.tensor.tensor_shape.dim:  # float, double; scalars
                continue
            numbers = value.tensor.float_val or value.tensor.double_val
            if not numbers and len(value.tensor.tensor_content) == 4:
                import struct  # noqa: PLC0415 - seldom

                numbers = struct.unpack("<f", value.tensor.tensor_content)
            tag = value.tag.removeprefix(_PREFIX)
            if not numbers or (tag not in self.series and len(self.series) >= _MOST_TAGS):
                continue
            series = self.series.setdefault(tag, Series())
            if len(series) and event.step < series.x[-1]:  # TensorBoard, too, drops what goes back
                continue
            series.add(int(event.step), float(numbers[0]))
