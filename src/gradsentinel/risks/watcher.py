"""Watches the operators of the dry step, and keeps what may go wrong in them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.diagnosis.source import Line, user_line
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.risks.effect import Effect, nodes_behind
from gradsentinel.risks.facts import NOTHING, Facts, Given, facts_of_result
from gradsentinel.risks.op import Op
from gradsentinel.risks.report import Risk
from gradsentinel.risks.rules import WATCHED, hits_of

_DROWNS = 100
"""A gradient with so many times the norm of all others: what clipping leaves of those is 1 %."""
_MOST_PER_LINE = 64
"""The same operator on the same line is looked at so many times: loops over layers and time steps."""


class Watcher(Trace):  # type: ignore[no-untyped-call]
    """A trace that also looks at healthy operators: what is one step away from failing."""

    def __init__(self, *args: Any, calm: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calm = calm
        """What comes back to the elements that are close to a singularity is taken away."""
        self._risks: list[tuple[Risk, list[float]]] = []
        """With what they do to the gradient: 0 is nothing yet."""
        self._waiting: dict[int, list[tuple[Effect, list[float]]]] = {}
        """What waits for the gradient, by the number of its autograd node."""
        self._hooks: list[Any] = []
        self._in_place: set[int] = set()
        """The numbers of operators that overwrite what they are given."""
        self.failures: list[Exception] = []
        """What went wrong in the looking; the step itself never notices."""
        self._facts: dict[int, Facts] = {}
        """What is known of each piece of memory, by the identity of its cell."""
        self._seen: dict[tuple[str, Line | None, str], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and look at what it was given."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.rstrip("_")
        if self.in_backward or not any(isinstance(x, Tensor) for x in args[:2]):
            return super().__torch_dispatch__(func, types, args, kwargs)
        known = {id(x): self._known(x) for x in args if isinstance(x, Tensor)}
        differentiable = torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs))
        )
        given = args
        if func._schema.is_mutable and name in WATCHED:
            given = tree_map(lambda x: _copy(x) if isinstance(x, Tensor) else x, args)
            known = {id(copy): known.get(id(x), NOTHING) for copy, x in zip(given, args, strict=True)}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        try:
            handed = Given(given, lambda tensor: known.get(id(tensor), NOTHING), kwargs)
            self._learn(func, name, handed, result)
            op = Op(name, handed, kwargs, result, differentiable, func._schema.is_mutable)
            self._judge(op, str(func), user_line())
        except Exception as error:  # noqa: BLE001 - counted; the step must not fail because it is watched
            self.failures.append(error)
        return result

    @property
    def risks(self) -> list[Risk]:
        """What was found, in the order of the forward pass."""
        return [risk for risk, (norm,) in self._risks if norm]

    @property
    def shows_effects(self) -> bool:
        """True if something is there only for what it does to the gradient."""
        return any(0 < norm < math.inf for _, (norm,) in self._risks)

    def settle(self, healthy: float) -> None:
        """Drop what does not drown the gradient as it is without it, given the norm of that."""
        for _, shown in self._risks:
            if healthy > 0 and shown[0] <= _DROWNS * healthy:
                shown[0] = 0.0

    def begin_backward(self, root: Tensor) -> None:
        """Have each operator that is close to a singularity look at the gradient that it is given."""
        super().begin_backward(root)
        nodes = {node._sequence_nr(): node for node in nodes_behind(root.grad_fn)}
        for number, waiting in self._waiting.items():
            # An operator in place first copies what its derivative needs: the copy has taken the number.
            node = nodes.get(number, nodes.get(number - 1) if number in self._in_place else None)
            if node is not None:
                hooks = (partial(self._look, effect, shown) for effect, shown in waiting)
                self._hooks += [node.register_prehook(hook) for hook in hooks]
        self._waiting.clear()

    def release(self) -> None:
        """Let go of the graph, which the program may have kept."""
        while self._hooks:
            self._hooks.pop().remove()

    def _look(
        self, effect: Effect, shown: list[float], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        gradient = gradients[0] if gradients else None
        if gradient is None:
            return None
        try:
            with _disable_current_modes():
                norm = effect.on(gradient.detach())
                shown[0] = max(shown[0], norm)
                return (effect.without(gradient), *gradients[1:]) if self._calm and norm else None
        except Exception as error:  # noqa: BLE001 - counted; the step must not fail because it is watched
            self.failures.append(error)
            return None

    def _known(self, tensor: Tensor) -> Facts:
        cell = self.memory.known(tensor)
        return NOTHING if cell is None else self._facts.get(id(cell), NOTHING)

    def _learn(self, func: Any, name: str, given: Given, result: Any) -> None:
        """Note how the result was made; a view has the memory, and so the facts, of what it looks into."""
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return
        facts = facts_of_result(name, given)
        for output in outputs:
            cell = self.memory.known(output)
            if cell is not None:
                self._facts[id(cell)] = facts

    def _judge(self, op: Op, function: str, line: Line | None) -> None:
        module = self._stack[-1] if self._stack else ""
        key = (op.name, line, module)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] > _MOST_PER_LINE:
            return
        sequence = torch._C._autograd._get_sequence_nr() - 1
        if op.in_place:
            self._in_place.add(sequence)
        of_backward = torch._C._current_autograd_node() is not None  # a derivative that the program takes
        for hit in hits_of(op):
            if hit.effect is not None and of_backward:
                continue
            risk = Risk(
                kind=hit.kind,
                certain=hit.certain,
                message=hit.message,
                remedy=(hit.remedy,),
                module=module,
                op=function,
                source=None if line is None else str(line),
                code="" if line is None else line.text,
            )
            shown = [math.inf if hit.effect is None else 0.0]
            self._risks.append((risk, shown))
            if hit.effect is not None:
                self._waiting.setdefault(sequence, []).append((hit.effect, shown))


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy
