"""A fire drill: a user's own script, run as it is, with one fault put in through its sentinel."""

from __future__ import annotations

import math
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradsentinel import ambient, events
from gradsentinel.callback import Callback
from gradsentinel.campaign.drill_faults import DRILLS
from gradsentinel.errors import ConfigurationError, TrainingAborted
from gradsentinel.faults import Fault, FaultPlan, Injection
from gradsentinel.faults.tree import tensors
from gradsentinel.incident import Incident
from gradsentinel.run import Run


@dataclass(kw_only=True)
class Drill:
    """What is to happen, and what did."""

    fault: str
    step: int
    """Attempted optimizer step it happens in, from 0."""
    place: str | None = None
    """Parameter, module or field of the batch, or a pattern; None: the seed chooses."""
    persistent: bool | None = None
    """Whether it is there again when its step is computed again; None: as is usual for the fault."""
    rank: int = 0
    """Rank it happens on."""
    seed: int = 0
    runs: int = 0
    """How many runs the script has watched."""
    steps: int = 0
    """Steps of the longest of them."""
    injected: list[Injection] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    """Those from the step of the fault on."""
    earlier: int = 0
    """Incidents before it."""
    finite: bool | None = None
    """Whether the state was finite at the end; None if no run got there."""
    trouble: str | None = None
    """Why the fault could not be put in."""

    def __post_init__(self) -> None:
        if self.fault not in DRILLS:
            raise ConfigurationError(f"there is no fault {self.fault!r}: choose one of {', '.join(DRILLS)}")
        if self.step < 0:
            raise ConfigurationError(f"step {self.step}: steps count from 0")

    def make(self) -> Fault:
        """Make the fault."""
        kind = DRILLS[self.fault]
        persistent = kind.persistent if self.persistent is None else self.persistent
        when = {"steps": (self.step,), "ranks": (self.rank,), "persistent": persistent}
        return kind.make(when, self.place)


@dataclass(kw_only=True)
class Drilling(Callback):
    """Puts the fault into one run, and keeps what became of it."""

    judges_steps = False
    drill: Drill
    """What is to happen, and where it is written down."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _plan: FaultPlan | None = field(default=None, init=False, repr=False)
    _step: ExitStack = field(default_factory=ExitStack, init=False, repr=False)
    _all: ExitStack = field(default_factory=ExitStack, init=False, repr=False)
    _spoiled: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False, repr=False)
    """Tensors of a batch that were spoiled in place, and what was in them."""

    def on_run_start(self, event: events.RunStart) -> None:
        """Aim the fault at the run's model."""
        self._run = event.run
        self.drill.runs += 1
        if self.drill.injected or self.drill.trouble is not None:
            return  # it has happened in an earlier run of the script
        try:
            self._plan = FaultPlan([self.drill.make()], seed=self.drill.seed, rank=event.run.rank.rank)
            self._all.enter_context(self._plan.attach(_largest(event.run)))
        except (ValueError, LookupError) as error:
            self._give_up(error)
        self._arm(event.run.iteration)

    def on_batch(self, event: events.Batch) -> None:
        """Spoil the batch where it lies: the loop has it already."""
        if self._plan is None:
            return
        try:
            spoiled = self._plan.poison(event.batch)
        except (ValueError, LookupError) as error:
            self._give_up(error)
            return
        if spoiled is event.batch:
            return
        for (_, mine), (_, bad) in zip(tensors(event.batch), tensors(spoiled), strict=True):
            if bad is not mine:
                self._spoiled.append((mine, mine.detach().clone()))
                # It is to look as if it had been drawn so: no version number tells of the write.
                mine.data.copy_(bad.detach())

    def on_after_step(self, event: events.AfterStep) -> None:
        """Put a spoiled batch right, it may be the data set itself; go on to the next step."""
        for tensor, was in self._spoiled:
            tensor.data.copy_(was)
        self._spoiled.clear()
        self.drill.steps = max(self.drill.steps, event.iteration + 1)
        self._arm(event.iteration + 1)

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Keep the incident: it is completed while it is handled."""
        if event.incident.iteration < self.drill.step and not self.drill.injected:
            self.drill.earlier += 1
        else:
            self.drill.incidents.append(event.incident)

    def on_run_end(self, event: events.RunEnd) -> None:
        """Look at the state that the run leaves behind."""
        self._step.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fault that did not happen is told in the verdict
            self._all.close()
        if self._run is not None and event.error is None:
            self.drill.finite = self.drill.finite is not False and not self._run.health.scan()

    def _arm(self, step: int) -> None:
        self._step.close()
        if self._plan is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._step.enter_context(self._plan.at(step))
        self.drill.injected = self._plan.log

    def _give_up(self, error: Exception) -> None:
        self._step.close()
        self._plan = None
        self.drill.trouble = str(error)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a drill came to."""

    survived: bool | None
    """None if it could not be held."""
    said: str
    """In one sentence."""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 survived; 1 not; 2 the drill could not be held."""
        return {True: 0, False: 1, None: 2}[self.survived]


def hold(drill: Drill, script: Path, arguments: Sequence[str]) -> Verdict:
    """Run the script in this process with the fault in it, and judge.

    Raises:
        ConfigurationError: the script is not there.
    """
    if not script.is_file():
        raise ConfigurationError(f"there is no script {script}")
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path[0:0] = [str(script.resolve().parent)]
    ended: BaseException | None = None
    try:
        with ambient.everywhere(lambda: Drilling(drill=drill)):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        ended = left if left.code not in (None, 0) else None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ends a script is what the drill is about
        ended = error
        if not isinstance(error, TrainingAborted):
            traceback.print_exception(error)
    finally:
        sys.argv, sys.path[:] = before
    rank = int(os.environ.get("RANK", "0"))
    return judge(drill, ended, here=rank == drill.rank)


def judge(drill: Drill, ended: BaseException | None, *, here: bool = True) -> Verdict:
    """Say what a drill came to.

    Args:
        drill: what was written down.
        ended: what ended the script, if not its end.
        here: True on the rank of the fault; the others do not know what was put in.
    """
    why_not = _why_not_held(drill, ended, here=here)
    if why_not is not None:
        return Verdict(survived=None, said=why_not)
    if ended is not None:
        how = "the run was stopped" if isinstance(ended, TrainingAborted) else "the script died"
        return Verdict(survived=False, said=f"not survived: {how}: {_name(ended)}")
    if drill.finite is False:
        return Verdict(survived=False, said="not survived: the state that the run left behind is not finite")
    if not drill.incidents:
        hint = "a finite fault can be too small to be seen; SpikeCallback and MagnitudeCallback see more"
        strange = here and any(not _finite(one.after) for one in drill.injected)
        return Verdict(
            survived=False,
            said="not survived: the script ran to its end, and nobody noticed the fault",
            notes=() if strange else (hint,),
        )
    return Verdict(survived=True, said="survived: the script ran to its end, and its state is finite")


def _why_not_held(drill: Drill, ended: BaseException | None, *, here: bool) -> str | None:
    """Say why the fault did not happen; None if it did."""
    if not drill.runs:
        why = f" ({_name(ended)})" if ended is not None else ""
        return (
            f"the script made no sentinel{why}: nothing watched it, so nothing could be put in. It needs a "
            "gradsentinel.Sentinel, one of our callbacks in its Trainer, or megatron.attach"
        )
    if drill.trouble is not None:
        return f"the fault does not fit this script: {drill.trouble}"
    if drill.injected or not here:
        return None
    if ended is not None:
        return f"the script ended before the fault could happen: {_name(ended)}"
    if drill.steps <= drill.step:
        made = f"the script made {drill.steps} steps"
        return f"step {drill.step} was never reached: {made}, give an earlier --step"
    return (
        f"the fault did not happen in step {drill.step}: {drill.make().unfired}; where batches do not pass "
        "through the sentinel, faults in samples cannot be put in"
    )


def _largest(run: Run) -> nn.Module:
    """Return the model of a run, of several the one with most parameters."""
    roots = [root for _, root in run.host.modules()]
    return max(roots, key=lambda root: sum(p.numel() for p in root.parameters()))


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _name(error: BaseException | None) -> str:
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    return f"{type(error).__name__}: {error}"
