"""Puts a watch together for a plain loop: defaults, run directory, agreement, average of the weights."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from gradsentinel import ambient
from gradsentinel.again.model_calls import calls_of
from gradsentinel.again.scene import Scene
from gradsentinel.callback import Callback, Responder, needs_random_states
from gradsentinel.devices import device_of
from gradsentinel.errors import ConfigurationError
from gradsentinel.guard import LAG, DeviceGuard, HostGuard
from gradsentinel.host import Host, TorchHost
from gradsentinel.inquiry import Diagnoser, Examiner
from gradsentinel.measures.norm_history import NormHistory
from gradsentinel.ranks.blame import LocalGradients, judge_origin
from gradsentinel.ranks.comparison import take_places
from gradsentinel.ranks.consensus import default_consensus
from gradsentinel.ranks.replicas import find_replicas
from gradsentinel.ranks.topology import VARIABLE, find_mesh, megatron_peers, ranks_of, this_rank
from gradsentinel.run import Run
from gradsentinel.state.health import StateHealth
from gradsentinel.store import RunDirectory
from gradsentinel.watch import Watch

logger = logging.getLogger("gradsentinel")

_LONGEST = 1e9
"""Seconds; torch.distributed counts a timeout in whole numbers of a fraction of one."""


def with_defaults(callbacks: Sequence[Callback] | None, device: torch.device | None = None) -> list[Callback]:
    """Add the callbacks that every run needs and that were not given; some devices need one more."""
    from gradsentinel.callbacks.event_log import EventLog  # noqa: PLC0415 - the core does not depend on callbacks
    from gradsentinel.callbacks.nan import NanCallback  # noqa: PLC0415 - likewise
    from gradsentinel.callbacks.saturation import SaturationCallback  # noqa: PLC0415 - likewise
    from gradsentinel.callbacks.skip import Skip  # noqa: PLC0415 - likewise

    if callbacks is None:
        callbacks = [NanCallback()]

    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise ConfigurationError(f"callbacks must be a list, got {type(callbacks).__name__}")
    full = [*ambient.callbacks(), *callbacks]
    if not any(isinstance(callback, Callback) and _watches(callback) for callback in full):
        logger.warning("none of the callbacks detects anything: add NanCallback() to be protected")
    if device is not None and device_of(device).saturates:
        if not any(isinstance(callback, SaturationCallback) for callback in full):
            full.append(SaturationCallback())
        logger.warning(
            "%s saturates: an overflow becomes the largest finite number and NaN becomes 0, so that no look "
            "for NaN and Inf proves anything; the overflow flag and saturated values are looked at instead",
            device,
        )
    for default in (Skip, EventLog):
        if not any(isinstance(callback, default) for callback in full):
            full.append(default())
    return full


def _watches(callback: Callback) -> bool:
    """True if the callback may return findings about a step."""
    methods = ("on_batch", "on_after_backward", "on_before_clip", "on_after_step")
    judges = not isinstance(callback, Responder) and getattr(callback, "judges_steps", True)
    return judges and any(
        getattr(type(callback), method) is not getattr(Callback, method) for method in methods
    )


def default_examiners() -> list[Examiner]:
    """Return what looks closer at evidence by default."""
    from gradsentinel.diagnosis.scan import scan  # noqa: PLC0415 - the core does not depend on the diagnosis

    return [judge_origin, scan]


def default_diagnosers() -> list[Diagnoser]:
    """Return what finds out more about an incident by default."""
    from gradsentinel.diagnosis.diagnose import diagnose  # noqa: PLC0415 - the core does not depend on the diagnosis

    return [diagnose]


class HostOfRanks(Host, Protocol):
    """What a host tells, beyond `Host`, of how its parameters are spread over ranks."""

    def data_parallel_group(self, name: str) -> Any:
        """Return the process group over which a parameter is kept alike, or None if nobody does that."""

    def data_parallel_meshes(self) -> list[Any]:
        """Return the device meshes along which FSDP2 shards and replicates."""

    def sharded_modules(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that FSDP2 manages, with their names."""


def check_seconds(timeout: Any, diagnosis_budget: Any = 0.0) -> None:
    """Raise ConfigurationError unless both are seconds: a patience above 0, and a budget of 0 or more."""
    for name, value in (("timeout", timeout), ("diagnosis_budget", diagnosis_budget)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigurationError(f"{name}={value!r} must be a number of seconds")
    if not 0 < timeout <= _LONGEST:
        raise ConfigurationError(f"timeout={timeout} must be above 0 seconds, and at most {_LONGEST:.0e}")
    if not diagnosis_budget >= 0:
        raise ConfigurationError(f"diagnosis_budget={diagnosis_budget} must be 0 seconds or more")


def make_run(
    host: HostOfRanks,
    run_dir: str | os.PathLike[str] | None,
    *,
    mesh: Any = None,
    timeout: float = 600.0,
    diagnosis_budget: float = 30.0,
    local: LocalGradients | None = None,
) -> Run:
    """Return the run of this process; the directory is not made yet. Called on: every rank.

    `local` is what looks at this rank's own gradients, where a framework's adapter brings it along.

    Raises:
        ConfigurationError: for seconds, or bounds of memory, that are none; before the ranks talk.
    """
    check_seconds(timeout, diagnosis_budget)
    norms = NormHistory()  # reads the bounds: a mistake in them is told before the ranks talk to each other
    consensus = default_consensus(host.device, timeout=timeout)
    unnamed = f"gradsentinel-runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path = unnamed if run_dir is None else os.fspath(run_dir)
    scene = Scene(host.modules(), device_types=(host.device.type,))
    parameters = [parameter for _, parameter in host.named_parameters()]
    rank, path = take_places(
        consensus,
        path,
        partial(
            this_rank,
            consensus.rank,
            host.device,
            world_size=consensus.world_size,
            mesh=mesh,
            parameters=parameters,
        ),
        stated=os.environ.get(VARIABLE) if mesh is None else None,
    )
    run = Run(
        host=host,
        directory=RunDirectory(path),
        consensus=consensus,
        scene=scene,
        health=StateHealth(host, scene.buffers),
        rank=rank,
        explicit_directory=run_dir is not None,
        optimizers=host.optimizers,
        diagnosis_budget=diagnosis_budget,
        norms=norms,
        local=local or LocalGradients(),
    )
    if run.explicit_directory:
        run.skipped.load()
    if consensus.world_size > 1:
        run.replicas = find_replicas(
            host.named_parameters(),
            replicated=host.data_parallel_group,
            data_parallel=host.data_parallel_meshes(),
        )
    if consensus.world_size > 1 and local is None:
        _watch_local(run, host, parameters)
    return run


def _watch_local(run: Run, host: HostOfRanks, parameters: Sequence[Tensor]) -> None:
    """Have this rank's own gradients looked at before they are reduced."""
    run.local.watch_parameters(
        (name, p) for name, p in host.named_parameters() if host.data_parallel_group(name) is not None
    )
    sharded = host.sharded_modules()
    run.local.watch_sharded(sharded)
    run.local.watch_exchanges(host.modules())
    # FSDP distributes parameters and not what is computed with them.
    peers = megatron_peers() or (() if sharded else ranks_of(find_mesh(parameters)))
    run.local.first_peer = min(peers) if run.rank.rank in peers else None


def make_guard(kind: str, host: TorchHost, watch: Watch, ema: Any, model: Any, lag: int = LAG) -> HostGuard:
    """Return what makes the steps; raises ConfigurationError if it cannot be had for this loop."""
    scene = watch.run.scene
    wanted = watch.run.forward is not None or any(map(needs_random_states, watch.bus.callbacks))
    scene.notes_random_states = wanted
    if kind == "host":
        scene.calls = calls_of(host, model, watch.run.forward)
        return HostGuard(host, watch, ema_updater(ema, model))
    if kind != "device":
        raise ConfigurationError(f"guard={kind!r} must be 'host' or 'device'")
    if ema is not None:
        raise ConfigurationError(
            "ema= is updated after each applied step, which only the device knows under guard='device'; "
            "use guard='host'"
        )
    return DeviceGuard(host, watch, lag)


def ema_updater(ema: Any, model: Any) -> Callable[[], None] | None:
    """Return what updates an average of the weights, if any; raises ConfigurationError if it cannot."""
    if ema is None:
        return None
    for name, with_model in (("update_parameters", True), ("update", True), ("update", False)):
        method = getattr(ema, name, None)
        if method is None:
            continue
        if not with_model:
            return cast(Callable[[], None], method)
        if _takes_argument(method):
            return partial(method, model)
    raise ConfigurationError(
        f"ema ({type(ema).__name__}) needs update_parameters(model), update(model) or update(); "
        "or update it yourself when sentinel.applied is true, and give it in extra="
    )


def _takes_argument(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind(object())
    except TypeError:
        return False
    return True
