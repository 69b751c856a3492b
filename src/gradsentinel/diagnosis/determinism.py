"""Replays under deterministic algorithms, for who asks: each switch is put back, what stayed open is said.

Other kernels than the run's are another experiment, so nobody gets them unasked: they tell whether a step
that comes out differently each time does so by the order of its sums, or by something else.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradsentinel.devices import Device, device_of
from gradsentinel.incident import Incident, fold
from gradsentinel.run import Run
from gradsentinel.switches import switched_on

VARIABLE = "GRADSENTINEL_DETERMINISTIC_REPLAY"
"""Set to 1 to have every diagnosis of a run computed so."""
_WITHOUT = re.compile(r"(\S+) does not have a deterministic implementation")
_CUBLAS = re.compile(r".*is not deterministic because it uses CuBLAS", re.DOTALL)
"""What torch says where CUBLAS_WORKSPACE_CONFIG is missing; told here by its name."""
_on = False


@dataclass(slots=True, kw_only=True)
class Conditions:
    """How a replay was computed, for its reader."""

    asked: str = ""
    """By what it was asked for; empty: it was not, and nothing was switched."""
    already: bool = False
    """True if the program itself computes so."""
    missing: tuple[str, ...] = ()
    """Environment variables that are not set, and that would have had to be before the process began."""
    without: dict[str, None] = field(default_factory=dict)
    """Operators that have no deterministic kernel, in the order in which they came up."""

    @property
    def switched(self) -> bool:
        """True if the kernels are not those of the run."""
        return bool(self.asked) and not self.already

    def said(self) -> tuple[str, ...]:
        """Return it in sentences; none if nobody asked."""
        if not self.asked:
            return ()
        how = (
            f"run again with deterministic algorithms ({self.asked}), as the run itself"
            if self.already
            else f"run again with deterministic algorithms ({self.asked}): not by the very kernels of the run"
        )
        found = [how]
        if self.without:
            found.append(f"computed as ever, for lack of a deterministic kernel: {fold(list(self.without))}")
        found += [
            f"{name} is not set, and counts from the start of the process only" for name in self.missing
        ]
        return tuple(found)


def asked() -> str:
    """Return by what the environment asks for it; empty if it does not."""
    return f"{VARIABLE}=1" if switched_on(VARIABLE) else ""


@contextmanager
def deterministic(why: str, device: Device, *, ranks: bool = False) -> Iterator[Conditions]:
    """Compute in fixed orders within the block, where `why` is not empty; afterwards all is as it was.

    An operator without a deterministic kernel runs as ever and is noted: the fault that is looked for must
    come up again, and not an error about the switch. Fresh memory is not filled, as it is not in the run.
    Within another such block nothing changes. It is the whole process that computes so meanwhile.

    Args:
        why: by what it was asked for, to be named.
        device: what computes.
        ranks: True if what is compared went through a reduction over several ranks.
    """
    global _on  # noqa: PLW0603 - the switches are the process's own, too
    if not why or _on:
        yield Conditions()
        return
    conditions = Conditions(asked=why, already=torch.are_deterministic_algorithms_enabled())
    with ExitStack() as stack:
        conditions.missing = tuple(_environment(stack, device, ranks=ranks))
        _on = True
        stack.callback(_off)
        if not conditions.already:
            _switch(stack)
        stack.enter_context(_noting(conditions))
        yield conditions


def deterministically(diagnose: Callable[[Incident, Run], None]) -> Callable[[Incident, Run], None]:
    """Return a diagnoser that computes so if the environment asks for it, and says so in its diagnosis."""

    def diagnose_so(incident: Incident, run: Run) -> None:
        before, ranks = incident.diagnosis, run.consensus.world_size > 1
        with deterministic(asked(), device_of(run.host.device), ranks=ranks) as conditions:
            diagnose(incident, run)
        found = incident.diagnosis
        if found is not None and found is not before:
            incident.diagnosis = replace(found, evidence=(*found.evidence, *conditions.said()))

    return diagnose_so


# -- the switches --------------------------------------------------------------------------------------


def _off() -> None:
    global _on  # noqa: PLW0603 - as above
    _on = False


def _environment(stack: ExitStack, device: Device, *, ranks: bool) -> Iterator[str]:
    """Set what a device that has not begun yet will still read; yield what comes too late."""
    for switch in device.switches:
        if switch.is_set(os.environ) or (switch.of_ranks and not ranks):
            continue
        if device.initialised:
            yield switch.variable
            continue
        stack.callback(_put_back, switch.variable, os.environ.get(switch.variable))
        os.environ[switch.variable] = switch.values[0]


def _put_back(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def _switch(stack: ExitStack) -> None:
    # Not by use_deterministic_algorithms, which imports the compiler.
    stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
    torch.set_deterministic_debug_mode("warn")
    memory: Any = torch.utils.deterministic
    stack.callback(setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory)
    memory.fill_uninitialized_memory = False
    cudnn: Any = torch.backends.cudnn
    stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
    cudnn.benchmark = False  # picks an algorithm by its speed of the moment


@contextmanager
def _noting(conditions: Conditions) -> Iterator[None]:
    """Note what torch warns of; other warnings go where they would have gone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_WITHOUT.pattern}")
        warnings.filterwarnings("always", message=_CUBLAS.pattern)
        shown = warnings.showwarning

        def note(message: Warning | str, *where: Any) -> None:
            text = str(message)
            found = _WITHOUT.search(text)
            if found is not None:
                conditions.without[found[1]] = None
            elif _CUBLAS.match(text) is None:
                shown(message, *where)

        warnings.showwarning = note  # type: ignore[assignment]
        yield
