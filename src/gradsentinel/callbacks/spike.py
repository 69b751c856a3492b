"""Loss and gradient norm against their own past: spikes, explosions, divergence."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.callback import Detector, Responder
from gradsentinel.callbacks.groups import GROUPINGS, GroupNorms
from gradsentinel.callbacks.outliers import (
    Outlier,
    Past,
    evidence_of,
    evidence_of_nonfinite,
    finding_of_first,
)
from gradsentinel.callbacks.players import player_of
from gradsentinel.callbacks.series import RULES, series_of
from gradsentinel.callbacks.signals import Sight, largest, loss_of, score_of, share_of, wide
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.measures.bands import Band
from gradsentinel.measures.baseline import Baseline
from gradsentinel.measures.bounds import MOST_LAG
from gradsentinel.run import Run

_Watched = tuple[tuple[str, Baseline], ...]
_SIGNALS = ("grad_norm", "loss")
_LEARNT = 1.4
"""Where the data are learnt by heart gradients have a heavy tail: so many times the limit for the norm."""
_IN_FLIGHT = MOST_LAG + 1
"""So many steps whose outcome is not known yet are remembered: none may be lost that is heard of late."""


@dataclass(kw_only=True)
class SpikeCallback(Detector):
    """Finds losses and gradient norms that are far from what this run has shown so far.

    A spike is reported (`action`); an explosion, a hundred times as far out, is dropped before it lands
    (`explosion_action`). What counts as far is learnt from healthy steps alone, see
    `gradsentinel.measures.baseline`. Each of several optimizers that take turns, as in a GAN, has
    statistics of its own. The comparison is
    made on the device; the statistics are fed with the numbers that the sentinel reads anyway. Called on:
    every rank, each with its own losses.
    """

    prompt_every, needs_random_states = None, False
    action: Action | str = Action.WARN
    """What to do about a spike: warn reports it and lets the (clipped) step through, retry, skip, rollback
    and abort act."""
    explosion_action: Action | str = Action.RETRY
    """What to do about an explosion; retry falls through to skip where there is no Retry."""
    recheck: bool = True
    """Before a spike is only reported, have `Retry` compute the step again, where there is one: what does not
    come back was a fault, and the right gradients are used; what does is made as it is, bit for bit. False
    reports without."""
    rule: str = "robust"
    """robust: median and MAD of the logarithm, along the trend; sigma: mean plus and minus `sigmas` standard
    deviations; history: `times` the largest value of the window."""
    limit: float = 4.0
    """Of the robust rule: so many standard deviations; up to a third more where the series' own tail is
    heavy, and twice as many where it climbs step by step."""
    sigmas: float = 3.0
    """Of the sigma rule."""
    times: float = 10.0
    """Of the history rule."""
    window: int = 128
    """So many healthy steps are compared with."""
    warmup: int = 20
    """With fewer healthy steps than this only explosions are found: 100,000 times the largest value so far
    from the second step on, 1,000 times from the fourth, 100 times from the ninth."""
    patience: int = 8
    """So many steps in a row outside, and not growing, are a new level and accepted; four times as many in
    any case."""
    explosion: float | None = 100.0
    """So many times beyond the bound of a spike is an explosion; None: nothing is."""
    loss: bool = True
    """Watch the loss, the mean over the micro-batches of this rank."""
    grad_norm: bool = True
    """Watch the global gradient norm before clipping."""
    groups: str | None = None
    """Watch the gradient norm of each parameter or layer too ('parameter', 'layer'), by the same kind of rule
    on the device; about 40 launches a step, in every 16th 150."""
    group_limit: float = 5.0
    """Standard deviations for those: there are many of them."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _ladder: list[Responder] = field(default_factory=list, init=False, repr=False)
    _series: dict[str, dict[str, Baseline]] = field(default_factory=dict, init=False, repr=False)
    """By player and signal."""
    _watched: dict[tuple[Any, ...], _Watched] = field(default_factory=dict, init=False, repr=False)
    """By player and settings the signals that are watched, each with its series: asked for in each step."""
    _grouped: dict[str, GroupNorms] = field(default_factory=dict, init=False, repr=False)
    _sights: dict[int, Sight] = field(default_factory=dict, init=False, repr=False)
    _glances: dict[int, tuple[str, dict[str, Band]]] = field(default_factory=dict, init=False, repr=False)
    """Of steps that needed no more, by their numbers: the player and what was expected."""
    _shown: dict[Baseline, Band] = field(default_factory=dict, init=False, repr=False)
    """The bounds that were published last."""
    _past: deque[Past] = field(default_factory=lambda: deque(maxlen=64), init=False, repr=False)

    def __post_init__(self) -> None:
        self.action = Action.parse(self.action)
        self.explosion_action = Action.parse(self.explosion_action)
        if Action.CONTINUE in {self.action, self.explosion_action}:
            raise ConfigurationError(
                "action='continue' would do nothing; leave the callback out, or use warn"
            )
        if self.rule not in RULES:
            raise ConfigurationError(f"unknown rule {self.rule!r}; choose one of: {', '.join(RULES)}")
        if self.groups is not None and self.groups not in GROUPINGS:
            raise ConfigurationError(f"groups={self.groups!r}; choose one of: {', '.join(GROUPINGS)}, None")
        if not (self.loss or self.grad_norm or self.groups):
            raise ConfigurationError("nothing to watch: set loss, grad_norm or groups")
        for name in ("limit", "sigmas", "group_limit"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} is a number of deviations, above 0")
        if not self.times > 1 or (self.explosion is not None and not self.explosion > 1):
            raise ConfigurationError("times and explosion are factors above 1")
        if self.warmup < 3 or self.patience < 2 or self.window < self.warmup:
            raise ConfigurationError(
                f"warmup={self.warmup} must be at least 3 steps, window={self.window} at least as many, and "
                f"patience={self.patience} at least 2"
            )

    def warm_start(
        self, *, losses: Iterable[float] = (), grad_norms: Iterable[float] = (), player: str = "all"
    ) -> None:
        """Learn from an earlier run's numbers, oldest first, so that there is no warm-up.

        `player` names the optimizers of several that take turns by their numbers ("0", "1").
        """
        for name, values in (("loss", losses), ("grad_norm", grad_norms)):
            baseline = self._baseline(player, name)
            for value in values:
                baseline.learn(-1, float(value))

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run, and who may compute a step again."""
        self._run = event.run
        self._ladder = [one for one in event.run.callbacks if isinstance(one, Responder)]

    def calm(self, step: int, norm: float, losses: Sequence[float]) -> bool | None:
        """Return True if norm and loss are where they are expected; None if groups are watched too."""
        run = self._run
        if run is None or self.groups is not None:
            return None
        player = "all" if len(run.optimizers) == len(run.host.optimizers) else player_of(run)
        bands, ahead = {}, len(self._glances) + 1
        for name, baseline in self._watched.get((player, self.loss, self.grad_norm)) or self._watch(player):
            if name == "loss" and not losses:
                continue
            band = baseline.expect() if baseline.due else baseline.band
            value = norm
            if name == "loss":
                value = losses[0] if len(losses) == 1 else math.fsum(losses) / len(losses)
            if ahead >= baseline.room or value > baseline.near:
                run.prompt = True  # the next step may be compared with what is learnt from this one
            if band is not None:
                bands[name] = band
                if not band.low <= value <= band.high:
                    return False
        self._glances[step] = player, bands
        return True

    def on_before_clip(self, event: events.BeforeClip) -> Sequence[Finding]:
        """Compare loss and norm with what is expected, on the device."""
        run = self._run
        if run is None:
            return ()
        sight = Sight(
            step=event.step,
            player=player_of(run),
            view=event.gradients,
            losses=event.losses,
            overflow=event.overflow,
        )
        self._sights[event.step] = sight
        if len(self._sights) > _IN_FLIGHT:
            del self._sights[next(iter(self._sights))]
        findings = self._compare(event, sight)
        if self.groups is not None and len(event.gradients):
            player = sight.player
            grouped = self._grouped.get(player) or self._grouped.setdefault(player, self._new_groups())
            findings += [grouped.judge(event, Action.parse(self.action))]
        return findings

    def on_after_step(self, event: events.AfterStep) -> Sequence[Finding]:
        """Learn from a healthy step; what was outside only counts towards a new level."""
        sight, glance = self._sights.pop(event.step, None), self._glances.pop(event.step, None)
        if sight is not None:
            player, bands = sight.player, sight.bands
        elif glance is not None:
            player, bands = glance
        else:
            return ()
        if self._run is None or event.scaler_skipped or (event.action and event.action is Action.ROLLBACK):
            return ()
        for grouped in () if event.applied else self._grouped.values():
            grouped.withdraw(event.step)
        norm = event.grad_norm
        if sight is not None and sight.true_norm is not None and not math.isfinite(norm):
            norm = sight.true_norm
        found: list[Finding] = []
        watched = self._watched.get((player, self.loss, self.grad_norm)) or self._watch(player)
        for name, baseline in reversed(watched):
            value = event.loss if name == "loss" else norm
            if value is not None:
                baseline.learn(event.step, value, healthy=event.applied)
                found += [finding_of_first(name, one) for one in baseline.left_out]
                band = bands.get(name)
                if band is not None and band is not self._shown.get(baseline):
                    self._publish(player, baseline, band, name, event.iteration)
        if self.loss and self.grad_norm:
            (_, of_norm), (_, of_loss) = watched
            of_norm.ease = _LEARNT if of_loss.negligible else 1.0
        rate = max(event.learning_rates, default=None)
        self._past.append(Past(event.step, event.loss, norm, rate))
        return found

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Forget the steps that were undone."""
        step = event.recovery.step
        if step is None:
            return
        for signals in self._series.values():
            for baseline in signals.values():
                baseline.forget_from(step)
        for grouped in self._grouped.values():
            grouped.forget_from(step)
        self._sights.clear()
        self._glances.clear()
        kept = [entry for entry in self._past if entry.step < step]
        self._past = deque(kept, maxlen=self._past.maxlen)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt."""
        return {
            "series": {
                player: {name: baseline.state_dict() for name, baseline in signals.items()}
                for player, signals in self._series.items()
            },
            "groups": {player: grouped.state_dict() for player, grouped in self._grouped.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what was learnt: a restarted run needs no warm-up."""
        for kept in (self._series, self._watched, self._grouped):
            kept.clear()
        for player, signals in state["series"].items():
            for name, kept in signals.items():
                self._baseline(player, name).load_state_dict(kept)
        for player, kept in state["groups"].items():
            if self.groups is not None:
                self._grouped[player] = self._new_groups()
                self._grouped[player].load_state_dict(kept)

    def _publish(self, player: str, baseline: Baseline, band: Band, name: str, iteration: int) -> None:
        """Leave a bound that has moved where TensorBoard finds it."""
        if self._run is None or band.early:
            return
        self._shown[baseline] = band
        whose = "" if player == "all" else f"/optimizer{player}"
        self._run.metrics[f"spike/{name}_bound{whose}"] = (iteration, band.high)

    # -- on the device -------------------------------------------------------------------------------

    def _compare(self, event: events.BeforeClip, sight: Sight) -> list[Finding]:
        seen = []
        for name in _SIGNALS:
            value = self._value(name, event)
            if value is None:
                continue
            band = self._baseline(sight.player, name).expect()
            if band is not None:
                sight.bands[name] = band
                seen.append((value, band))
        scores = largest(score_of(value, band) for value, band in seen if not band.early)
        findings = [self._finding(event, sight, value, 1.0, exploded=False) for value in scores]
        if self.explosion is None:
            return findings
        if all(band.relative for _, band in seen):  # the same numbers tell both
            return findings + [
                self._finding(event, sight, value, self.explosion, exploded=True) for value in scores
            ]
        blasts = largest(share_of(value, band.explosion) for value, band in seen if band.explosion < math.inf)
        return findings + [self._finding(event, sight, value, 1.0, exploded=True) for value in blasts]

    def _finding(
        self, event: events.BeforeClip, sight: Sight, value: Tensor, limit: float, *, exploded: bool
    ) -> Finding:
        if event.overflow is not None:  # the loss scaler drops the step by itself
            value = torch.where(event.overflow.to(value.device).reshape(()) > 0, 0.0, value)
        return Finding(
            kind=Kind.SPIKE,
            value=value,
            limit=limit,
            action=self._ruling(sight, exploded=exploded)[0],
            confirm=partial(self._confirm, sight, exploded=exploded),
        )

    def _action(self, *, exploded: bool) -> Action:
        usual, drastic = Action.parse(self.action), Action.parse(self.explosion_action)
        return max(usual, drastic) if exploded else usual

    def _ruling(self, sight: Sight, *, exploded: bool) -> tuple[Action, bool]:
        """Return what to ask for, and whether the step may stand if it comes out the same again."""
        action, run = self._action(exploded=exploded), self._run
        if action is not Action.WARN or not self.recheck or run is None:
            return action, False
        # What was outside a step ago, too, and came out the same then, is no transient fault.
        lasting = any(baseline.streak for baseline in self._series.get(sight.player, {}).values())
        again = not lasting and any(one.rechecks(run) for one in self._ladder)
        return (Action.RETRY, True) if again else (action, False)

    def _value(self, name: str, event: events.BeforeClip) -> Tensor | None:
        if not getattr(self, name):
            return None
        if name == "loss":
            return loss_of(event)
        return wide(event.gradients.total_norm) if len(event.gradients) else None

    def _baseline(self, player: str, name: str) -> Baseline:
        signals = self._series.setdefault(player, {})
        if name not in signals:
            signals[name] = series_of(
                name,
                rule=self.rule,
                limit=self.limit,
                sigmas=self.sigmas,
                times=self.times,
                window=self.window,
                warmup=self.warmup,
                patience=self.patience,
                explosion=self.explosion,
            )
        return signals[name]

    def _watch(self, player: str) -> _Watched:
        found = tuple((name, self._baseline(player, name)) for name in _SIGNALS if getattr(self, name))
        return self._watched.setdefault((player, self.loss, self.grad_norm), found)

    def _new_groups(self) -> GroupNorms:
        return GroupNorms(
            by=self.groups or "parameter",
            limit=self.group_limit,
            window=self.window,
            warmup=self.warmup,
            patience=self.patience,
        )

    # -- on the host, when something is suspected ----------------------------------------------------

    def _confirm(self, sight: Sight, *, exploded: bool) -> Evidence | None:
        """Name what is outside; of a step that both spiked and exploded only the explosion is told."""
        if sight.overflow is not None and bool(sight.overflow > 0):
            return None
        numbers = sight.read()
        broken = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        if broken:
            drastic = self._action(exploded=self.explosion is not None)
            return evidence_of_nonfinite(broken, action=drastic, view=sight.view)
        outliers = [
            Outlier(
                signal=name,
                value=value,
                band=band,
                streak=self._baseline(sight.player, name).streak,
            )
            for name, value in numbers.items()
            if not (band := sight.bands[name]).holds(value)
        ]
        if any(one.exploded for one in outliers) is not exploded:
            return None
        told = [one for one in outliers if one.exploded or not one.band.early]
        if not told:
            return None
        action, may_stand = self._ruling(sight, exploded=exploded)
        return evidence_of(
            told,
            step=sight.step,
            action=action,
            may_stand=may_stand,
            view=sight.view,
            past=self._past,
            window=self.window,
        )
