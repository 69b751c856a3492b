"""What one rank found out about an incident."""

from __future__ import annotations

from dataclasses import dataclass

from gradsentinel.evidence import Diagnosis, Sample


@dataclass(slots=True, kw_only=True)
class Report:
    """What one rank found out; what travels to the others."""

    diagnosis: Diagnosis | None = None
    notes: tuple[str, ...] = ()
    microbatch: int | None = None
    samples: tuple[Sample, ...] = ()
    microbatches: tuple[int, ...] = ()
    """All that are not finite, as far as they were run again."""
    made_by_the_loop: bool = False
    """True if the batch is sound, and what the loop made of it is not."""
