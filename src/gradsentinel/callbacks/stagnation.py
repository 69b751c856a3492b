"""Gradients that have stopped: of a dead layer, or the same bits from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.callbacks.lifeless import heard, untold
from gradsentinel.callbacks.players import player_of
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.incident import fold
from gradsentinel.run import Run

_TINY = 1e-6
"""A norm below this share of its usual one is none."""
_SHARE = 0.05
"""How much of each norm goes into the usual one."""
_LONGER = 4
"""What has paused before is dead after so many times its longest pause."""
_MANY = 16
"""Fewer elements may have the same gradient twice by chance."""
_ALL = 4
"""If all norms of so many tensors are the same, once is enough."""
_DEAD, _STUCK = 0, 1


class _State(NamedTuple):
    """What is known of each parameter, on the device; replaced as a whole."""

    norms: Tensor
    """Of the step before."""
    usual: Tensor
    seen: Tensor
    """How many norms the usual one was learnt from."""
    streak: Tensor
    """Two rows: how many steps in a row it was dead, and the same."""
    longest: Tensor
    """Two rows: the longest of these that ended again."""


@dataclass(slots=True)
class _Player:
    """The parameters of optimizers that step together."""

    names: tuple[str, ...]
    least: Tensor
    """Two rows: after how many steps in a row a parameter is reported at the earliest."""
    state: _State
    places: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    """Where the norms of a step belong in which not every parameter has a gradient."""
    held: Tensor | None = None
    """Two rows: what was due and may not have been told, to be asked about again while it goes on."""
    again: int = 0
    """In which attempted step."""
    wait: int = 0
    """So many steps later than before, each time twice as many."""


class _Seen(NamedTuple):
    """What is needed to tell of a step, without its gradients: those must not outlive it."""

    player: _Player
    names: tuple[str, ...]
    fired: Tensor
    streak: Tensor
    norms: Tensor
    losses: Sequence[Tensor]
    iteration: int


@dataclass(kw_only=True)
class StagnationCallback(Detector):
    """Warns when the gradient of a parameter vanishes for good, or is the same bits step after step.

    Dead: its norm was alive and is now below a millionth of its usual value, or it gets no gradient at all.
    Stuck: its norm is bit for bit that of the step before, as when a buffer is never written again. What
    pauses now and then, such as an expert without tokens, is reported only after four times its longest
    pause. On the device, about 30 launches a step whatever the number of parameters, no wait; memory: eight
    numbers for each parameter tensor. Called on: every rank.
    """

    dead_after: int = 10
    """Steps in a row without a gradient."""
    stuck_after: int = 3
    """Repetitions in a row; one is enough if the gradients of all parameters repeat."""
    warmup: int = 20
    """Nothing is reported of a parameter before it had so many gradients."""
    action: Action | str = Action.WARN
    """warn only reports; retry, skip, rollback and abort act."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _players: dict[str, _Player] = field(default_factory=dict, init=False, repr=False)
    _late: Finding | None = field(default=None, init=False, repr=False)
    """What is told after the step, since there is no agreement before it."""

    def __post_init__(self) -> None:
        self.action = Action.parse(self.action)
        if self.action is Action.CONTINUE:
            raise ConfigurationError(
                "action='continue' would do nothing; leave the callback out, or use warn"
            )
        if min(self.dead_after, self.stuck_after, self.warmup) < 1:
            raise ConfigurationError("dead_after, stuck_after and warmup are numbers of steps, at least 1")

    def norm_bound(self) -> float | None:
        """Return infinity as long as it only warns: that may be said a step later, with the next alarm."""
        return float("inf") if self.action is Action.WARN else None

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run

    def on_before_clip(self, event: events.BeforeClip) -> Finding | None:
        """Compare the norms with those of the step before and with the usual ones."""
        if self._run is None:
            return None
        names = event.gradients.names
        norms = event.gradients.norms.detach().to(torch.float32)
        key = player_of(self._run)
        player = self._players.get(key)
        if player is None or names != player.names:
            if not names:
                return None
            if player is None or not set(names) <= set(player.names):
                sizes = [gradient.numel() for gradient in event.gradients.gradients]
                player = self._players[key] = self._begin(names, sizes, norms)
            norms = _placed(player, names, norms)
        fired = self._judge(player, norms)
        if player.held is not None and self._run.iteration >= player.again:
            due = torch.maximum(player.least, _LONGER * player.state.longest)
            player.held = player.held.to(fired.device).logical_and(player.state.streak >= due)
            fired = fired.logical_or(player.held)
        seen = _Seen(
            player, player.names, fired, player.state.streak, norms, event.losses, self._run.iteration
        )
        finding = Finding(
            kind=Kind.STAGNATION,
            value=fired.any(),
            action=Action.parse(self.action),
            confirm=partial(self._confirm, seen),
        )
        if event.gradients.alarm is None:
            return finding
        self._late = finding  # the ranks go by the norm alone, and what is found now would reach nobody
        return None

    def on_after_step(self, event: events.AfterStep) -> Finding | None:
        """Hand in what no rank was to be asked about before the step."""
        late, self._late = self._late, None
        return late

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Note what it tells: that is no news any more."""
        if self._run is not None:
            heard(self._run, event.incident)

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Begin to count anew where the run goes on: the steps between were undone."""
        if event.recovery.step is None:
            return
        for player in self._players.values():
            state = player.state
            player.state = state._replace(
                norms=torch.full_like(state.norms, float("nan")), streak=torch.zeros_like(state.streak)
            )

    def _begin(self, names: tuple[str, ...], sizes: Sequence[int], norms: Tensor) -> _Player:
        device = norms.device
        never = torch.iinfo(torch.int32).max // (2 * _LONGER)
        least = [
            [self.dead_after] * len(names),
            [self.stuck_after if size >= _MANY else never for size in sizes],
        ]
        none = torch.zeros((2, len(names)), dtype=torch.int32, device=device)
        return _Player(
            names=names,
            least=torch.tensor(least, dtype=torch.int32, device=device),
            state=_State(
                norms=torch.full_like(norms, float("nan")),
                usual=torch.zeros_like(norms),
                seen=none[0],
                streak=none,
                longest=none,
            ),
        )

    @torch.no_grad()
    def _judge(self, player: _Player, norms: Tensor) -> Tensor:
        """Return which parameters are to be reported as dead and as stuck, two rows; learns, no wait."""
        state = player.state
        known = state.seen >= self.warmup
        alive = (norms > _TINY * state.usual).logical_and(norms < float("inf"))
        gone = norms <= _TINY * state.usual
        same = (norms == state.norms).logical_and(alive)
        now = torch.stack([gone, same])
        streak = (state.streak + 1) * now
        longest = torch.where(now, state.longest, torch.maximum(state.longest, state.streak))
        due = torch.maximum(player.least, _LONGER * longest)
        fired = (streak == due).logical_and(known)
        if len(player.names) >= _ALL:  # the whole gradient of the step before, bit for bit
            first = (streak[_STUCK] == 1).all().logical_and(known.all())
            fired = torch.stack([fired[_DEAD], fired[_STUCK].logical_or(first)])
        seen = state.seen + alive
        share = alive / seen.clamp(1, int(1 / _SHARE))
        usual = state.usual + share * torch.where(alive, norms - state.usual, 0.0)
        player.state = _State(norms, usual, seen, streak, longest)
        return fired

    # -- on the host, when something is suspected ----------------------------------------------------

    def _confirm(self, seen: _Seen) -> Evidence | None:
        """Name the parameters; those that the user froze meanwhile, and a loss of exactly 0, are no fault.

        Nor are those that another callback has told of since they stopped.
        """
        run, names = self._run, seen.names
        if run is None:
            return None
        self._ask_again(seen)
        trained = {name for name, p in run.host.named_parameters() if p.requires_grad}
        dead, stuck = (
            [name for name, flag in zip(names, row, strict=True) if flag and name in trained]
            for row in seen.fired.tolist()
        )
        silent = len(dead) + len(stuck) < sum(map(sum, seen.fired.tolist()))
        if dead and seen.losses and all(float(loss) == 0 for loss in seen.losses):
            dead, silent = [], True
        rows: list[list[int]] = seen.streak.tolist()
        of_dead, of_stuck = (dict(zip(names, row, strict=True)) for row in rows)
        dead, stuck = (
            untold(
                run, type(self).__name__, {name: seen.iteration - row[name] for name in some}, seen.iteration
            )
            for some, row in ((dead, of_dead), (stuck, of_stuck))
        )
        if not dead and not stuck:
            if not silent:
                seen.player.held = None
            return None
        texts = []
        if dead:
            texts.append(
                f"the gradient of {_listed(dead, names)} has vanished: {of_dead[dead[0]]} steps in a row "
                "below a millionth of its usual norm"
            )
        if stuck:
            count = of_stuck[stuck[0]]
            steps = "step" if count == 1 else f"{count} steps"
            texts.append(
                f"the gradient of {_listed(stuck, names)} is stuck: for {steps} its norm is the same, "
                "bit for bit"
            )
        norms = dict(zip(names, seen.norms.tolist(), strict=True))
        sizes = {name: parameter.numel() for name, parameter in run.host.named_parameters()}
        return Evidence(
            kind=Kind.STAGNATION,
            action=Action.parse(self.action),
            message="; ".join(texts),
            tensors=tuple(
                TensorEvidence(name=name, nonfinite=0, numel=sizes.get(name, 0), norm=norms[name])
                for name in (*dead, *stuck)
            ),
            diagnosis=_advice(dead=bool(dead)),
            details={"dead": dead[:16], "stuck": stuck[:16]},
            about=(*(f"dead {name}" for name in dead), *(f"stuck {name}" for name in stuck)),
            once=True,
        )

    def _ask_again(self, seen: _Seen) -> None:
        """Have what is due asked about later once more: it may not be told now, and go on."""
        player = seen.player
        if Action.parse(self.action) is not Action.WARN:
            return
        if player.held is None:
            player.wait = self.dead_after
        player.held = seen.fired if player.held is None else player.held.logical_or(seen.fired)
        player.again, player.wait = seen.iteration + player.wait, 2 * player.wait


def _listed(some: Sequence[str], names: Sequence[str]) -> str:
    return f"all {len(some)} parameters" if len(some) == len(names) > 1 else fold(some)


def _placed(player: _Player, names: tuple[str, ...], norms: Tensor) -> Tensor:
    """The norms in the order of all names; 0 for those without a gradient."""
    places = player.places.get(names)
    if names == player.names:
        return norms
    if places is None or places.device != norms.device:
        if len(player.places) >= _MANY:
            player.places.clear()
        known = {name: place for place, name in enumerate(player.names)}
        places = torch.tensor([known[name] for name in names], dtype=torch.int64, device=norms.device)
        player.places[names] = places
    return torch.zeros(len(player.names), device=norms.device).index_copy_(0, places, norms)


def _advice(*, dead: bool) -> Diagnosis:
    remedy = (
        (
            "look at what comes after it: a saturated or dead activation, a detached tensor, a mask of zeros",
            "lower the learning rate, or warm it up over more steps: dead units rarely come back",
        )
        if dead
        else (
            "look at whether its gradient buffer is written: hooks, a gradient reduction that never ran",
            "look at whether the same batch comes again and again while the weights stand still",
        )
    )
    return Diagnosis(cause="unknown", confidence=0.0, phase="backward", remedy=remedy)
