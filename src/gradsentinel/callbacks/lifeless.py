"""Gradients that do not live: layers that get nothing but zeros, gradients that are never written anew."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gradsentinel.callbacks.looks import Measured
from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.incident import Incident, fold
from gradsentinel.run import Run

_LEAST = 8
"""Layers and pieces with fewer elements are left alone: a single bias may well have a constant gradient."""
_LONGER = 4
"""What has paused before, such as an expert without tokens, is dead after so many times its longest pause."""
_DEAD = (
    "look for a detached tensor, an activation that is always in its flat part, or a branch that is not used",
    "if the gradients underflow (statistics/underflow is high), raise the loss scale or use bfloat16",
    "freeze it (requires_grad_(False)) if it is not to learn",
)
_ME = "GradientStatistics"
_STUCK = (
    "look for a gradient that is no longer written: a hook, an asynchronous reduction, a reused buffer",
    "look whether the loader gives the same batch again and again",
)


def untold(run: Run, teller: str, since: Mapping[str, int], until: int) -> list[str]:
    """Return which parameters are news: one lifeless gradient, one warning. `heard` says when it is out.

    Args:
        run: who remembers it.
        teller: the class of the detector that is about to tell.
        since: the last attempted step, as far as is known, in which each parameter's gradient was fine.
        until: the attempted step in which it was lifeless for sure.
    """
    news = [name for name, start in since.items() if run.lifeless.get(name, -2) < start]
    run.suspected.setdefault(teller, {}).update(dict.fromkeys(news, until))
    return news


def heard(run: Run, incident: Incident) -> None:
    """Note that what detectors suspected is told, now that an incident says so."""
    for claim in incident.claims:
        if claim.kind is Kind.STAGNATION:
            for teller in [one for one in run.suspected if claim.detector.startswith(one)]:
                run.lifeless.update(run.suspected.pop(teller))


def asks(streak: int, due: int) -> bool:
    """Return whether to tell now of what goes on: when it is due, and after twice, four times ... as long.

    The later times are for what could not be told then; what was told is no news.
    """
    times, rest = divmod(streak, due)
    return times > 0 and not rest and not times & (times - 1)


class Lifeless:
    """Counts in how many looks in a row a layer was dead, or a piece had the very same bits; warns once.

    A layer is what a module holds itself. It is dead if the gradients of all its parameters are zero: that of
    one may be by construction (a bias whose terms cancel, a factor that begins at zero).
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._since: dict[str, int] = {}
        """Of a layer the attempted step of the last look in which it lived, of a piece that of the first look
        with its bits."""
        self._zero_steps = 0
        """Steps in a row in which every gradient was zero."""
        self._dead: dict[str, int] = {}
        """Looks in a row in which a layer was dead."""
        self._pauses: dict[str, int] = {}
        """The most looks in a row after which a layer lived again."""
        self._stuck: dict[str, tuple[int, int]] = {}
        """The bits of a piece that is not zero, and in how many looks in a row it had them."""

    def step(self, norm: float, run: Run) -> list[Finding]:
        """Take the global norm of a step that was made in."""
        self._zero_steps = self._zero_steps + 1 if norm == 0.0 else 0
        if not asks(self._zero_steps, self._patience):
            return []
        trained = [name for name, p in run.host.named_parameters() if p.requires_grad]
        start = run.iteration - self._zero_steps
        if not untold(run, _ME, dict.fromkeys(trained, start), run.iteration):
            return []
        message = f"every gradient has been zero in {self._zero_steps} steps in a row"
        return [_warning(message, (), None, _DEAD, about=(message.partition(" in ")[0],))]

    def dead(
        self, norms: Mapping[str, float], sizes: Mapping[str, int], run: Run, iteration: int
    ) -> list[Finding]:
        """Take the norms of a look in; warn of the layers that are dead for long enough with this one.

        Args:
            norms: by parameter, of those that have a gradient and are whole on this rank.
            sizes: the numbers of elements, by parameter.
            run: who knows what others have told.
            iteration: the attempted step of the look.
        """
        layers: dict[str, list[str]] = {}
        for name in norms:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
        found = []
        for layer, names in layers.items():
            alive = any(norms[name] != 0.0 for name in names)
            if alive or sum(sizes.get(name, 0) for name in names) < _LEAST:
                self._since[layer] = iteration
                pause = self._dead.pop(layer, 0)
                if pause:
                    self._pauses[layer] = max(pause, self._pauses.get(layer, 0))
                continue
            looks = self._dead[layer] = self._dead.get(layer, 0) + 1
            start = self._since.get(layer, -1)
            if asks(looks, max(self._patience, _LONGER * self._pauses.get(layer, 0))) and untold(
                run, _ME, dict.fromkeys(names, start), iteration
            ):
                found.append(layer)
        if not found:
            return []
        members = [name for layer in found for name in layers[layer]]
        message = (
            f"no gradient reaches {fold(found)}: those of all {len(members)} parameters there were zero in "
            f"the last {min(self._dead[layer] for layer in found)} looks"
        )
        tensors = [(name, sizes.get(name, 0), 0.0) for name in members]
        about = tuple(f"dead {name}" for name in members)
        return [_warning(message, tensors, found[0], _DEAD, about=about)]

    def stuck(
        self, measured: Iterable[Measured], norms: Mapping[str, float], run: Run, iteration: int
    ) -> list[Finding]:
        """Take the pieces of a look in; warn of the parameters that have the same bits for long enough."""
        found: dict[str, int] = {}
        most = 0
        for one in measured:
            piece = one.piece
            key = f"{piece.name}:{piece.start}"
            if len(piece) < _LEAST or one.counts[0] == sum(one.counts):
                self._stuck.pop(key, None)
                continue
            bits, looks = self._stuck.get(key, (None, 0))
            looks = looks + 1 if bits == one.bits else 1
            self._stuck[key] = (one.bits, looks)
            self._since[key] = start = iteration if looks == 1 else self._since.get(key, 0)
            if asks(looks, self._patience) and untold(run, _ME, {piece.name: start}, iteration):
                found[piece.name], most = piece.whole, max(most, looks)
        if not found:
            return []
        message = (
            f"the gradient of {fold(list(found))} had the very same bits in the last {most} looks, "
            "which were in different steps"
        )
        tensors = [(name, size, norms.get(name, math.nan)) for name, size in found.items()]
        about = tuple(f"stuck {name}" for name in found)
        return [_warning(message, tensors, next(iter(found)).rpartition(".")[0], _STUCK, about=about)]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "zero_steps": self._zero_steps,
            "dead": dict(self._dead),
            "pauses": dict(self._pauses),
            "stuck": {key: list(entry) for key, entry in self._stuck.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the counts back."""
        self._zero_steps = int(state["zero_steps"])
        self._dead = {name: int(looks) for name, looks in state["dead"].items()}
        self._pauses = {name: int(looks) for name, looks in state["pauses"].items()}
        self._stuck = {key: (int(bits), int(looks)) for key, (bits, looks) in state["stuck"].items()}


def _warning(
    message: str,
    tensors: Sequence[tuple[str, int, float]],
    module: str | None,
    remedy: tuple[str, ...],
    *,
    about: tuple[str, ...],
) -> Finding:
    """Return a finding of tensors by name, size and norm."""
    evidence = Evidence(
        kind=Kind.STAGNATION,
        action=Action.WARN,
        message=message,
        tensors=tuple(
            TensorEvidence(name=name, nonfinite=0, numel=size, norm=norm) for name, size, norm in tensors
        ),
        diagnosis=Diagnosis(
            cause="unknown", confidence=0.0, phase="backward", module=module or None, remedy=remedy
        ),
        about=about,
        once=True,
    )
    return Finding(
        kind=evidence.kind, value=torch.tensor(True), action=evidence.action, confirm=lambda: evidence
    )
