"""What torch_npu's own check for silent errors has to say, kept for the next step.

torch_npu compares gradients with their past, and on some of its alarms the checksums of matrix products, if
NPU_ASD_CONFIG switches it on. It only logs: single spikes with INFO (shown if TORCH_NPU_LOGS=silent), several
of them, and a wrong checksum, with WARNING. Rank 0 repeats what the others logged.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from dataclasses import dataclass

from gradsentinel.measures.bounds import bounds

LOGGER = "torch_npu.silent_check"
_RANK = re.compile(r"\[Rank (\d+)\]|\bRank (\d+):")
_LONGEST = 600


@dataclass(frozen=True, slots=True)
class Alarm:
    """One warning of the check."""

    message: str

    @property
    def checksum(self) -> bool:
        """True if a matrix product came out wrong, which its maker takes for a fault of the hardware."""
        return "checksum" in self.message.lower() and "abnormal" in self.message.lower()


class SilentCheckLog(logging.Handler):
    """Hears the log of the check; a message of another rank is that rank's business.

    Args:
        rank: of this process; None hears everything.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__(logging.INFO)
        self.rank = rank
        self._most = bounds().alarms
        self.spikes = 0
        """Single spikes that were logged; by themselves they mean nothing."""
        self.dropped = 0
        self.waiting = 0
        """Alarms that nobody has taken yet; may be read without a lock."""
        self._alarms: deque[Alarm] = deque()
        self._guard = threading.Lock()

    def install(self) -> None:
        """Begin to hear."""
        logging.getLogger(LOGGER).addHandler(self)

    def remove(self) -> None:
        """Hear nothing more."""
        logging.getLogger(LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message; never raises, and a flood of them takes no more memory."""
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - another program's message; handleError reports it as logging does
            self.handleError(record)
            return
        match = _RANK.search(message)
        if match is not None and self.rank is not None and int(match[1] or match[2]) != self.rank:
            return
        with self._guard:
            if record.levelno < logging.WARNING:
                self.spikes += "spike" in message  # it also tells when it begins to look closer
            elif len(self._alarms) < self._most:
                self._alarms.append(Alarm(" ".join(message.split())[:_LONGEST]))
            else:
                self.dropped += 1
            self.waiting = len(self._alarms)

    def take(self) -> list[Alarm]:
        """Return the alarms since the last time."""
        with self._guard:
            taken = list(self._alarms)
            self._alarms.clear()
            self.waiting = 0
        return taken
