"""Where an adapter's run is written, for frameworks that take nothing but a list of callbacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsentinel.assembly import check_seconds
from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError


@dataclass(kw_only=True)
class RunSettings(Callback):
    """No detector: where an adapter's run is written, and how patient it is."""

    run_dir: str | os.PathLike[str] | None = None
    """Where events, incidents and snapshots go; None takes a place beside the framework's own logs."""
    timeout: float = 600.0
    """Seconds that a rank may keep the others waiting before they stop, naming it."""
    diagnosis_budget: float = 30.0
    """Seconds that finding out about one incident may take."""
    mesh: Any = field(default=None, repr=False)
    """The job's DeviceMesh, whose dimensions become a rank's coordinates."""

    def __post_init__(self) -> None:
        check_seconds(self.timeout, self.diagnosis_budget)

    @classmethod
    def among(cls, callbacks: Sequence[Callback]) -> RunSettings:
        """Return the settings in a list of callbacks, or the defaults; raises ConfigurationError for two."""
        found = [one for one in callbacks if isinstance(one, cls)]
        if len(found) > 1:
            raise ConfigurationError(f"{len(found)} RunSettings in one list of callbacks: give one")
        return found[0] if found else cls()
