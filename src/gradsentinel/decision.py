"""What to do about a step, how bad it is, what it is about, and how ranks merge their answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from gradsentinel.errors import ConfigurationError

if TYPE_CHECKING:
    from gradsentinel.incident import Incident


class Action(IntEnum):
    """What to do about an incident, from harmless to drastic; merging takes the most severe."""

    CONTINUE = 0
    WARN = 1
    RETRY = 2
    SKIP = 3
    ROLLBACK = 4
    ABORT = 5

    @property
    def label(self) -> str:
        """The lower-case word used in files and logs."""
        return self.name.lower()

    @classmethod
    def parse(cls, value: Action | str) -> Action:
        """Return the action for a member or its name; raises ConfigurationError naming the choices."""
        if isinstance(value, Action):
            return value
        try:
            return cls[value.upper()]
        except (KeyError, AttributeError):
            choices = ", ".join(action.label for action in cls)
            raise ConfigurationError(f"unknown action {value!r}; choose one of: {choices}") from None


class Severity(IntEnum):
    """How bad an incident is for the run as a whole."""

    WARNING = 1
    ERROR = 2
    CRITICAL = 3

    @property
    def label(self) -> str:
        """The lower-case word used in files and logs."""
        return self.name.lower()


class Kind(str, Enum):
    """What an incident is about."""

    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_INPUT = "nonfinite_input"
    NONFINITE_GRADIENT = "nonfinite_gradient"
    NONFINITE_PARAMETER = "nonfinite_parameter"
    NONFINITE_STATE = "nonfinite_state"
    SATURATION = "saturation"
    MAGNITUDE = "magnitude"
    SPIKE = "spike"
    STAGNATION = "stagnation"
    RANK_DIVERGENCE = "rank_divergence"
    LOSS_SCALE = "loss_scale"
    DEVICE_HEALTH = "device_health"
    CALLBACK_ERROR = "callback_error"
    CUSTOM = "custom"

    def __str__(self) -> str:
        return self.value


def merge(actions: Iterable[Action]) -> Action:
    """Return the most severe action; CONTINUE if there is none.

    Associative, commutative and idempotent, so ranks may merge in any order and agree.
    """
    return max(actions, default=Action.CONTINUE)


@dataclass(slots=True, kw_only=True)  # made in each step: to make a frozen one takes three times as long
class Decision:
    """What the ranks decided about the step in flight; nobody changes it."""

    apply: bool
    """True when the optimizer should step."""
    step: int = 0
    """The step it is about; the run may go on from another one."""
    action: Action = Action.CONTINUE
    incident: Incident | None = None
    went_back: bool = False
    """True when the run goes on from an earlier step."""
    grad_norm: float = 0.0
    loss: float | None = None
    safe_norm: float | None = None
    """The true global norm where the usual formula overflowed on finite gradients; clip with this one."""
    recomputed: bool = False
    """True when the gradients were computed anew and must be looked at again."""
    loss_scale: float | None = None
    scaler_skips: bool = False
    """True when the loss scaler is going to drop this step by itself."""
    glanced: bool = False
    """True when the norm and the losses said enough, and nobody has looked at the gradients themselves."""
