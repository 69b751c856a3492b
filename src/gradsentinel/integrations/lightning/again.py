"""The training step of a LightningModule, run again with a captured batch."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradsentinel.again.recompute import RecomputeError
from gradsentinel.integrations.lightning.logged import Call, Logged, metrics_in, put_back, states_of

if TYPE_CHECKING:
    from gradsentinel.integrations.engine import Engine
    from gradsentinel.run import Run

_REMEMBERED = 1024
"""Of so many micro-batches the numbers are kept: more than a step ever has."""


class TrainingStep:
    """Gives the loss of a captured micro-batch as Lightning computes it; called as `forward(model, batch)`.

    Through `training_step`, with the strategy's wrapper and the precision's context. What it logs is kept
    for the case that the step is made of it, and nothing is logged or counted twice. In manual optimization
    it runs as far as `manual_backward`, with the optimizer at rest.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._module = module
        self._parameters = inspect.signature(module.training_step).parameters
        self._numbers: deque[int] = deque(maxlen=_REMEMBERED)
        self.engine: Engine | None = None
        self.logged: Logged | None = None
        """Where it is told what a micro-batch logs."""
        self.running = False
        """True while a step runs again, so that no optimizer may move."""

    @property
    def takes_iterator(self) -> bool:
        """True if the module draws its batches itself, so that nobody else sees them."""
        return "dataloader_iter" in self._parameters

    @property
    def _takes_number(self) -> bool:
        """True if the step is given the number of its batch, by the rule that Lightning itself has."""
        some = any(one.kind is one.VAR_POSITIONAL for one in self._parameters.values())
        return "batch_idx" in self._parameters or some or len(self._parameters) >= 2

    def remember(self, number: int) -> None:
        """Keep the number that Lightning gives the micro-batch that comes next."""
        self._numbers.append(number)

    def forward(self) -> TrainingStep | None:
        """Return what computes the loss again, or None where that cannot be done."""
        return None if self.reason_against() else self

    def why_not(self, run: Run) -> str | None:
        """Return why the step in flight cannot be computed again, although others can."""
        if run.scene.repeated and not self._module.automatic_optimization:
            return "training_step has made a step on this batch before, and would begin with that one again"
        return None

    def reason_against(self) -> str:
        """Return why a step of this module cannot be computed again, "" if it can."""
        if self.takes_iterator:
            return "training_step draws its batches itself (dataloader_iter)"
        if not type(self._module).backward.__module__.endswith("core.module"):
            return f"{type(self._module).__name__} has a backward of its own"
        return ""

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the loss of a micro-batch, with its graph."""
        kwargs: dict[str, Any] = {"batch": batch}
        if self._takes_number:
            kwargs["batch_idx"] = self._number_of(batch)
        automatic = self._module.automatic_optimization
        with self._apart(batch):
            loss = self._automatic(model, kwargs) if automatic else self._manual(model, kwargs)
        if self.logged is not None:
            self.logged.see_loss(loss)
        if not automatic and model is not self._module:
            self._trainer.strategy.pre_backward(loss)  # DDP has yet to hear of it, as in manual_backward
        return loss

    def _automatic(self, model: Any, kwargs: Mapping[str, Any]) -> Tensor:
        if model is self._module:
            with self._trainer.precision_plugin.train_step_context():
                output = self._module.training_step(*kwargs.values())
        else:
            output = self._trainer.strategy.training_step(*kwargs.values())
        return output["loss"] if isinstance(output, Mapping) else output  # type: ignore[no-any-return]

    def _manual(self, model: Any, kwargs: Mapping[str, Any]) -> Tensor:
        def manual_backward(loss: Tensor, *_: Any, **__: Any) -> None:
            raise _Reached(loss)

        with _instead(self._module, manual_backward=manual_backward), self._at_rest():
            try:
                self._automatic(model, kwargs)
            except _Reached as reached:
                return reached.loss
        raise RecomputeError("training_step has run no manual_backward this time")

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Have no optimizer step, nor clear gradients: those of the micro-batches before are needed."""
        self.running = True
        try:
            with ExitStack() as stack:
                for optimizer in self._trainer.optimizers:
                    stack.enter_context(_instead(optimizer, zero_grad=_ignored))
                yield
        finally:
            self.running = False

    def _number_of(self, batch: Any) -> int:
        engine = self.engine
        if engine is None or not self._numbers:
            return 0
        count = len(engine.run.scene.microbatches)
        index = engine.microbatch_of(batch) - count
        return self._numbers[index] if -len(self._numbers) <= index < 0 else self._numbers[-1]

    @contextmanager
    def _apart(self, batch: Any) -> Iterator[None]:
        """Keep what is logged, and what metrics count from the step's start on, apart from the loop's own."""
        module, engine, logged = self._module, self.engine, self.logged
        number = 0 if engine is None else engine.microbatch_of(batch)
        calls: list[Call] = []

        def log(*args: Any, **kwargs: Any) -> None:
            calls.append((_detached(args), _detached(kwargs)))

        metrics = metrics_in(module)
        now = states_of(metrics)
        if logged is not None:
            put_back(logged.counted_before(number))
        try:
            with _instead(module, log=log):
                yield
            if logged is not None:
                logged.recompute(number, calls, states_of(metrics))
        finally:
            put_back(now)


class _Reached(BaseException):
    """Leaves a training step where its backward pass would begin; nothing that handles errors stops it."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self.loss = loss


@contextmanager
def _instead(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give one object other attributes for a while."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(owner).pop(name, None)
        vars(owner).update(own)


def _detached(tree: Any) -> Any:
    """Return arguments without their graphs."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, dict):
        return {name: _detached(value) for name, value in tree.items()}
    return tuple(map(_detached, tree)) if type(tree) is tuple else tree


def _ignored(*_: Any, **__: Any) -> None:
    """Do nothing."""
