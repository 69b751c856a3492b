"""Without a way to run a step again: hooks that watch the suspect module for the next time."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.diagnosis.sighting import Look, Sighting, Watched, sight
from gradsentinel.diagnosis.source import user_line
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident, fold
from gradsentinel.measures.bounds import bounds
from gradsentinel.measures.inspection import is_finite, local, parts_of, readable
from gradsentinel.run import Run
from gradsentinel.state.tree import tensors_in
from gradsentinel.testing import record_swallowed
from gradsentinel.wording import plain_name

logger = logging.getLogger("gradsentinel")

_STEPS = 3
"""So many steps are remembered, or as many as `guard="device"` may handle an incident late."""
_NODES = 64
"""Autograd nodes between two looks that are named."""


class Armed:
    """Hooks on a suspect module, its siblings, its parent and the model; no wait, a flag per tensor and call.

    What they saw of a bad step says between which calls of modules the first bad value came up. If modules
    are called in between that are not watched yet, they are armed too, so the next occurrence tells more.
    """

    def __init__(self) -> None:
        self._most = bounds().modules
        self._watched: dict[str, nn.Module] = {}
        self._handles: list[Any] = []
        self._steps: dict[int, Watched] = {}
        """By the number of the attempted step, which never goes back."""
        self._usual: dict[tuple[str, bool, str], Tensor] = {}
        """Whether a place was finite in every healthy step; a mask may hold infinities by design."""
        self._failed = False

    @property
    def names(self) -> list[str]:
        """The modules that are watched, '' being the model itself."""
        return list(self._watched)

    def arm(self, run: Run, suspect: str) -> None:
        """Watch the module of that name, its siblings, its parent, and the model."""
        parent = suspect.rpartition(".")[0]
        modules = _modules(run)
        near = [name for name in modules if name == suspect or name.rpartition(".")[0] == parent]
        for name in dict.fromkeys((suspect, parent, "", *near)):
            self._watch(run, name, modules)

    def arm_inside(self, run: Run, name: str) -> list[str]:
        """Watch what a module calls as well; return the names that are new."""
        modules, before = _modules(run), set(self._watched)
        for child in _called_by(name, modules):
            self._watch(run, child, modules)
        return [known for known in self._watched if known not in before]

    def disarm(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        for step in self._steps.values():
            step.let_go()
        self._handles.clear()
        self._watched.clear()
        self._steps.clear()

    def explain(self, incident: Incident, run: Run) -> Diagnosis | None:
        """Return where finite values became non-finite, None if the hooks saw nothing of it."""
        seen = [step for _, step in sorted(self._steps.items()) if step.number == incident.step]
        if not seen or not seen[-1].looks:
            return None
        step = seen[-1]
        found = sight(step, self._usual, incident)
        if found is None:
            return None
        further = self.arm_inside(run, found.inside) if found.inside is not None else []
        return _diagnosis(found, self._watched, further)

    # -- the hooks -----------------------------------------------------------------------------------

    def _watch(self, run: Run, name: str, modules: dict[str, nn.Module]) -> None:
        module = modules.get(name)
        if (
            module is None
            or name in self._watched
            or len(self._watched) >= self._most
            or not _has_forward(module)
        ):
            return
        self._watched[name] = module

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self._try_look(run, name, {"args": args, "kwargs": kwargs}, entering=True)

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._try_look(run, name, output, entering=False)

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def _try_look(self, run: Run, name: str, values: Any, *, entering: bool) -> None:
        if self._failed:
            return
        try:
            self._look(run, name, values, entering=entering)
        except Exception as error:  # noqa: BLE001 - looking must not end a run that goes well
            self._failed = True  # the hooks stay where they are: a module is iterating over them
            record_swallowed(error)
            logger.warning("step %d: the armed hooks look no more: %s", run.step, error)

    def _look(self, run: Run, name: str, values: Any, *, entering: bool) -> None:
        """Note which tensors are finite now, and later whether their gradients are."""
        if torch._C._current_graph_task_id() != -1:  # recomputed for activation checkpointing
            return
        step = self._step(run)
        look = step.enter(name, user_line(4)) if entering else step.leave(name)
        number = len(step.looks)
        step.looks.append(look)
        producers = []
        for path, tensor in tensors_in(values):
            if readable(tensor) is not None:
                continue
            look.finite[path] = _flag(tensor)
            if tensor.requires_grad:
                producers.append(tensor.grad_fn)
                step.handles.append(tensor.register_hook(_gradient_hook(step, look, path)))  # type: ignore[no-untyped-call]
        _follow(step, look, producers)
        for producer in producers:
            if producer is not None:
                step.made_by[producer] = number

    def _step(self, run: Run) -> Watched:
        step = self._steps.get(run.iteration)  # the number of a step comes again after a rollback
        if step is None:
            for earlier in self._steps.values():
                earlier.let_go()
            while len(self._steps) >= max(_STEPS, run.lag + 1):
                self._learn_from(self._steps.pop(min(self._steps)), run)
            step = self._steps[run.iteration] = Watched(run.step)
        return step

    def _learn_from(self, step: Watched, run: Run) -> None:
        """Remember where infinities are usual, if nothing was wrong with the step."""
        if any(incident.step == step.number for incident in run.incidents):
            return
        for look in step.looks:
            for path, flag in look.finite.items():
                key = (look.name, look.entering, path)
                self._usual[key] = flag & self._usual.get(key, flag)


def suspect_of(incident: Incident) -> str:
    """Return the module of the first bad parameter, '' for the model if no parameter is named."""
    return incident.tensors[0].name.rpartition(".")[0] if incident.tensors else ""


def in_words(armed: Armed) -> str:
    """Say what is watched now."""
    names = fold([name or "the model" for name in armed.names])
    return f"hooks are armed on {names}: the next occurrence will tell where it begins"


def _diagnosis(found: Sighting, watched: dict[str, nn.Module], further: list[str]) -> Diagnosis:
    evidence = list(found.evidence)
    line = found.line or (_forward_line(watched.get(found.module or "")) if found.whole else None)
    if further:
        names = fold(further)
        evidence.append(f"hooks are armed on {names}, too: the next occurrence will tell where in it")
    custom = found.custom is not None
    fix = "pass forward=lambda model, batch: loss to the Sentinel to learn the operator and the line"
    check = f"check {found.custom} with torch.autograd.gradcheck"
    return Diagnosis(
        cause="operator" if custom else "unknown",
        confidence=0.45 if custom else 0.3,  # below what is taken for certain: nothing was run again
        phase=found.phase,
        module=found.module,
        node=found.node,
        source=line,
        evidence=tuple(evidence),
        remedy=(check, fix) if custom else (fix,),
    )


def _forward_line(module: nn.Module | None) -> str | None:
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    if code is None or type(module).__module__.startswith("torch."):
        return None
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def _modules(run: Run) -> dict[str, nn.Module]:
    """Return the modules by the user's own names; of a compiled one its outside, where hooks run eagerly."""
    found: dict[str, nn.Module] = {}
    compiled: list[str] = []
    for prefix, root in run.host.modules():
        for path, module in root.named_modules():
            full = ".".join(part for part in (prefix, path) if part)
            if any(full.startswith(f"{outer}.") if outer else full for outer in compiled):
                continue
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                compiled.append(full)
            found.setdefault(plain_name(full), module)
    return found


def _has_forward(module: nn.Module) -> bool:
    """False for mere containers, such as a ModuleList, which nobody calls."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _called_by(name: str, modules: dict[str, nn.Module]) -> list[str]:
    """Return a module's children, and those of containers among them."""
    found = []
    for child, module in modules.items():
        if child and child.rpartition(".")[0] == name and child != name:
            found += [child] if _has_forward(module) else _called_by(child, modules)
    return found


def _flag(tensor: Tensor) -> Tensor:
    """0-dim; what needs no gradient may be a mask, and a mask may hold -inf.

    Of a distributed tensor this rank's part alone: the hooks of one rank must not wait for the others.
    """
    values = local(tensor.detach())
    if tensor.requires_grad or values.layout is not torch.strided:
        return is_finite(values)
    parts = parts_of(values)
    return ~(torch.isnan(parts) | torch.isposinf(parts)).any()


def _gradient_hook(step: Watched, look: Look, path: str) -> Any:
    def arrived(gradient: Tensor) -> None:
        if step.backward_line is None:
            step.backward_line = user_line(2)  # None where autograd has a thread of its own
        known = look.gradient.get(path)
        flag = is_finite(gradient)
        look.gradient[path] = flag if known is None else known & flag

    return arrived


def _follow(step: Watched, look: Look, producers: list[Any]) -> None:
    """Name the autograd nodes from the earlier looks to this one, as far as they are few."""
    waiting, seen = [node for node in producers if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in step.made_by:
            look.sources.add(step.made_by[node])
            continue
        if len(look.nodes) >= _NODES:
            look.followed = False
            look.nodes.clear()
            return
        if not node.name().endswith("AccumulateGrad"):
            look.nodes.append(node)
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    look.name_nodes()
