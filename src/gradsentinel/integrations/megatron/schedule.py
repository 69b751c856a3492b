"""The forward and backward passes of a step, as Megatron's schedule runs them, and runs them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from gradsentinel.integrations.megatron.collectives import unwound
from gradsentinel.state.tree import map_tensors

Seen = Callable[[Any], None]


class Look(Protocol):
    """Somebody who looks at a step while it is computed again."""

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Return a context for the forward pass of a micro-batch, and another one for its loss."""

    def loss(self, loss: Tensor, microbatch: int) -> None:
        """Hear of a micro-batch's loss, as the loss function made it."""


class RecordedBatches:
    """A data iterator that keeps the micro-batches of the step in flight, to hand them out again."""

    def __init__(self, source: Any, seen: Seen) -> None:
        self._source = source
        self._seen = seen
        self._kept: list[Any] = []
        self._place = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._place < len(self._kept):
            self._place += 1
            return _copied(self._kept[self._place - 1])
        batch = next(self._source)
        # The loop may take its batch apart; what is kept are the same tensors in other containers.
        self._kept.append(_copied(batch))
        self._place += 1
        self._seen(self._kept[-1])
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def rewind(self) -> None:
        """Begin again with the first micro-batch of the step."""
        self._place = 0


class SeenBatches:
    """What a RerunDataIterator draws from, told as it is drawn, unless the schedule's own iterator tells."""

    def __init__(self, source: Any, seen: Seen) -> None:
        self._source = source
        self._seen = seen

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        self._seen(_copied(batch))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class ScheduledStep:
    """One call of the function that `get_forward_backward_func` returned, on this rank.

    Args:
        function: that function.
        arguments: its arguments, by name.
        seen: hears each micro-batch that is drawn here; some ranks draw none.
        output: hears each micro-batch's output of this stage: the tensor, its number, the chunk's number.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        *,
        seen: Seen,
        output: Callable[[Tensor, int, int], None],
    ) -> None:
        self._function = function
        self._arguments = dict(arguments)
        self._output = output
        self._recorders: dict[int, RecordedBatches] = {}
        self._seen = seen
        self._arguments["data_iterator"] = self._recorded(arguments.get("data_iterator"))
        self._arguments["forward_step_func"] = self._watched(arguments["forward_step_func"])
        self._counts: dict[int, int] = {}
        self.microbatch = 0
        """Number of the one that is in its forward pass, or was last."""
        self.chunk = 0
        """Number of the model chunk that is in its forward pass, or was last."""
        self.exchanges: int | None = None
        """How many exchanges of this forward pass were looked at; None outside of one."""
        self._returns: tuple[int, int, int] | None = None
        """Micro-batch and chunk of the backward pass in flight, and the number of its last exchange."""
        self.look: Look | None = None
        self.losses: list[Tensor] = []
        """One for each micro-batch whose loss this rank computes: unscaled, a mean; 0-dim, no graph."""
        self._result: Any = None

    def run(self) -> Any:
        """Run it, and return what it returns."""
        self._result = self._call()
        return self._result

    def again(self) -> list[Tensor]:
        """Run it on the same micro-batches; overwrites what it returned before, which the loop holds."""
        for recorder in self._recorders.values():
            recorder.rewind()
        fresh = self._call()
        if isinstance(self._result, list):
            self._result[:] = fresh
        return self.losses

    def next_return(self) -> tuple[int, int, int] | None:
        """Return micro-batch, chunk and number of the next exchange of the backward pass; None before one."""
        if self._returns is not None:
            microbatch, chunk, count = self._returns
            self._returns = microbatch, chunk, count + 1
        return self._returns

    def _call(self) -> Any:
        self._counts, self.losses, self._returns = {}, [], None
        with unwound():
            return self._function(**self._arguments)

    def _recorded(self, iterator: Any) -> Any:
        """Return the data iterator(s) as recording ones; ranks that read no data have None."""
        if iterator is None:
            return None
        if isinstance(iterator, (list, tuple)):
            return type(iterator)([self._recorded(one) for one in iterator])
        if id(iterator) not in self._recorders:
            self._recorders[id(iterator)] = RecordedBatches(iterator, self._seen)
        return self._recorders[id(iterator)]

    def _watched(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.microbatch = number = self._counts.get(id(model), 0)
            self._counts[id(model)] = number + 1
            self.chunk, self.exchanges = list(self._counts).index(id(model)), 0
            try:
                with self._looked_at(number):
                    output, loss_func = forward_step(data_iterator, model, *args, **kwargs)
            finally:
                self.exchanges = None
            if isinstance(output, Tensor):
                self._output(output, number, self.chunk)
                self._expect_return(output, number, self.chunk)
            if loss_func is None:
                return output, loss_func

            def watched_loss(*given: Any, **settings: Any) -> Any:
                with self._looked_at(number):
                    outputs = loss_func(*given, **settings)
                self._note(outputs, number)
                return outputs

            return output, watched_loss

        # Some schedules look at the signature.
        watched.__wrapped__ = forward_step  # type: ignore[attr-defined]
        watched.__name__ = getattr(forward_step, "__name__", "forward_step")
        return watched

    def _expect_return(self, output: Tensor, microbatch: int, chunk: int) -> None:
        """Know of the backward pass of a micro-batch as it comes to this stage, by its output's gradient."""
        if output.requires_grad:

            def began(_gradient: Tensor) -> None:
                self._returns = microbatch, chunk, 0

            output.register_hook(began)  # type: ignore[no-untyped-call]

    def _looked_at(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self.look is None else self.look.forward(microbatch)

    @torch.no_grad()
    def _note(self, outputs: Any, microbatch: int) -> None:
        """Take note of a loss: (loss, report), or (sum of losses, number of tokens, report)."""
        if not isinstance(outputs, tuple) or not isinstance(outputs[0], Tensor) or outputs[0].numel() != 1:
            return
        if self.look is not None:
            self.look.loss(outputs[0], microbatch)
        loss = outputs[0].detach().reshape(())
        # A new tensor: the schedule divides this one in place.
        if len(outputs) == 3 and isinstance(outputs[1], Tensor):
            self.losses.append(loss / outputs[1].detach().reshape(()).clamp(min=1))
        else:
            self.losses.append(loss.clone())


def _copied(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor, batch)
