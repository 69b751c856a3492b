"""An MLflow run as a sink."""

from __future__ import annotations

import re
import time as clock
from collections.abc import Mapping
from typing import Any

from gradsentinel.errors import ConfigurationError

_MOST = 1000
"""Metrics that MLflow takes in one call."""
_MOST_WAITING = 100_000
"""Metrics that are kept while a server cannot be reached; the oldest go first."""
_REFUSED = re.compile(r"[^\w\-./ :]")
"""Characters that a name in MLflow cannot have."""


class MLflowSink:
    """Logs to a run of MLflow, through its client; needs gradsentinel[mlflow].

    Numbers become metrics `gradsentinel/<name>`, texts artifacts `gradsentinel/<tag>-<step>.md`. The active
    run of MLflow's fluent interface is left alone.

    Args:
        tracking_uri: a server, or a file such as `sqlite:///mlflow.db`; None takes MLflow's own setting.
        experiment: its name; it is made if there is none.
        run_id: a run to go on with, which is left open; None makes one, and ends it.
        run_name: what to call a run that is made.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "gradsentinel",
        run_id: str | None = None,
        run_name: str | None = None,
    ) -> None:
        try:
            from mlflow.tracking import MlflowClient  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise ConfigurationError("MLflowSink needs mlflow: pip install 'gradsentinel[mlflow]'") from error
        self._make_client = MlflowClient
        self._tracking_uri, self._experiment, self._run_name = tracking_uri, experiment, run_name
        self._owned = run_id is None
        self.run_id = run_id
        """The run of MLflow; None until the first thing is written."""
        self._client: Any = None
        self._waiting: list[Any] = []

    def scalars(self, step: int, numbers: Mapping[str, float], time: float | None = None) -> None:
        """Keep numbers of a step; they are sent with `flush`."""
        from mlflow.entities import Metric  # noqa: PLC0415 - an optional dependency

        at = int((clock.time() if time is None else time) * 1000)
        self._waiting += [Metric(_name(name), value, at, step) for name, value in numbers.items()]
        del self._waiting[:-_MOST_WAITING]

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Send a text."""
        self.flush()
        self._connect().log_text(self.run_id, markdown, f"{_name(tag)}-{step:06d}.md")

    def flush(self) -> None:
        """Send the numbers that wait; they are kept for the next time if that fails."""
        while self._waiting:
            bunch = self._waiting[:_MOST]
            self._connect().log_batch(self.run_id, metrics=bunch)
            del self._waiting[: len(bunch)]

    def close(self) -> None:
        """Send what is left, and end the run if it was made here."""
        self.flush()
        if self._owned and self.run_id is not None:
            self._connect().set_terminated(self.run_id)

    def _connect(self) -> Any:
        """Return the client, with a run to write to; on the first call this asks the server."""
        if self._client is None:
            client = self._make_client(tracking_uri=self._tracking_uri)
            if self.run_id is None:
                known = client.get_experiment_by_name(self._experiment)
                place = client.create_experiment(self._experiment) if known is None else known.experiment_id
                self.run_id = client.create_run(place, run_name=self._run_name).info.run_id
            self._client = client
        return self._client


def _name(name: str) -> str:
    """Return a name that MLflow takes."""
    return _REFUSED.sub("_", f"gradsentinel/{name}".replace("..", "_"))[:250]
