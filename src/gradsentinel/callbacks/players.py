"""Which of several optimizers that take turns a step belongs to: a GAN's players have nothing in common."""

from __future__ import annotations

from gradsentinel.run import Run


def player_of(run: Run) -> str:
    """Return a name for the optimizers of the step in flight, the same in a restarted run."""
    everyone, mine = run.host.optimizers, run.optimizers
    if len(mine) == len(everyone):
        return "all"
    places = (str(place) for place, one in enumerate(everyone) if any(one is other for other in mine))
    return "+".join(places)
