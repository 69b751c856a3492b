"""Where a bad value begins on one rank: hooks that look at what modules, losses and gradients are made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsentinel.diagnosis.memory import judge
from gradsentinel.integrations.megatron.host import MegatronHost
from gradsentinel.ranks.topology import Rank
from gradsentinel.state.tree import tensors_in
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

_DEEPEST = 3
_LOSS = "the loss function"
_LAST = 1 << 40
"""The loss comes after every module of its micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The first bad value that one rank made of good ones."""

    order: tuple[int, int, int, int]
    """Forward before backward; then the micro-batch, the place in the pipeline, and that on the rank."""
    rank: Rank
    phase: str
    microbatch: int
    module: str
    """In the whole model; empty for the loss function."""
    kind: str
    """Class of the module."""
    chunk: int = 0
    path: str = ""
    """Of the module, in its own chunk."""
    gradient: str = ""
    """The parameter whose gradient it is."""

    def __str__(self) -> str:
        if self.gradient:
            return f"the gradient of {self.gradient} is not finite from micro-batch {self.microbatch} on"
        who = f"{self.module} ({self.kind})" if self.module else _LOSS
        return f"{who} makes a value that is not finite of finite ones, in micro-batch {self.microbatch}"


class Onlooker:
    """Looks at a step that all ranks compute together: an error of its own must not keep others waiting."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """Why it does not look any more."""

    def _quiet(self, look: Callable[..., None]) -> Callable[..., None]:
        def quiet(*given: Any) -> None:
            if self.failure is None:
                try:
                    look(*given)
                except Exception as error:  # noqa: BLE001 - told by `complain`, when the ranks have met
                    self.failure = error.with_traceback(None)

        return quiet

    def complain(self, step: int) -> None:
        """Say so if there was an error."""
        if self.failure is not None:
            logger.warning("step %d: what it computes could not be looked at: %r", step, self.failure)
            record_swallowed(self.failure)


class Watcher(Onlooker):
    """Looks at each module's output, each loss and each parameter's gradient, until the first bad one."""

    def __init__(self, host: MegatronHost, rank: Rank) -> None:
        super().__init__()
        self._host = host
        self._rank = rank
        self._calls: dict[int, int] = {}
        self._count = 0
        self._spoilt: dict[int, int] = {}
        """Micro-batches of which something is bad on this rank, and after how many looks that was seen."""
        self.first: Place | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on, in the block."""
        host, handles = self._host, []
        try:
            for chunk, (_, root) in enumerate(host.modules()):
                for path, module in root.named_modules():
                    hook = self._after(path, chunk)
                    handles.append(module.register_forward_hook(hook, with_kwargs=True))
            for name, parameter in host.named_parameters():
                if parameter.requires_grad:
                    look = self._in_backward(name, parameter)
                    handles.append(parameter.register_hook(look))  # type: ignore[no-untyped-call]
            with host.looked_at_by(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Do nothing about a forward pass as such."""
        del microbatch
        return nullcontext()

    def loss(self, loss: Tensor, microbatch: int) -> None:
        """Look at a micro-batch's loss, which is made outside of the modules."""
        self._quiet(self._look_at_loss)(loss, microbatch)

    def _look_at_loss(self, loss: Tensor, microbatch: int) -> None:
        if not finite((loss,)) and microbatch not in self._spoilt:
            self._note_forward(microbatch, _LAST)

    def _note_forward(
        self,
        microbatch: int,
        number: int,
        *,
        module: str = "",
        kind: str = "",
        chunk: int = 0,
        path: str = "",
    ) -> None:
        if self.first is not None:
            return
        place = chunk * self._host.stages + self._host.stage if module else _LAST
        self.first = Place(
            order=(0, microbatch, place, number),
            rank=self._rank,
            phase="forward",
            microbatch=microbatch,
            module=module,
            kind=kind,
            chunk=chunk,
            path=path,
        )

    def _after(self, path: str, chunk: int) -> Any:
        renamed = self._host.names.module(path, chunk) if path else "model"

        def look(module: Any, args: Any, kwargs: Any, made: Any) -> None:
            self._count += 1  # the same on ranks that hold parts of the same modules
            if self.first is not None or finite(made):
                return
            step = self._host.step
            microbatch = step.microbatch if step is not None else 0
            # A module that itself makes a bad value ends after those inside it that were given it. What
            # they hand to other ranks is bad there at the same count.
            number = self._spoilt.setdefault(microbatch, self._count)
            if finite((args, kwargs)):
                kind = type(module).__name__
                self._note_forward(microbatch, number, module=renamed, kind=kind, chunk=chunk, path=path)

        return self._quiet(look)

    def _in_backward(self, name: str, parameter: Tensor) -> Any:
        chunk = self._host.names.describe(parameter)["chunk"]

        def look(gradient: Tensor) -> None:
            microbatch = self._calls[id(parameter)] = self._calls.get(id(parameter), -1) + 1
            self._count += 1
            if self.first is not None or finite(gradient):
                return
            place = chunk * self._host.stages + self._host.stage
            self.first = Place(
                order=(1, microbatch, -place, self._count),
                rank=self._rank,
                phase="backward",
                microbatch=microbatch,
                module=name.rpartition(".")[0],
                kind="",
                chunk=chunk,
                gradient=name,
            )

        return self._quiet(look)


def finite(values: Any) -> bool:
    """Whether all floating-point tensors are finite; waits for the device."""
    return not any(judge(tensor.detach()) for tensor in floats_in(values))


def floats_in(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in what a module was given or made."""
    return (tensor for _, tensor in tensors_in(values, max_depth=_DEEPEST) if tensor.is_floating_point())
