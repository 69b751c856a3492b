"""Watches the operators of the dry step, and keeps what may go wrong in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.diagnosis.source import Line, user_line
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.risks.facts import NOTHING, Facts, Given, facts_of_result
from gradsentinel.risks.report import Risk
from gradsentinel.risks.rules import WATCHED, Op, hits_of

_MOST_PER_LINE = 64
"""The same operator on the same line is looked at so many times: loops over layers and time steps."""


class Watcher(Trace):  # type: ignore[no-untyped-call]
    """A trace that also looks at healthy operators: what is one step away from failing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.risks: list[Risk] = []
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
            given = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, args)
            known = {id(copy): known.get(id(x), NOTHING) for copy, x in zip(given, args, strict=True)}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        try:
            handed = Given(given, lambda tensor: known.get(id(tensor), NOTHING))
            self._learn(func, name, handed, result)
            self._judge(Op(name, handed, kwargs, result, differentiable), str(func), user_line())
        except Exception as error:  # noqa: BLE001 - counted; the step must not fail because it is watched
            self.failures.append(error)
        return result

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
        for hit in hits_of(op):
            self.risks.append(
                Risk(
                    kind=hit.kind,
                    certain=hit.certain,
                    message=hit.message,
                    remedy=(hit.remedy,),
                    module=module,
                    op=function,
                    source=None if line is None else str(line),
                    code="" if line is None else line.text,
                )
            )
