"""Without a way to run a step again: hooks that watch the suspect module for the next time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident, fold
from gradsentinel.measures.inspection import is_finite, readable
from gradsentinel.run import Run
from gradsentinel.state.tree import tensors_in
from gradsentinel.wording import plain_name

_MOST = 32
"""Modules watched at once."""


@dataclass(slots=True)
class Sentry:
    """What the armed hooks saw of one module in the newest step; 0-dim flags, read only on an incident."""

    name: str
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    upstream: list[Tensor] = field(default_factory=list)
    """Of the gradients that arrive at its outputs."""
    downstream: list[Tensor] = field(default_factory=list)
    """Of the gradients that leave its inputs."""

    def clear(self) -> None:
        """Forget the last step."""
        for flags in (self.inputs, self.outputs, self.upstream, self.downstream):
            flags.clear()


class Armed:
    """Hooks on a suspect module, its siblings and its parent; no wait, one flag per tensor and call."""

    def __init__(self) -> None:
        self._sentries: dict[str, Sentry] = {}
        self._handles: list[Any] = []
        self._step = -1

    @property
    def names(self) -> list[str]:
        """The modules that are watched, '' being the model itself."""
        return list(self._sentries)

    def arm(self, run: Run, suspect: str) -> None:
        """Watch the module of that name, its siblings and its parent."""
        parent = suspect.rpartition(".")[0]
        for prefix, root in run.host.modules():
            for path, module in root.named_modules():
                name = plain_name(".".join(part for part in (prefix, path) if part))
                near = name in (suspect, parent) or (name.rpartition(".")[0] == parent and name)
                if near and name not in self._sentries and len(self._sentries) < _MOST:
                    self._watch(run, name, module)

    def disarm(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sentries.clear()

    def explain(self, incident: Incident) -> Diagnosis | None:
        """Return what the hooks saw of the step: the module where finite values became non-finite."""
        if incident.step != self._step:
            return None
        made = [s for s in self._sentries.values() if _fine(s.inputs) and not _fine(s.outputs)]
        back = [s for s in self._sentries.values() if _fine(s.upstream) and not _fine(s.downstream)]
        found = _innermost(made) or _innermost(back)
        if found is None:
            return None
        phase = "forward" if made else "backward"
        given = "inputs" if made else "gradients of its outputs"
        left = "outputs" if made else "gradients of its inputs"
        return Diagnosis(
            cause="unknown",
            confidence=0.3,
            phase=phase,
            module=found.name,
            evidence=(f"the {given} of {found.name or 'the model'} were finite, the {left} were not",),
            remedy=(
                "pass forward=lambda model, batch: loss to the Sentinel to learn the operator and the line",
            ),
        )

    def _watch(self, run: Run, name: str, module: nn.Module) -> None:
        sentry = self._sentries[name] = Sentry(name)

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(run.step, {"args": args, "kwargs": kwargs}, sentry.inputs, sentry.downstream)

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self._note(run.step, output, sentry.outputs, sentry.upstream)

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def _note(self, step: int, values: Any, flags: list[Tensor], gradients: list[Tensor]) -> None:
        """Note which tensors are finite now, and later whether their gradients are."""
        if self._step != step:
            self._step = step
            for each in self._sentries.values():
                each.clear()
        for _, tensor in tensors_in(values):
            if readable(tensor) is None:
                flags.append(is_finite(tensor.detach()))
                if tensor.requires_grad:
                    tensor.register_hook(lambda g: gradients.append(is_finite(g)))  # type: ignore[no-untyped-call]


def suspect_of(incident: Incident) -> str | None:
    """Return the module of the first bad parameter, None if no parameter is named."""
    return incident.tensors[0].name.rpartition(".")[0] if incident.tensors else None


def in_words(armed: Armed) -> str:
    """Say what is watched now."""
    names = fold([name or "the model" for name in armed.names])
    return f"hooks are armed on {names}: the next occurrence will tell where it begins"


def _fine(flags: list[Tensor]) -> bool:
    return not flags or bool(torch.stack([flag.cpu() for flag in flags]).all())


def _innermost(found: list[Sentry]) -> Sentry | None:
    return max(found, key=lambda sentry: sentry.name.count(".") + bool(sentry.name), default=None)
