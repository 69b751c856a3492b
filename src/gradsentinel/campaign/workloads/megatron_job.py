"""A GPT of Megatron-Core on real text, tensor- and data-parallel on four ranks: one rank of one life."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsentinel.campaign.journal import plain
from gradsentinel.campaign.kinds import Site
from gradsentinel.campaign.schedule import Planned
from gradsentinel.campaign.workloads.text import corpus
from gradsentinel.demo.data import batches
from gradsentinel.faults import FaultPlan

TENSOR, RANKS = 2, 4
LENGTH, RECORDS, MICROBATCHES, WIDTH = 24, 4, 2, 32
CHECKPOINT_EVERY = 20
TIMEOUT = 60.0
"""Seconds that a rank may keep the others waiting."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one life of the job is to do."""

    policy: str
    seed: int
    steps: int
    faults: tuple[Planned, ...]
    folder: Path
    number: int
    """How often the job has died before."""
    start: int = 0
    """Step it goes on with, from the checkpoint before it."""
    left_out: frozenset[int] = field(default_factory=frozenset)


def rank_main(rank: int, life: Life) -> None:
    """Be one rank. Writes what happens into a file, line by line, so that a death takes nothing away."""
    torch.set_num_threads(1)
    torch.manual_seed(life.seed)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{life.folder}/rendezvous-{life.number}",
        rank=rank,
        world_size=RANKS,
    )
    with (life.folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:

        def note(what: str, **facts: Any) -> None:
            file.write(json.dumps({"what": what, **facts}) + "\n")
            file.flush()

        _train(rank, life, note)
    dist.destroy_process_group()


def _train(rank: int, life: Life, note: Callable[..., None]) -> None:
    from megatron.core import parallel_state, tensor_parallel  # noqa: PLC0415 - optional
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: PLC0415 - optional

    from gradsentinel.campaign.workloads.megatron_model import make  # noqa: PLC0415 - imports Megatron

    parallel_state.initialize_model_parallel(TENSOR, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(life.seed)
    model, optimizer = make(corpus().vocab, LENGTH, WIDTH, TENSOR, check=life.policy == "megatron")
    _load(life, rank, model, optimizer)
    site = Site(optimizer=optimizer, linear="*mlp.linear_fc*")
    faults = () if life.policy == "clean" else life.faults
    plan = FaultPlan([one.fault(site) for one in faults], seed=life.seed, rank=rank)
    attached = plan.attach(model[0])
    replica = parallel_state.get_data_parallel_rank()
    text = _Text(life, replica, plan)
    forward_backward, sentinel = get_forward_backward_func(), None
    if life.policy == "gradsentinel":
        from gradsentinel import standard  # noqa: PLC0415 - its callbacks are for this policy only
        from gradsentinel.integrations import megatron  # noqa: PLC0415 - imports Megatron

        run_dir = life.folder / f"run-{life.number}"
        callbacks = standard(run_dir)
        sentinel = megatron.attach(model, optimizer, callbacks=callbacks, run_dir=run_dir, timeout=TIMEOUT)
        forward_backward = sentinel.schedule(forward_backward)
    told = 0
    for step in range(life.start, life.steps):
        if step in life.left_out:
            continue
        note("drawn", number=step)
        text.step = step
        with plan.at(step):
            model[0].zero_grad_buffer()
            optimizer.zero_grad()
            reports = forward_backward(
                forward_step_func=text.forward_step,
                data_iterator=text,
                model=model,
                num_microbatches=MICROBATCHES,
                seq_length=LENGTH,
                micro_batch_size=RECORDS,
                forward_only=False,
            )
            applied, norm, _ = optimizer.step()
        loss = sum(float(report["lm loss"]) for report in reports) / len(reports)
        healed = sentinel is not None and sentinel.last_action.label == "retry"
        fine = healed or (abs(loss) < float("inf") and (norm is None or abs(float(norm)) < float("inf")))
        note("step", number=step, applied=bool(applied), finite=fine, loss=str(loss))
        for incident in () if sentinel is None else sentinel.incidents[told:]:
            note("incident", number=step, incident=plain(incident))
            if incident.outcome.value == "rolled_back":
                note("back", step=sentinel.step_count if sentinel is not None else 0)
        told = 0 if sentinel is None else len(sentinel.incidents)
        if sentinel is None and (step + 1) % CHECKPOINT_EVERY == 0:
            _save(life, rank, step + 1, model, optimizer)
    attached.detach()
    for hit in plan.log:
        note("hit", hit=hit.as_dict())
    note("end", weights=_digest(model))
    if sentinel is not None:
        sentinel.close()


class _Text:
    """The batches of this rank's replica, by step and micro-batch, with the faults in them."""

    def __init__(self, life: Life, replica: int, plan: FaultPlan) -> None:
        loader = batches(
            corpus(),
            batch_size=RECORDS,
            steps=life.steps * MICROBATCHES,
            context=LENGTH,
            seed=life.seed * 10 + replica,
        )
        self._batches = [{**one, "mask": torch.ones(one["tokens"].shape)} for one in loader]
        self._plan = plan
        self._step, self._drawn = 0, 0
        positions = torch.arange(LENGTH)
        self._positions, self._mask = positions, (positions[:, None] < positions[None])[None, None]

    @property
    def step(self) -> int:
        """The step in flight."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step, self._drawn = value, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        batch = self._batches[self._step * MICROBATCHES + self._drawn]
        self._drawn += 1
        return self._plan.poison(dict(batch))

    def forward_step(self, data: Any, model: Any) -> Any:
        """Compute one micro-batch, as Megatron's schedules want it."""
        batch = next(data)
        output = model(
            batch["tokens"], self._positions.expand_as(batch["tokens"]), self._mask, labels=batch["targets"]
        )

        def loss_of(values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            per_record = (values.float() * batch["mask"]).sum(dim=1) / batch["mask"].sum(dim=1)
            loss = (per_record * batch["weight"]).sum() / batch["weight"].sum()
            return loss, {"lm loss": loss.detach().clone()}

        return output, loss_of


def _save(life: Life, rank: int, step: int, model: Any, optimizer: Any) -> None:
    path = life.folder / f"checkpoint-{step:06}-{rank}.pt"
    state = {"model": model[0].state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)  # noqa: PTH105 - atomic


def _load(life: Life, rank: int, model: Any, optimizer: Any) -> None:
    if not life.start:
        return
    path = life.folder / f"checkpoint-{life.start:06}-{rank}.pt"
    state = torch.load(path, weights_only=False)  # written above
    model[0].load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _digest(model: Any) -> str:
    from gradsentinel.campaign.trial import digest  # noqa: PLC0415 - it starts this workload

    return digest(model[0])
