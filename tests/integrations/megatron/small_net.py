"""The contract's driver for Megatron-Core: its small net under Megatron's DDP, optimizer and schedule."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import contract
import tiny_gpt
import torch
from layouts import Layout
from megatron.core.enums import ModelType
from tiny_gpt import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    OptimizerParamScheduler,
    RerunDataIterator,
    TransformerConfig,
    finalize_model_grads,
    get_forward_backward_func,
    get_megatron_optimizer,
    tensor_parallel,
)
from training import Driver, Result, Task


class Megatron(Driver):
    name = "megatron"
    lacks: ClassVar = {
        "checkpoint": "Megatron's own is written by its scripts; the known-good state is on disk",
        "draws": "the schedule does it",
    }
    package = "megatron.core"
    hidden = ("megatron.core",)
    module = "gradsentinel.integrations.megatron"
    oldest = "0.10"
    named = "megatron-core"

    def train(self, task: Task, folder: Path, callbacks: Any, **settings: Any) -> Result:
        from gradsentinel.integrations import megatron  # noqa: PLC0415 - it may be another one by now

        net = task.net()
        model, optimizer, scheduler = _set_up(task, net)
        result = Result(
            net, _State(optimizer), _Schedule(scheduler), host=SimpleNamespace(ddp=model, own=optimizer)
        )
        task.begins()
        for _ in range(task.runs):
            forward_backward = get_forward_backward_func()
            sentinel = None
            if callbacks is not None:
                sentinel = megatron.attach(
                    model, optimizer, callbacks=callbacks, scheduler=scheduler, run_dir=folder
                )
                forward_backward = sentinel.schedule(forward_backward)
            try:
                _loop(task, model, optimizer, scheduler, forward_backward)
            except BaseException as error:
                if sentinel is not None:
                    sentinel.close(error)
                raise
            if sentinel is not None:
                result.incidents += tuple(sentinel.incidents)
                sentinel.detach()
        return result

    def window(self, accumulate: int) -> list[str]:
        """The schedule draws first; then this rank's bucket, and each micro-batch with its loss."""
        return ["batch"] * accumulate + ["after_backward"] * (1 + accumulate)

    def begin(self) -> None:
        importlib.import_module("gradsentinel.integrations.megatron").attach(None, None)

    def parts(self, result: Result) -> list[Any]:
        return [result.host.ddp, result.host.own, result.host.ddp.ddp_config, *result.host.ddp.bucket_groups]


def _set_up(task: Task, net: torch.nn.Module) -> Any:
    for parameter in net.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    # As a GPTModel has them.
    net.model_type, net.set_input_tensor = (
        ModelType.encoder_or_decoder,
        lambda _: None,
    )
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), net)
    clip = {"clip_grad": 0.0 if task.max_norm is None else task.max_norm}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, **clip), [model]
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=0.0,
        lr_warmup_steps=2,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=20,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer, scheduler


def _loop(task: Task, model: Any, optimizer: Any, scheduler: Any, forward_backward: Any) -> None:
    def forward_step(data: Any, chunk: Any) -> Any:
        loss = task.loss(chunk, next(data))
        return loss, lambda output: (output, {"loss": output.detach().clone()})

    loader = task.loader()
    data = RerunDataIterator(iter(loader))
    left = len(loader)
    while left:
        count = min(task.accumulate, left)
        left -= count
        model.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        successful, _, _ = optimizer.step()
        if successful:
            scheduler.step(increment=1)


class _State:
    """Megatron's optimizer as the contract looks at one."""

    def __init__(self, optimizer: Any) -> None:
        parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self.optimizer = parts[0].optimizer

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


class _Schedule:
    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def last_epoch(self) -> int:
        return self._scheduler.num_steps

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self._scheduler.optimizer.param_groups]


def keep_contract(rank: int, folder: Path, clause: str) -> None:
    """Hold Megatron's adapter to one clause of the contract; a job like those of jobs.py."""
    tiny_gpt.start(Layout())
    contract.hold(clause, Megatron(), folder)
    tiny_gpt.stop()
