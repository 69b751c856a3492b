"""Puts a watch together for a plain loop: defaults, run directory, agreement, average of the weights."""

from __future__ import annotations

import inspect
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from gradsentinel.callback import Callback
from gradsentinel.consensus import default_consensus
from gradsentinel.errors import ConfigurationError
from gradsentinel.health import StateHealth
from gradsentinel.host import Host
from gradsentinel.incident import Rank
from gradsentinel.run import Run
from gradsentinel.scene import Scene
from gradsentinel.store import RunDirectory
from gradsentinel.watch import Examiner


def with_defaults(callbacks: Sequence[Callback]) -> list[Callback]:
    """Add the callbacks that every run needs and that were not given."""
    from gradsentinel.callbacks.event_log import EventLog  # noqa: PLC0415 - the core does not depend on callbacks
    from gradsentinel.callbacks.skip import Skip  # noqa: PLC0415 - likewise

    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise ConfigurationError(f"callbacks must be a list, got {type(callbacks).__name__}")
    full = list(callbacks)
    for default in (Skip, EventLog):
        if not any(isinstance(callback, default) for callback in full):
            full.append(default())
    return full


def default_examiners() -> list[Examiner]:
    """Return what looks closer at evidence by default."""
    from gradsentinel.diagnosis.scan import scan  # noqa: PLC0415 - the core does not depend on the diagnosis

    return [scan]


def make_run(host: Host, run_dir: str | os.PathLike[str] | None) -> Run:
    """Return the run of this process; the directory is not made yet. Called on: every rank."""
    consensus = default_consensus(host.device)
    unnamed = f"gradsentinel-runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path = unnamed if run_dir is None else os.fspath(run_dir)
    scene = Scene(host.modules(), device_types=(host.device.type,))
    return Run(
        host=host,
        directory=RunDirectory(consensus.gather(path)[0]),
        consensus=consensus,
        scene=scene,
        health=StateHealth(host, scene.buffers),
        rank=Rank(rank=consensus.rank, host=socket.gethostname(), device=str(host.device)),
        explicit_directory=run_dir is not None,
        optimizers=host.optimizers,
    )


def ema_updater(ema: Any, model: Any) -> Callable[[], None]:
    """Return what updates an average of the weights; raises ConfigurationError if it has no way to."""
    if ema is None:
        return lambda: None
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
