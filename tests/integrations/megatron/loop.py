"""The training loop of a script, in the shape of `megatron.training.training`, on the tiny GPT."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

import tiny_gpt
import torch
import torch.distributed as dist
from layouts import Fault, Layout
from tiny_gpt import Training, get_forward_backward_func

STATE: dict[str, Any] = {}


def setup_model_and_optimizer() -> tuple[Any, Any, Any]:
    training = STATE["training"] = Training(Layout(precision="bf16", check_for_nan=True))
    fault = Fault(rank=0, parameter="linear_fc1.weight", persistent="--persistent" in STATE["arguments"])
    training.inject((fault,) if "--fault" in STATE["arguments"] else (), 0)
    return training.model, training.optimizer, training.scheduler


def train() -> None:
    training = STATE["training"]
    training.forward_backward = get_forward_backward_func()
    training.train(5)


def pretrain(arguments: list[str]) -> None:
    STATE["arguments"] = arguments
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tiny_gpt.start(Layout())
    setup_model_and_optimizer()
    train()
    training = STATE["training"]
    state = training.state()
    print(  # noqa: T201 - read by the test
        f"weights {state['weights']} schedule {state['schedule']} skipped {training.skipped} "
        f"checked {training.model[0].ddp_config.check_for_nan_in_grad} arguments {arguments}",
        flush=True,
    )
    dist.destroy_process_group()
