"""What the gradients look like: histograms, largest values, zeros; and layers that have died."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.callbacks.lifeless import Lifeless, heard
from gradsentinel.callbacks.looks import Ledger, Look, Measured, Summary, look
from gradsentinel.callbacks.players import player_of
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Finding
from gradsentinel.incident import Incident
from gradsentinel.measures.mailbox import Mailbox
from gradsentinel.measures.sampling import Rotation, size_of
from gradsentinel.run import Run

_TAG = "statistics"
_LEAST_ELEMENTS = 2**10
_SMALL = 2**16
"""A model that is so small is looked at whole."""
_SHARE = 20
"""Otherwise a twentieth of it is, unless the user says how much."""
_FLOAT16 = -24
"""What is below this power of two is 0 in float16."""
_MOST_SUSPECTS = 64


@dataclass(slots=True)
class _Turn:
    """Whose turn it is among the parameters of the optimizers that step together."""

    steps: int = 0
    """Steps that were made with these optimizers."""
    sizes: list[tuple[str, int]] = field(default_factory=list)
    rotation: Rotation | None = None


@dataclass(kw_only=True)
class GradientStatistics(Detector):
    """Looks at a part of the gradients from time to time, closely, and at all of them within a known time.

    Every `every` steps it counts one sample's magnitudes by powers of two, its zeros, its largest value and
    its bits, in a few launches per piece and without a wait. Samples take turns and are of one size, from all
    over the model: `covers_after` says after how many steps everything was seen. The numbers are in
    TensorBoard, where there is a `TensorBoardCallback`; layers whose gradients are nothing but zeros, and
    gradients that hold the same bits every time, are warned of. Parameters that an incident names are
    looked at in each of the steps that follow. Called on: every rank, each for its own parameters.
    """

    every: int = 100
    """Look in every so many steps."""
    elements_per_check: int | None = None
    """At most so many elements each time; None: a twentieth of those that this rank trains, at least 65536.
    Large tensors are looked at in pieces."""
    attention_steps: int = 20
    """After an incident the parameters that it names are looked at in each of so many steps, as many elements
    at most."""
    patience: int = 3
    """A layer that is dead, or a piece with the same bits, in so many looks in a row is warned of; so are so
    many steps in a row whose gradients are all zero."""
    show: int = 20
    """So many parameters, evenly spaced, get curves and histograms of their own; those that are looked at
    after an incident do too."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _mailbox: Mailbox | None = field(default=None, init=False, repr=False)
    _turns: dict[str, _Turn] = field(default_factory=dict, init=False, repr=False)
    _looks: deque[Look] = field(default_factory=deque, init=False, repr=False)
    _ledger: Ledger = field(default_factory=Ledger, init=False, repr=False)
    _lifeless: Lifeless = field(init=False, repr=False)
    _suspects: list[str] = field(default_factory=list, init=False, repr=False)
    _attention: int = field(default=0, init=False, repr=False)
    """So many steps are left in which the suspects are looked at."""
    _closely: Rotation | None = field(default=None, init=False, repr=False)
    _close_ledger: Ledger = field(default_factory=Ledger, init=False, repr=False)
    _gradients: bool = field(default=False, init=False, repr=False)
    """True if the last step had any."""

    def __post_init__(self) -> None:
        for name in ("every", "patience"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("attention_steps", "show"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.elements_per_check is not None and self.elements_per_check < _LEAST_ELEMENTS:
            raise ConfigurationError(
                f"elements_per_check={self.elements_per_check} must be at least {_LEAST_ELEMENTS}, or None"
            )
        self._lifeless = Lifeless(self.patience)

    @property
    def covers_after(self) -> int | None:
        """Number of steps within which every element is looked at; None before the run starts.

        Of a GAN's optimizers, which take turns: steps of that one which takes longest. What has no gradient
        in a step when it is its turn has to wait for the next one.
        """
        known = [turn.rotation.covers_after(self.every) for turn in self._turns.values() if turn.rotation]
        return max(known, default=None)

    def norm_bound(self) -> float:
        """Return infinity: it does not judge the step's gradients before they are clipped."""
        return math.inf

    def on_run_start(self, event: events.RunStart) -> None:
        """Deal the parameters out."""
        self._run = event.run
        self._mailbox = Mailbox(event.run.host.device)
        self._plan(event.run, self._turns.setdefault(player_of(event.run), _Turn()))

    def on_before_clip(self, event: events.BeforeClip) -> None:
        """Send off what this step's sample looks like, and the suspects."""
        run, mailbox = self._run, self._mailbox
        if run is None or mailbox is None:
            return
        player = player_of(run)
        turn = self._turns.get(player)
        if turn is None:
            turn = self._turns[player] = _Turn()
        check, rest = divmod(turn.steps, self.every)
        turn.steps += 1
        self._gradients = len(event.gradients) > 0
        if rest and not self._attention:
            return
        send = partial(look, event.gradients, mailbox, iteration=run.iteration, player=player)
        if not rest:
            self._looks.append(send(self._plan(run, turn).sample(check), norms=True))
        if self._attention:
            self._attention -= 1
            self._looks.append(send(self._suspicious(run).sample(self._attention), norms=False))

    def on_after_step(self, event: events.AfterStep) -> Sequence[Finding]:
        """Read the looks whose numbers have arrived, publish them, and warn of what is dead."""
        for one in self._looks:
            if one.applied is None and one.iteration <= event.iteration:  # earlier ones came to nothing
                one.applied = event.applied and one.iteration == event.iteration
        findings: list[Finding] = []
        if event.applied and self._gradients and self._run is not None:
            findings += self._lifeless.step(event.grad_norm, self._run)
        while self._looks and self._looks[0].ready:
            findings += self._take(self._looks.popleft())
        return findings

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Have the parameters that it names looked at in each of the next steps; note what it tells."""
        if self._run is not None:
            heard(self._run, event.incident)
        self._suspect(event.incident)

    def on_diagnosis(self, event: events.DiagnosisEvent) -> None:
        """Likewise those of the module that turned out to be the cause, if there is nothing better."""
        self._suspect(event.incident)

    def _suspect(self, incident: Incident) -> None:
        run = self._run
        if run is None or not self.attention_steps or incident.detector.startswith(type(self).__name__):
            return
        names = _named(incident, [name for name, _ in _trained(run)])
        if names:
            self._suspects, self._attention, self._closely = names, self.attention_steps, None

    def on_run_end(self, event: events.RunEnd) -> Sequence[Finding]:
        """Read what is left."""
        findings: list[Finding] = []
        while self._looks and event.error is None:
            findings += self._take(self._looks.popleft())
        return findings

    def state_dict(self) -> dict[str, Any]:
        """Return whose turn it is, who is suspected, and what has been lifeless for how long."""
        return {
            "steps": {player: turn.steps for player, turn in self._turns.items()},
            "suspects": list(self._suspects),
            "attention": self._attention,
            "lifeless": self._lifeless.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        for player, steps in state["steps"].items():
            self._turns.setdefault(player, _Turn()).steps = int(steps)
        self._suspects, self._attention = list(state["suspects"]), int(state["attention"])
        self._closely = None
        self._lifeless.load_state_dict(state["lifeless"])

    # -- whose turn it is ----------------------------------------------------------------------------

    def _plan(self, run: Run, turn: _Turn) -> Rotation:
        """Return the rotation of the parameters that are trained now; the same one while those are."""
        mine = None
        if len(run.optimizers) < len(run.host.optimizers):
            groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
            mine = {id(parameter) for group in groups for parameter in group["params"]}
        sizes = [(name, size_of(p)) for name, p in _trained(run) if mine is None or id(p) in mine]
        if turn.rotation is None or sizes != turn.sizes:
            turn.sizes, turn.rotation = sizes, Rotation(sizes, self._budget(sizes))
        return turn.rotation

    def _suspicious(self, run: Run) -> Rotation:
        """Return the rotation of the suspects: usually all of them at once."""
        if self._closely is None:
            everything = {name: size_of(p) for name, p in _trained(run)}
            sizes = [(name, everything[name]) for name in self._suspects if name in everything]
            self._closely = Rotation(sizes, self._budget(list(everything.items())))
        return self._closely

    def _budget(self, sizes: Sequence[tuple[str, int]]) -> int:
        if self.elements_per_check is not None:
            return self.elements_per_check
        return max(_SMALL, sum(size for _, size in sizes) // _SHARE)

    # -- on the host ---------------------------------------------------------------------------------

    def _take(self, one: Look) -> list[Finding]:
        measured, norms = one.read()
        if self._mailbox is not None:
            self._mailbox.take_back(one.letter)
        self._publish(one, measured)
        if not one.applied or not one.names or self._run is None:
            return []
        sizes = dict(self._turns[one.player].sizes)
        whole = {name: norm for name, norm in norms.items() if name not in one.sharded}
        return [
            *self._lifeless.dead(whole, sizes, self._run, one.iteration),
            *self._lifeless.stuck(measured, norms, self._run, one.iteration),
        ]

    def _publish(self, one: Look, measured: Sequence[Measured]) -> None:
        """Leave the numbers where TensorBoard finds them."""
        run = self._run
        if run is None or not measured:
            return
        if one.names:
            sample = Summary("")
            for piece in measured:
                sample.add(piece)
            prefix = _TAG if one.player == "all" else f"{_TAG}/{one.player}"
            self._enter(prefix, "", sample, one.iteration)
            shown = self._shown(one.player)
            complete = [entry for entry in self._ledger.add(measured) if entry.name in shown]
        else:
            complete = self._close_ledger.add(measured)
        for entry in complete:
            self._enter(_TAG, f"/{entry.name}", entry, one.iteration)

    def _enter(self, prefix: str, suffix: str, summary: Summary, iteration: int) -> None:
        assert self._run is not None
        numbers = {
            "zeros": summary.histogram.zeros,
            "underflow": summary.histogram.below(_FLOAT16),
            "largest": summary.largest,
        }
        for name, value in numbers.items():
            self._run.metrics[f"{prefix}/{name}{suffix}"] = (iteration, value)
        self._run.histograms[f"{prefix}/log2_gradient{suffix}"] = (iteration, summary.histogram)

    def _shown(self, player: str) -> set[str]:
        names = [name for name, _ in self._turns[player].sizes]
        if not self.show:
            return set()
        return set(names[:: max(1, -(-len(names) // self.show))])


def _trained(run: Run) -> list[tuple[str, Tensor]]:
    """Return the parameters that learn now, by name; a lazy one does when it has its shape."""
    return [(name, p) for name, p in run.host.named_parameters() if p.requires_grad and not is_lazy(p)]


def _named(incident: Incident, trained: Sequence[str]) -> list[str]:
    """Return the parameters that an incident is about: those it names, or those of the module it names."""
    mentioned = {tensor.name for tensor in incident.tensors}
    found = [name for name in trained if name in mentioned]
    module = incident.diagnosis.module if incident.diagnosis is not None else None
    if not found and module:
        found = [name for name in trained if name.startswith(f"{module}.")]
    return found[:_MOST_SUSPECTS]
