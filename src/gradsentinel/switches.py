"""What, set in the environment, makes a device compute the same again; without torch, for the doctor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switch:
    """An environment variable without which a step that is computed again may differ in the last bits."""

    variable: str
    values: tuple[str, ...]
    """Those that make it deterministic, in lower case; the first one is the cheapest."""
    cost: str
    """What it costs, and when it has to be set."""
    of_ranks: bool = False
    """True if it is about what several ranks compute together."""

    def is_set(self, environment: Mapping[str, str]) -> bool:
        """Return True if the environment has it set to one of the values."""
        return environment.get(self.variable, "").strip().lower() in self.values


SWITCHES: Mapping[str, tuple[Switch, ...]] = {
    "cuda": (
        Switch(
            variable="CUBLAS_WORKSPACE_CONFIG",
            values=(":4096:8", ":16:8"),  # the two that torch takes for deterministic
            cost="set before the first matrix product; takes some MiB more, or is slower with :16:8",
        ),
    ),
    "npu": (
        Switch(
            variable="HCCL_DETERMINISTIC",
            values=("true", "strict"),
            cost="set before the first collective; reductions take a fixed order, which is slower",
            of_ranks=True,
        ),
    ),
}
"""By the type of the device, besides `torch.use_deterministic_algorithms`."""


def switched_on(variable: str) -> bool:
    """Return True if an environment variable is set to anything that does not mean "no"."""
    return os.environ.get(variable, "").strip().lower() not in {"", "0", "false", "off", "no"}
