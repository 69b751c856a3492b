"""What drives the watch of a loop that calls backward, clipping and steps by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.host import Forward
from gradsentinel.integrations.bare import LoopSentinel
from gradsentinel.integrations.engine import Engine
from gradsentinel.integrations.host import FrameworkHost, raw
from gradsentinel.integrations.settings import RunSettings
from gradsentinel.integrations.state_check import check_own
from gradsentinel.integrations.wraps import Wraps, is_wrapped


class LoopDriver:
    """Drives an engine from a tool's methods and from the `step` and `zero_grad` of its optimizers.

    Args:
        optimizers: as the tool's own set-up returned them.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)
        self.wraps = Wraps()
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """What is driven."""
        if self._engine is None:
            raise RuntimeError("attach() comes first")
        return self._engine

    def check_free(self, tool: Any) -> None:
        """Raise ConfigurationError if somebody watches this tool or one of the optimizers already."""
        if is_wrapped(tool, "backward") or any(is_wrapped(one, "step") for one in self.optimizers):
            raise ConfigurationError(
                f"this {type(tool).__name__} is being watched already: close() that sentinel first, or give "
                "one prepare() all models and optimizers"
            )

    def attach(self, engine: Engine) -> None:
        """Begin to drive; `wraps.undo()` ends it."""
        self._engine = engine
        for optimizer in self.optimizers:
            self.wraps.wrap(optimizer, "step", partial(self._around_step, optimizer))
            self.wraps.wrap(optimizer, "zero_grad", self._around_zero_grad)

    def judge(self, inner: Optimizer, norm_type: float | None = None) -> None:
        """Judge the step of an optimizer, unless that was done before.

        `norm_type` is the order of the norm that its gradients are clipped by next; None: nobody clips them.
        """
        if not self.engine.concerns(inner):
            order = 2.0 if norm_type is None else norm_type
            self.engine.judge([inner], norm_type=order, clipped=norm_type is not None)

    def steps_now(self, optimizer: Any) -> bool:
        """Return False if the tool is going to ignore this call of `step`."""
        return True

    def has_stepped(self, optimizer: Any) -> None:
        """Hear that an optimizer's `step` is over."""

    def checked(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that writes checkpoints, with a look at the state before."""

        def save(*args: Any, **kwargs: Any) -> Any:
            self.engine.check_state()
            return plain(*args, **kwargs)

        return save

    def checked_own(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that may be called on one rank alone, with a look at that rank's state before."""

        def save(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs) if check_own(self.engine) else None

        return save

    def _around_step(self, optimizer: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        (inner,) = raw([optimizer])

        def step(closure: Callable[[], Any] | None = None) -> Any:
            if not self.steps_now(optimizer):
                return plain(closure)
            if closure is None:
                self.judge(inner)
                output = plain()
            else:

                def judged() -> Any:
                    """The gradients are those of the closure, so they are judged when it has run."""
                    loss = closure()
                    self.judge(inner)
                    return loss

                output = plain(judged)
            self.engine.stepped(inner)
            self.has_stepped(optimizer)
            return output

        return step

    def _around_zero_grad(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A loop that does not show its batches ends a step here, at the latest."""

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            self.engine.end_unseen()

        return zero_grad


def watch_loop(  # noqa: D417 - the rest is described where users see it
    driver: LoopDriver,
    models: Any,
    *,
    called: Any,
    callbacks: Sequence[Callback] | None,
    schedulers: Sequence[Any],
    scaler: Any,
    forward: Forward | None,
    run_dir: str | os.PathLike[str] | None,
    extra: Mapping[str, Any] | None,
    mesh: Any,
    timeout: float,
    diagnosis_budget: float,
    save: Callable[[Path], str],
) -> LoopSentinel:
    """Begin to watch a loop through its driver; for the other arguments see the tools' own `prepare`.

    Args:
        driver: not attached yet.
        models: the modules to watch.
        called: what `forward` is given as its model.
        schedulers: those of torch, without a tool's wrappers.
        save: writes the tool's own checkpoint for an aborted run, and returns where.
    """
    host = FrameworkHost(models, raw(driver.optimizers), scheduler=schedulers, scaler=scaler, extra=extra)
    settings = RunSettings(run_dir=run_dir, mesh=mesh, timeout=timeout, diagnosis_budget=diagnosis_budget)
    engine = Engine(
        host,
        with_settings(callbacks, settings),
        model=called,
        forward=forward,
        several=True,
        ends_late=len(driver.optimizers) == 1,
        by_steps=True,
        save=save,
    )
    engine.held.wanted = True
    driver.attach(engine)
    return LoopSentinel(engine, driver.wraps)


def with_settings(callbacks: Sequence[Callback] | None, settings: RunSettings) -> list[Callback]:
    """Add the settings to the callbacks; without any, what a run has by default."""
    from gradsentinel.callbacks import NanCallback  # noqa: PLC0415 - only where nothing was given

    if isinstance(callbacks, Callback) or not (callbacks is None or isinstance(callbacks, Sequence)):
        raise ConfigurationError(f"callbacks must be a list, got {type(callbacks).__name__}")
    return [*([NanCallback()] if callbacks is None else callbacks), settings]


def listed(one_or_several: Any) -> list[Any]:
    """Return a list of what was given alone, as a list or tuple, or not at all."""
    if one_or_several is None:
        return []
    return list(one_or_several) if isinstance(one_or_several, (list, tuple)) else [one_or_several]
