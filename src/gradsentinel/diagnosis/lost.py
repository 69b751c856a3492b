"""The operator of a narrow type that lost what a wider one stumbles over later, to be run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradsentinel.diagnosis.guilty import Guilty
from gradsentinel.diagnosis.narrow import lost_index
from gradsentinel.diagnosis.operator import OperatorCall, name_of
from gradsentinel.diagnosis.storable import nbytes
from gradsentinel.diagnosis.stored_call import call_to_tree
from gradsentinel.evidence import Diagnosis


@dataclass(frozen=True, slots=True)
class Lost:
    """The call, and the element of its result that became 0, or overflowed."""

    call: OperatorCall
    index: tuple[int, ...]
    overflow: bool


def lost_of(
    guilty: Guilty, diagnosis: Diagnosis, room: int
) -> tuple[Lost, dict[str, Any]] | tuple[None, None]:
    """Return the operator to blame for what a narrow type lost, and its arguments for an archive.

    None if it blames none, if its inputs take more than `room` bytes, or if it loses nothing now.

    Raises:
        CannotRun: if an argument cannot be stored.
    """
    event = None if guilty.findings is None else guilty.findings.lost
    if event is None or diagnosis.cause != "precision":
        return None, None
    index = lost_index(event)
    if index is None or nbytes([event.args, dict(event.kwargs)]) > room:
        return None, None
    device = next((str(result.device) for result in event.results), "cpu")
    call = OperatorCall(
        name=name_of(event.function), args=tuple(event.args), kwargs=dict(event.kwargs), device=device
    )
    return Lost(call, index, bool(event.badness)), call_to_tree(call)[0]
