"""Puts a saved step on its feet again in another process: the user's model, the saved batch and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.again.backward import BackwardPass
from gradsentinel.again.scene import MicroBatch
from gradsentinel.assembly import make_run
from gradsentinel.diagnosis.bundle import Bundle
from gradsentinel.diagnosis.collect import AFTER, LATER
from gradsentinel.diagnosis.storable import from_stored
from gradsentinel.diagnosis.target import Target
from gradsentinel.errors import GradSentinelError
from gradsentinel.host import TorchHost
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import stored
from gradsentinel.run import Run
from gradsentinel.state.archive import read_manifest
from gradsentinel.state.rng import RngState
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.state.tree import map_tensors
from gradsentinel.wording import plain_name

_BUDGET = 600.0
"""Seconds that a diagnosis may take where no training waits for it."""


class CannotReplay(GradSentinelError, RuntimeError):
    """The bundle does not hold what a replay needs; the message says what is missing."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """The failing step, ready to be run: the user's model, the saved batch, weights and random states."""

    run: Run
    bundle: Bundle
    said: list[str]
    """What a reader must know to judge the outcome: whose weights, what differs from then."""
    weights: bool
    """True if the weights are those of the step."""
    complete: bool
    """True if all micro-batches of the step are there."""
    has_optimizer: bool
    """True if the optimizer is the target's own."""
    fixed: bool
    """True if the target is to be tried, and not the step to be repeated."""


def set_up(
    bundle: Bundle,
    target: Target,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    own_weights: bool = False,
    fixed: bool = False,
) -> Stage:
    """Return the step with the target's model in it.

    Args:
        bundle: of the incident.
        target: the user's model and forward.
        device: where to run; None leaves the model where the factory put it.
        dtype: run in this floating dtype instead of the model's own.
        own_weights: leave the weights as the factory made them.
        fixed: the target is to be tried, not the step to be repeated: the settings of its optimizer count.

    Raises:
        CannotReplay: if something is missing or does not fit.
        ArchiveError: if the bundle is damaged.
    """
    if not bundle.has("scene"):
        level = bundle.facts().get("level")
        why = f"its level is {level}" if level == "light" else "it has no scene"
        raise CannotReplay(f"{bundle.directory} holds no batch: {why}; level 'standard' or 'full' keeps one")
    state, meta = bundle.scene()
    if not state["microbatches"]:
        raise CannotReplay(f"{bundle.directory} holds no micro-batch: {_why_no_batch(bundle)}")
    for module in _modules(target.model):
        module.to(device=device, dtype=dtype)
    run = _run(bundle, target, meta)
    stage = Stage(
        run=run,
        bundle=bundle,
        said=[],
        weights=False,
        complete=len(state["microbatches"]) == int(meta["count"]),
        has_optimizer=bool(target.optimizers),
        fixed=fixed,
    )
    _put_weights(stage, own=own_weights, fixed=fixed)
    _put_modes(run, meta)
    run.scene.begin()
    _put_batches(stage, state, meta, dtype)
    _put_gradients(stage)
    _put_known_good(stage)
    return stage


@contextmanager
def settings_of(bundle: Bundle) -> Iterator[None]:
    """Use the settings of the saved process that change results, for a while."""
    before = torch.get_default_dtype()
    wanted = read_manifest(bundle.path("scene")).meta.get("default_dtype") if bundle.has("scene") else None
    try:
        if isinstance(wanted, torch.dtype) and wanted.is_floating_point:
            torch.set_default_dtype(wanted)
        yield
    finally:
        torch.set_default_dtype(before)


# -- the parts ---------------------------------------------------------------------------------------------


def _modules(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    return list(model.values() if isinstance(model, Mapping) else model)


def _run(bundle: Bundle, target: Target, meta: Mapping[str, Any]) -> Run:
    parameters = [p for module in _modules(target.model) for p in module.parameters()]
    if not parameters:
        raise CannotReplay("the target's model has no parameters")
    # Without the user's optimizer one that does nothing takes its place: a host has at least one.
    optimizers = target.optimizers or (torch.optim.SGD(parameters, lr=0.0),)
    scale = meta.get("loss_scale")
    host = TorchHost(target.model, optimizers, scaler=_scaler(scale, parameters[0].device))
    run = make_run(host, bundle.directory.parent.parent)
    run.model, run.forward, run.diagnosis_budget = target.model, target.forward, _BUDGET
    run.step = bundle.incident.step
    return run


def _scaler(scale: float | None, device: torch.device) -> Any:
    if scale is None:
        return None
    scaler = torch.amp.GradScaler(device.type, init_scale=scale)
    scaler._lazy_init_scale_growth_tracker(device)
    return scaler


def _put_weights(stage: Stage, *, own: bool, fixed: bool) -> None:
    """Load the saved weights and optimizer state, as far as there are any that may be used."""
    bundle, said = stage.bundle, stage.said
    if own:
        said.append("weights: the target's own, as asked for")
        return
    if not bundle.has("state"):
        said.append(
            "weights: the target's own, for the bundle holds none (level='full' keeps them); "
            "load the checkpoint of that step in the factory to run the very step"
        )
        return
    state, meta = bundle.read("state")
    if meta["sharded"]:
        raise CannotReplay(
            "the saved weights are one rank's shard: load a checkpoint in the factory and give --own-weights"
        )
    after = meta["moment"] == AFTER
    if after and fixed:
        said.append("weights: the target's own, for the saved ones are from after the step, and bad")
        return
    _load(stage.run, state, said)
    stage.weights = not after
    words = {AFTER: "as the failing step left them, bad", LATER: "a few steps after the failing one"}
    said.append(f"weights: {words.get(meta['moment'], 'those of the failing step')}")
    if stage.has_optimizer and meta["optimizers"]:
        _load_optimizers(stage.run, state["optimizers"], said, settings=not fixed)


@torch.no_grad()
def _load(run: Run, state: Mapping[str, Any], said: list[str]) -> None:
    present = {**dict(run.host.named_parameters()), **dict(run.scene.buffers.named())}
    saved = {**state["parameters"], **state["buffers"]}
    for name, value in saved.items():
        if name in present and stored(present[name]).shape != value.shape:
            shapes = f"{tuple(present[name].shape)}, saved {tuple(value.shape)}"
            raise CannotReplay(f"{name} has another shape in the target's model: {shapes}")
    fitting = [name for name in saved if name in present]
    if not fitting:
        raise CannotReplay("the target's model has none of the saved parameters: is it another model?")
    for name in fitting:
        stored(present[name]).copy_(saved[name])
    missing = [name for name in saved if name not in present]
    fresh = [name for name in present if name not in saved]
    if missing:
        said.append(f"the target's model has no {fold(missing)}")
    if fresh:
        said.append(f"not saved, so as the factory made it: {fold(fresh)}")


def _load_optimizers(run: Run, saved: Sequence[Any], said: list[str], *, settings: bool) -> None:
    """Load the moments, and the settings of the groups unless those of the target are to be tried."""
    states = [dict(state) for state in saved]
    if not settings:
        for optimizer, state in zip(run.host.optimizers, states, strict=False):
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            state["groups"] = groups
    try:
        run.host.prepare_optimizers(states)()
    except (GradSentinelError, KeyError, TypeError, ValueError) as error:
        said.append(f"optimizer state: not loaded, {error}")


def _put_modes(run: Run, meta: Mapping[str, Any]) -> None:
    """Put each module in training or evaluation mode, as it was."""
    evaluating = set(meta.get("evaluating", ()))
    for prefix, root in run.host.modules():
        for path, module in root.named_modules():
            name = plain_name(".".join(part for part in (prefix, path) if part))
            module.training = name not in evaluating


def _put_batches(
    stage: Stage, state: Mapping[str, Any], meta: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    scene, device = stage.run.scene, stage.run.host.device

    def cast(tensor: Tensor) -> Tensor:
        narrow = dtype is not None and tensor.is_floating_point()
        return tensor.to(dtype).requires_grad_(tensor.requires_grad) if narrow else tensor

    missing: set[str] = set()
    for entry in state["microbatches"]:
        rng = RngState.from_tree(entry["rng"])
        missing |= {name for name, _ in rng.devices if not _is_here(name)}
        batch = map_tensors(cast, from_stored(entry["batch"], device))
        scene.microbatches.append(MicroBatch(int(entry["index"]), batch, rng))
    scene.rng = scene.microbatches[0].rng
    divisor = int(meta.get("divisor", meta["count"]))
    scene.passes.extend(BackwardPass(microbatch=m.index, divisor=divisor) for m in scene.microbatches)
    healthy = state.get("healthy")
    if healthy is not None:
        batch = map_tensors(cast, from_stored(healthy["batch"], device))
        scene.healthy = (MicroBatch(0, batch, RngState.from_tree(healthy["rng"])),)
    if missing:
        stage.said.append(
            f"random state of {fold(sorted(missing))}: not here, so dropout and the like draw other numbers"
        )
    if not stage.complete:
        numbers = fold([str(m.index) for m in scene.microbatches])
        stage.said.append(f"micro-batch {numbers} of {meta['count']}: the others are not in the bundle")
    if stage.complete:
        stage.run.last_loss = stage.bundle.incident.loss
    stage.run.last_grad_norm = stage.bundle.incident.grad_norm


def _is_here(name: str) -> bool:
    backend = getattr(torch, name.partition(":")[0], None)
    index = int(name.partition(":")[2] or 0)
    return backend is not None and backend.is_available() and index < backend.device_count()


def _put_gradients(stage: Stage) -> None:
    """Put the gradients in place that were found then: what a replay is compared with."""
    if not stage.weights or not stage.bundle.has("gradients"):
        return
    state, meta = stage.bundle.read("gradients")
    if int(meta["world_size"]) > 1:  # they are the mean over all ranks
        return
    for name, parameter in stage.run.host.named_parameters():
        gradient = from_stored(state["gradients"].get(name), parameter.device)
        if isinstance(gradient, Tensor) and gradient.shape == parameter.shape:
            parameter.grad = gradient.to(parameter.dtype)


def _put_known_good(stage: Stage) -> None:
    if not stage.weights or not stage.bundle.has("known-good"):
        return
    state, meta = stage.bundle.read("known-good")
    stage.run.known_good = Snapshot(
        step=int(meta["step"]),
        parameters=dict(state["parameters"]),
        buffers={},
        optimizers=list(state.get("optimizers", ())),
        stateful={},
        rng=stage.run.scene.rng or RngState.capture(),
    )


def _why_no_batch(bundle: Bundle) -> str:
    reasons = [text for text in bundle.facts().get("left_out", ()) if "micro-batch" in str(text)]
    return str(reasons[0]) if reasons else "none was seen; iterate over sentinel.steps(loader)"
