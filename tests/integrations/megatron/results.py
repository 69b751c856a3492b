"""What a job gives back, in the words of the contract."""

import importlib.metadata
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


def release() -> tuple[int, int]:
    """The release of megatron-core that the tests run on; (1, 0) if there is none, and they are skipped."""
    try:
        major, minor = importlib.metadata.version("megatron-core").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return (1, 0)
    return int(major), int(minor)
