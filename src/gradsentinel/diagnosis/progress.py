"""Shows that a diagnosis is under way, once it takes more than a moment."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from typing_extensions import Self

logger = logging.getLogger("gradsentinel")

_MOMENT = 1.0
"""Seconds for which nothing is shown."""


class Progress(AbstractContextManager["Progress"]):
    """A bar on a terminal's stderr, or one line in the log where there is no terminal; after a second.

    A timer's thread shows it, so that it also comes while this one waits for another rank.

    Args:
        step: number of the step that is looked into.
        budget: seconds that the diagnosis may take.
        shown: False shows nothing at all, as on every rank but the first.
        console: where to show it; None takes stderr.
        after: seconds for which nothing is shown.
    """

    def __init__(
        self,
        step: int,
        budget: float,
        *,
        shown: bool = True,
        console: Console | None = None,
        after: float = _MOMENT,
    ) -> None:
        self._step, self._budget, self._shown = step, budget, shown
        self._console = console
        self._stage, self._done, self._total = "", 0, 0
        self._bar: Bar | None = None
        self._task: Any = None
        self._lock = threading.Lock()
        self._over = False
        self._timer = threading.Timer(after, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self._shown:
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._bar is not None:
                self._bar.stop()

    def expect(self, total: int) -> None:
        """Say how many stages there will be, about."""
        self._total = total

    def stage(self, text: str) -> None:
        """Say what is done now; the stage before is over."""
        self._stage, self._done = text, self._done + bool(self._stage)
        with self._lock:
            if self._bar is not None and not self._over:
                self._show(self._bar)

    def _begin(self) -> None:
        with self._lock, suppress(Exception):  # a display that fails must not fail the run
            if self._over:
                return
            if not (sys.stderr.isatty() if self._console is None else self._console.is_terminal):
                logger.warning(
                    "step %d: looking for the cause, which may take up to %g s (diagnosis_budget)",
                    self._step,
                    self._budget,
                )
                return
            self._bar = self._make_bar()
            self._task = self._bar.add_task(self._stage, total=None)
            self._show(self._bar)
            self._bar.start()

    def _make_bar(self) -> Bar:
        from rich import progress  # noqa: PLC0415 - importing it takes longer than most diagnoses
        from rich.console import Console  # noqa: PLC0415 - likewise

        return progress.Progress(
            progress.TextColumn(f"step {self._step}, looking for the cause: {{task.description}}"),
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn(f"of at most {self._budget:g} s"),
            console=self._console or Console(stderr=True),
            transient=True,
        )

    def _show(self, bar: Bar) -> None:
        total = max(self._total, self._done + 1)
        bar.update(self._task, description=self._stage, completed=self._done, total=total)
