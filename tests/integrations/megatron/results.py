"""What a job gives back, in the words of the contract."""

from typing import Any

from outcomes import Outcome

STATE = ("weights", "buffers", "optimizer", "scaler", "schedule", "random")


def outcome(results: list[dict[str, Any]], *, told: bool = True) -> Outcome:
    """The outcome of a training; `told` includes the losses and norms that the loop was told."""
    parts = (*STATE, "losses", "norms") if told else STATE
    return Outcome(
        states=[{part: result[part] for part in parts} for result in results],
        incidents=[result["incidents"] for result in results],
        swallowed=[result["swallowed"] for result in results],
    )
