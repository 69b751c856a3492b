"""One dry step before day one: what is wrong already, and what is one batch away from going wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradsentinel.again.scene import Scene
from gradsentinel.callbacks.batch_evidence import faults_of
from gradsentinel.callbacks.batch_fields import Reader, tables_of
from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis.diagnose import diagnose
from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.replay import Computed, Replay, ReplayError, reason_against
from gradsentinel.diagnosis.source import raising_line
from gradsentinel.errors import ConfigurationError
from gradsentinel.host import Forward, TorchHost
from gradsentinel.incident import Incident, fold
from gradsentinel.measures.inspection import parts_of, values_of
from gradsentinel.ranks.consensus import LocalConsensus
from gradsentinel.ranks.topology import this_rank
from gradsentinel.risks.report import Report, Risk, joined
from gradsentinel.risks.setup import optimizer_risks, state_risks, unusable
from gradsentinel.risks.watcher import Watcher
from gradsentinel.run import Run
from gradsentinel.state.health import StateHealth
from gradsentinel.store import RunDirectory

_IGNORE_INDEX = -100
_SHARE = 1e-3
"""A gradient above so many times the root of the largest number has a square that may overflow."""
_HALF = (torch.float16, torch.bfloat16)


def preflight(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    batch: Any,
    forward: Forward | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    seconds: float = 30.0,
) -> Report:
    """Run one step without making it, watch every operator, and report what can go wrong with its remedy.

    Looks for non-finite loss, gradients, parameters and buffers (traced to the operator that made them),
    roots, logarithms, divisions, normalisations and arc functions close to their singularities (if it
    finds one, a second step tells what it does to the gradient), rows that a mask leaves nothing of, sums
    of masks that reach -inf, exponents and float16 values near overflow, sums in 16 bits, constants that
    are 0 in their type, parameters without a gradient, and data that cannot be looked up.
    Model, gradients, buffers, random states and training flags are afterwards what they were. Waits for
    the device; takes many times as long as a step. Called on: one rank, which communicates with nobody.

    Args:
        model: as for the Sentinel.
        batch: one batch, as the loader gives it.
        forward: `forward(model, batch) -> loss`, autocast included; None takes `model(**batch).loss` of a
            mapping, else `model(batch)`.
        optimizer: judges its settings too.
        seconds: that tracing a non-finite result to its cause may take.

    Raises:
        ConfigurationError: if the model is none. Whatever the step itself raises is in the report.
    """
    started = time.perf_counter()
    optimizers = () if optimizer is None else optimizer if isinstance(optimizer, Sequence) else (optimizer,)
    run = _dry_run(model, optimizers, forward or _default_forward, seconds)
    trained = [name for name, p in run.host.named_parameters() if p.requires_grad]
    risks = [*optimizer_risks(run.host, optimizers)] if optimizers else []
    loss, operators, unjudged = None, 0, 0
    reason = unusable(run.host)
    if reason is not None:
        risks.insert(0, reason)
    else:
        risks += state_risks(run.host)
        run.scene.begin()
        run.scene.add(batch)
        watcher = _watcher(run)
        found, loss = _step(run, batch, watcher)
        risks += found
        operators, unjudged = watcher.operators, len(watcher.failures)
    return Report(
        risks=joined(risks),
        loss=loss,
        parameters=len(trained),
        operators=operators,
        unjudged=unjudged,
        seconds=time.perf_counter() - started,
    )


class _Alone(LocalConsensus):
    """Agrees with itself, and knows that there are others, who must not be spoken to."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if several else 1


def _dry_run(model: Any, optimizers: Sequence[Optimizer], forward: Forward, seconds: float) -> Run:
    """A run of one process that is never started, for what runs a step again and leaves no trace."""
    modules = (
        [model]
        if isinstance(model, nn.Module)
        else [*(model.values() if isinstance(model, Mapping) else model)]
    )
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigurationError("preflight needs a torch.nn.Module, a list of them, or a mapping to them")
    parameters = [p for module in modules for p in module.parameters()]
    if not parameters:
        raise ConfigurationError("the model has no parameter: nothing can go wrong in training it")
    # Never stepped: a host has an optimizer.
    host = TorchHost(model, tuple(optimizers) or SGD(parameters, lr=0.0))
    scene = Scene(host.modules(), device_types=(host.device.type,))
    return Run(
        host=host,
        directory=RunDirectory("gradsentinel-preflight"),
        consensus=_Alone(),
        scene=scene,
        health=StateHealth(host, scene.buffers),
        rank=this_rank(0, host.device),
        model=model,
        forward=forward,
        diagnosis_budget=seconds,
        explicit_directory=False,
    )


def _step(run: Run, batch: Any, watcher: Watcher) -> tuple[list[Risk], float | None]:
    """Run forward and backward under watch; return what was found, and the loss."""
    reason = reason_against(run)
    if reason is not None:
        return [_unrunnable(reason)], None
    replay = Replay(run)
    try:
        with replay.sheltered():
            computed = replay.compute(run.scene.microbatches[0], mode=watcher)
            loss = float(computed.loss)
            _settle(run, replay, watcher)
            found = [*watcher.risks, *_judge(run, computed)]
    except ReplayError as error:
        return [_unrunnable(str(error))], None
    except Exception as error:  # noqa: BLE001 - the user's own code: that it raises is what is to be told
        return [*watcher.risks, *_raised(run, batch, error)], None
    finally:
        watcher.release()
    bad = bool(judge(computed.loss)) or any(judge(g) for g in computed.gradients.values())
    if bad:
        traced = _traced(run, computed)
        found = [traced, *(risk for risk in found if risk.source is None or risk.source != traced.source)]
    return found, loss


def _watcher(run: Run, *, calm: bool = False) -> Watcher:
    return Watcher(run.host.modules(), run.host.named_parameters(), calm=calm)


def _settle(run: Run, replay: Replay, watcher: Watcher) -> None:
    """Compare what singularities do to the gradient with the gradient that is left without them."""
    if not watcher.shows_effects:
        return
    calm = _watcher(run, calm=True)
    try:
        gradients = replay.compute(run.scene.microbatches[0], mode=calm).gradients.values()
        norms = [torch.linalg.vector_norm(parts_of(values_of(g)).float()) for g in gradients]
        watcher.settle(float(torch.stack([norm.cpu() for norm in norms]).norm()) if norms else 0.0)
    except Exception as error:  # noqa: BLE001 - counted; then they are all told
        watcher.failures.append(error)
    finally:
        calm.release()


def _judge(run: Run, computed: Computed) -> Iterator[Risk]:
    """Look at loss and gradients."""
    loss = computed.loss
    if loss.dtype in _HALF:
        name = str(loss.dtype).removeprefix("torch.")
        digits = "2 to 3" if loss.dtype is torch.bfloat16 else "3 to 4"
        yield Risk(
            kind="narrow_loss",
            certain=False,
            message=f"the loss is computed in {name}, which holds {digits} digits",
            remedy=("compute the loss in float32: loss_function(logits.float(), targets)",),
        )
    trained = {name: p for name, p in run.host.named_parameters() if p.requires_grad}
    if trained and (computed.root is None or not computed.nodes or not computed.gradients):
        yield Risk(
            kind="no_gradient",
            certain=True,
            message="the loss depends on no parameter: was it detached, or computed under no_grad?",
            remedy=("return the loss with its graph from forward=",),
        )
        return
    without = [name for name in trained if name not in computed.gradients]
    if without:
        yield Risk(
            kind="no_gradient",
            certain=True,
            message=f"{len(without)} of {len(trained)} parameters get no gradient: {fold(without)}",
            remedy=(
                "use them in forward, or requires_grad_(False); with DDP they need find_unused_parameters",
            ),
            names=tuple(without),
        )
    for name, gradient in computed.gradients.items():
        yield from _judge_gradient(name, gradient)


def _judge_gradient(name: str, gradient: Tensor) -> Iterator[Risk]:
    values = parts_of(values_of(gradient))
    if not values.numel() or not values.is_floating_point():
        return
    largest, limit = float(values.abs().amax()), torch.finfo(values.dtype).max
    wide = values.dtype not in _HALF or values.dtype is torch.bfloat16
    bound = _SHARE * math.sqrt(limit) if wide else limit / 8
    if bound < largest <= limit:
        what = "its square overflows in the norm" if wide else f"{limit:.5g} is the largest number there is"
        yield Risk(
            kind="large_gradient",
            certain=False,
            message=f"the gradient of {name} reaches {largest:.3g} in "
            f"{str(values.dtype).removeprefix('torch.')}: {what}",
            remedy=("average the loss instead of summing it, normalise the inputs, or scale the loss down",),
            module=name.rpartition(".")[0],
        )


def _traced(run: Run, computed: Computed) -> Risk:
    """Find out what made loss or gradients non-finite, as for an incident of a real run."""
    bad_loss = bool(judge(computed.loss))
    kind = Kind.NONFINITE_LOSS if bad_loss else Kind.NONFINITE_GRADIENT
    what = f"the loss is {float(computed.loss)}"
    if not bad_loss:
        names = [name for name, gradient in computed.gradients.items() if judge(gradient)]
        what = f"non-finite gradient in {fold(names)}"
    incident = Incident(id="preflight", step=run.step, kind=kind, action=Action.WARN, message=what)
    diagnose(incident, run)
    found = incident.diagnosis
    return Risk(
        kind=str(kind),
        certain=True,
        message=what,
        remedy=found.remedy if found is not None and found.remedy else ("see what is seen",),
        module=None if found is None else found.module,
        op=None if found is None else found.op,
        source=None if found is None else found.source,
        evidence=() if found is None else found.evidence,
    )


def _raised(run: Run, batch: Any, error: Exception) -> Iterator[Risk]:
    """Say that the step raised, and what is wrong with the batch, as look-ups fail on bad numbers."""
    line = raising_line(error)
    yield Risk(
        kind="raises",
        certain=True,
        message=f"the step raises {type(error).__name__}: {error}",
        remedy=("run the step by itself to see the whole traceback",),
        source=None if line is None else str(line),
        code="" if line is None else line.text,
    )
    reader = Reader({}, tables_of(run.host.modules()))
    try:
        faults = faults_of(batch, reader, ignore_index=_IGNORE_INDEX, allowed=(), guessed=True)
    except RuntimeError:  # the device has failed for good
        return
    for fault in faults:
        yield Risk(
            kind="bad_batch",
            certain=True,
            message=f"bad data: {fault.fact}",
            remedy=("repair or filter the records; look for another tokenizer, vocabulary or label map",),
        )


def _unrunnable(reason: str) -> Risk:
    return Risk(
        kind="not_run",
        certain=True,
        message=f"no step could be run: {reason}",
        remedy=("give a forward= that returns the loss, and a model that one process can run alone",),
    )


def _default_forward(model: Any, batch: Any) -> Tensor:
    result = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss = getattr(result, "loss", None)
    if loss is None:
        loss = result["loss"] if isinstance(result, Mapping) and "loss" in result else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ReplayError("the model returns no loss: give forward=lambda model, batch: loss")
    return loss
