"""Puts the watch over a Megatron-Core run together."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradsentinel.assembly import (
    check_seconds,
    default_diagnosers,
    default_examiners,
    make_run,
    with_defaults,
)
from gradsentinel.callback import Callback
from gradsentinel.callbacks.recomputing import Recomputing
from gradsentinel.diagnosis.determinism import deterministically
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron import compat
from gradsentinel.integrations.megatron.host import MegatronHost
from gradsentinel.integrations.megatron.search import search
from gradsentinel.integrations.megatron.sentinel import MegatronSentinel
from gradsentinel.integrations.wraps import Wraps
from gradsentinel.ranks.consensus import Consensus
from gradsentinel.state.restart import claim_directory
from gradsentinel.watch import Watch

logger = logging.getLogger("gradsentinel")


def attach(
    model: Any,
    optimizer: Any,
    *,
    callbacks: Sequence[Callback] | None = None,
    scheduler: Any = None,
    data_iterator: Any = None,
    extra: Mapping[str, Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    allow_nan_check_off: bool = False,
    timeout: float = 600.0,
    diagnosis_budget: float = 30.0,
) -> MegatronSentinel:
    """Watch a Megatron-Core run from now on. Called on: every rank, with its checkpoint loaded.

    Args:
        model: the model, or the list of its chunks, under Megatron's DistributedDataParallel.
        optimizer: what get_megatron_optimizer returned.
        callbacks: as for a `Sentinel`, the same on every rank; None is `[NanCallback()]`.
        scheduler: the OptimizerParamScheduler, which a rollback sets back; it is never stepped here.
        data_iterator: Megatron's RerunDataIterator for the training data, or the list of them that an
            interleaved schedule takes; None on ranks that read no data. Batches are seen as they are drawn
            from it. Not needed where `sentinel.schedule` is used, which sees them, too.
        extra: further objects with state_dict and load_state_dict that belong to the training state.
        run_dir: where events and incidents are written.
        allow_nan_check_off: switch Megatron's own checks for NaN off until `detach`. They end the run
            before a step can be dropped.
        timeout: seconds that a rank may keep the others waiting before they stop, naming it.
        diagnosis_budget: seconds that finding out about one incident may take.

    Raises:
        ConfigurationError: for a version, model, optimizer, callback or setting that cannot work, saying why;
            for an optimizer of another model.
        ConsensusError: if a rank does not attach within `timeout`, naming it.
        TrainingAborted: if a detector finds the initial state unusable.
    """
    compat.check_version()
    check_seconds(timeout, diagnosis_budget)
    chunks = compat.chunks_of(model)
    parts = compat.parts_of(optimizer)
    data = compat.data_iterators_of(data_iterator)
    compat.check_stateful(scheduler, extra)
    if "prepare_grads" in vars(optimizer):
        raise ConfigurationError("this optimizer is being watched already: detach that first")
    if not allow_nan_check_off:
        compat.refuse_nan_checks(chunks)
    host = MegatronHost(chunks, optimizer, parts, scheduler=scheduler, extra=extra)
    full = with_defaults(callbacks, host.device)
    compat.refuse_callbacks(full, chunks)
    run = make_run(host, run_dir, timeout=timeout, diagnosis_budget=diagnosis_budget, local=host.local)
    run.model = model
    run.local.first_peer = _first_peer(run.consensus)
    host.total = _adder(run.consensus)
    watch = Watch(
        run,
        full,
        examiners=default_examiners(),
        diagnosers=[deterministically(search), *default_diagnosers()],
    )
    wraps = Wraps()
    needy = [type(one).__name__ for one in full if isinstance(one, Recomputing)]
    sentinel = MegatronSentinel(host, watch, wraps, recomputing=needy)
    for owner, name in list(compat.nan_checks(chunks)):
        logger.warning("%s is off from now on: GradSentinel looks for NaN itself", name)
        wraps.set(owner, name, False)
    try:
        claim_directory(run)
        sentinel.wrap(optimizer, scheduler, data)
        watch.start()
    except BaseException as error:
        sentinel.close(error)
        raise
    sentinel.between_steps()
    return sentinel


def _adder(consensus: Consensus) -> Any:
    def total(values: Tensor) -> Tensor:
        return consensus.total(values)

    return total


def _first_peer(consensus: Consensus) -> int | None:
    """Return the smallest rank of those between which values travel in forward and backward pass."""
    if consensus.world_size == 1:
        return None
    kinds = ("tensor_and_context", "tensor_model", "context", "pipeline_model", "expert_model")
    groups = [compat.asked(f"get_{kind}_parallel_group") for kind in kinds]
    mine = [compat.ranks_in(group) for group in groups if group is not None]
    leader = list(range(consensus.world_size))

    def first(rank: int) -> int:
        while leader[rank] != rank:
            rank = leader[rank]
        return rank

    for ranks in consensus.gather(mine):
        for group in ranks:
            low, *others = sorted({first(rank) for rank in group})
            for other in others:
                leader[other] = low
    return first(consensus.rank)
