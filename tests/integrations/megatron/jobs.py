"""What the ranks of a test do; runs in the processes that have Megatron."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_gpt
from layouts import Fault, Layout
from small_net import keep_contract
from tiny_gpt import Training

from gradsentinel import AfterBackward, AfterStep, Batch, BeforeClip, StepStart, TrainingAborted
from gradsentinel.devices.cpu import Cpu
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations import megatron
from gradsentinel.integrations.megatron.by_name import make_callbacks
from gradsentinel.testing import swallowed

__all__ = ["keep_contract", "refused", "restart", "saturating", "train", "warned"]

logging.getLogger("gradsentinel").setLevel(logging.ERROR)


def train(
    rank: int,
    layout: Layout,
    folder: Path,
    *,
    callbacks: str | None = None,
    faults: tuple[Fault, ...] = (),
    left_out: tuple[int, ...] = (),
    steps: int = 5,
    schedule: bool = True,
    data: bool = False,
    machine: str = "",
    suspicious: tuple[int, ...] = (),
    again: int = 0,
) -> dict[str, Any]:
    """Train, watched if there are callbacks; returns the state, what happened, and what the ranks saw.

    `machine` is the mode of Megatron's rerun machine, which is told to distrust the losses of some steps.
    `left_out` are steps that the loop itself does not make, for comparison; `again` more steps come after
    the watch was taken off.
    """
    tiny_gpt.start(layout)
    training = Training(layout)
    if machine:
        training.start_machine(machine, suspicious)
    training.inject(faults, rank)
    training.left_out = set(left_out)
    found: dict[str, Any] = {"incidents": [], "events": [], "aborted": ""}
    if callbacks is None:
        training.train(steps)
    else:
        _train_watched(training, folder, callbacks, steps, found, schedule=schedule, data=data)
    training.train(again)
    found |= training.outcome()
    found |= {"struck": training.injector.struck, "skipped": training.skipped, "coordinates": _place()}
    found["swallowed"] = [repr(error) for error in swallowed()]
    tiny_gpt.stop()
    return found


def _train_watched(
    training: Training,
    folder: Path,
    callbacks: str,
    steps: int,
    found: dict[str, Any],
    *,
    schedule: bool,
    data: bool,
) -> None:
    before = _objects(training)
    sentinel = megatron.attach(
        training.model,
        training.optimizer,
        callbacks=make_callbacks(callbacks),
        scheduler=training.scheduler,
        data_iterator=training.data if data else None,
        run_dir=folder / "run",
    )
    plain = training.forward_backward
    if schedule:
        training.forward_backward = sentinel.schedule(plain)
    for kind in (StepStart, Batch, AfterBackward, BeforeClip, AfterStep):
        sentinel.on(kind, lambda event: found["events"].append(_told(event)))
    try:
        training.train(steps)
    except TrainingAborted as error:
        found["aborted"] = str(error)
        sentinel.close(error)
    found["incidents"] = [incident.as_dict() for incident in sentinel.incidents]
    found["good"] = sentinel.applied_steps
    sentinel.detach()
    found["restored"] = _objects(training) == before
    training.forward_backward = plain


def _told(event: Any) -> tuple[Any, ...]:
    name = type(event).__name__
    if isinstance(event, AfterBackward):
        loss = None if event.loss is None else float(event.loss)
        return (name, event.step, event.reduced, event.scaled, event.gradients.names, loss)
    if isinstance(event, BeforeClip):
        return (name, event.step, float(event.gradients.total_norm), event.gradients.names)
    if isinstance(event, AfterStep):
        return (name, event.step, event.applied, event.grad_norm, event.learning_rates)
    return (name, event.step)


def _objects(training: Training) -> list[Any]:
    """What the watch may have changed on the objects themselves."""
    from gradsentinel.integrations.megatron.compat import bucket_groups  # noqa: PLC0415 - as above

    owners = [training.optimizer, *(group for chunk in training.model for group in bucket_groups(chunk))]
    own = [sorted(name for name, value in vars(owner).items() if callable(value)) for owner in owners]
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
        for chunk in training.model
        for module in chunk.modules()
    ]
    drawn = [type(iterator.iterable).__name__ for iterator in training.data]
    methods = ("_forward_impl", "compute_language_model_loss")
    wrapped = [
        [name for name in methods if name in vars(module)]
        for chunk in training.model
        for module in chunk.modules()
    ]
    return [own, hooks, drawn, wrapped, [chunk.ddp_config.check_for_nan_in_grad for chunk in training.model]]


def _place() -> dict[str, int]:
    state = tiny_gpt.parallel_state
    return {
        "tp": state.get_tensor_model_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "scheduler": {"scheduler": 3},
    "extra": {"extra": {"a": 1}},
    "extra list": {"extra": [1]},
    "timeout text": {"timeout": "x"},
    "timeout below 0": {"timeout": -1},
    "timeout for ever": {"timeout": float("inf")},
    "budget": {"diagnosis_budget": -1},
}
"""Settings that cannot work."""


OTHERS: dict[str, Callable[[Training], tuple[Any, Any]]] = {
    "bare model": lambda training: (training.model[0].module, training.optimizer),
    "half the model pp2vpp2": lambda training: (training.model[:1], training.optimizer),
    "another model's optimizer": lambda training: (training.model, Training(training.layout).optimizer),
}
"""Models and optimizers that do not belong together, or to Megatron."""


def warned(
    rank: int, layout: Layout, folder: Path, callbacks: str, *, schedule: bool, steps: int = 2
) -> list[str]:
    """Train two steps, and return what was logged meanwhile."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradsentinel")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    train(rank, layout, folder, callbacks=callbacks, schedule=schedule, steps=steps)
    return told


def saturating(rank: int, layout: Layout, folder: Path, **settings: Any) -> tuple[list[str], dict[str, Any]]:
    """Train on a device that says that it saturates; return warnings, and what no callback finds."""
    Cpu.saturates = True  # in this process, which ends with the job
    return warned(rank, layout, folder / "warned", "NanCallback", schedule=True), train(
        rank, layout, folder, callbacks="", **settings
    )


def refused(rank: int, layout: Layout, folder: Path, what: str) -> tuple[str, list[Any]]:
    """Try to attach to something that cannot work; returns the message, and whether all is as before."""
    tiny_gpt.start(layout)
    training = Training(layout)
    before = _objects(training)
    model: Any = training.model
    optimizer: Any = training.optimizer
    callbacks = "NanCallback"
    settings = SETTINGS.get(what, {})
    if what in OTHERS:
        model, optimizer = OTHERS[what](training)
    elif what == "torch optimizer":
        optimizer = training.parts()[0].optimizer
    elif what.startswith(("rescue", "resync")):
        callbacks = f"NanCallback, {what.partition(' ')[0].capitalize()}"
        training.model[0].config.gradient_accumulation_fusion = what.endswith("fusion")
    elif what == "twice":
        megatron.attach(model, optimizer, run_dir=folder / "first")
    elif what == "old version":
        from megatron import core  # noqa: PLC0415 - to be made older than it is

        core.__version__ = "0.9.0"
    elif what == "step overlap":
        optimizer.chained_optimizers[0].config.overlap_param_gather_with_optimizer_step = True
    try:
        megatron.attach(
            model,
            optimizer,
            callbacks=make_callbacks(callbacks),
            data_iterator=iter(()) if what == "plain iterator" else None,
            run_dir=folder / "run",
            **settings,
        )
    except ConfigurationError as error:
        message = str(error)
    else:
        message = ""
    tiny_gpt.stop()
    return message, [before, _objects(training)]


def restart(rank: int, layout: Layout, folder: Path) -> tuple[dict[str, str], dict[str, str], int]:
    """Train, abort, and take up the known good state in a training of its own."""
    tiny_gpt.start(layout)
    first = Training(layout)
    callbacks = (
        "NanCallback, Skip(max_skips=0), Rollback(every=2, confirm_after=0, max_rollbacks=0, on_disk=2)"
    )
    settings: dict[str, Any] = {"callbacks": make_callbacks(callbacks), "run_dir": folder / "run"}
    sentinel = megatron.attach(first.model, first.optimizer, scheduler=first.scheduler, **settings)
    first.forward_backward = sentinel.schedule(first.forward_backward)
    first.inject((Fault(rank=layout.world - 1, parameter="linear_fc1.weight", step=4),), rank)
    kept: dict[str, str] = {}
    try:
        for _ in range(6):
            first.train_step()
            if first.step == 4:
                kept = first.state()
    except TrainingAborted as error:
        sentinel.close(error)
    second = Training(layout)
    settings["callbacks"] = make_callbacks(callbacks)
    watch = megatron.attach(second.model, second.optimizer, scheduler=second.scheduler, **settings)
    step = watch.restore()
    taken = second.state()
    watch.close()
    tiny_gpt.stop()
    return kept, taken, step
