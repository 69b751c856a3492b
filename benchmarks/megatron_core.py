"""What the watch costs on Megatron-Core: two ranks over gloo, data- or tensor-parallel; and its own check.

Every step is done by all variants in the same random order on both ranks; the numbers are rank 0's, by the
clock on the wall and by the time its own thread computes, which leaves out waiting for the other rank and for
whoever else uses the machine. Runs in a process of its own, because what stands for CUDA changes torch:
`python benchmarks/megatron_core.py` prints JSON.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS, ROUNDS, WARM_UP = 2, 15, 3
VOCABULARY, LENGTH, WIDTH, LAYERS, MICROBATCHES, BATCH = 512, 128, 192, 4, 2, 4
LAYOUTS = {"data-parallel": 1, "tensor-parallel": 2}
"""Tensor-parallel size of each."""
VARIANTS = ("plain", "plain again (A/A)", "Megatron's own check", "watched")


def measure() -> dict[str, Any]:
    """Return the step times over those of the plain run, by layout and variant, and the plain step in ms."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def training(*, checked: bool, tensor: int = 1) -> dict[str, Any]:
    """Make a GPT, its optimizer and the pieces of its loop."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=checked
    )
    chunks = [DistributedDataParallel(config, ddp, Float16Module(config, model))]
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    config.finalize_model_grads_func = finalize_model_grads
    return {"model": chunks, "optimizer": optimizer, "schedule": get_forward_backward_func()}


def forward_step(data: Any, model: Any) -> Any:
    tokens = next(data)
    place = torch.arange(LENGTH)
    output = model(tokens, place.expand_as(tokens), (place[:, None] < place)[None, None], labels=tokens)

    def loss_func(values: Any) -> Any:
        loss = values.float().mean()
        return loss, {"loss": loss.detach()}

    return output, loss_func


def stepper(parts: dict[str, Any]) -> Callable[[list[Any]], None]:
    def step(batches: list[Any]) -> None:
        for chunk in parts["model"]:
            chunk.zero_grad_buffer()
        parts["optimizer"].zero_grad()
        parts["schedule"](
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=parts["model"],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        parts["optimizer"].step()

    return step


def race(rank: int, folder: Path, layout: str, results: Any) -> None:
    """Step all variants on one rank, and have rank 0 tell the times."""
    from megatron.core import parallel_state, tensor_parallel

    from gradsentinel import NanCallback, Retry
    from gradsentinel.integrations import megatron

    logging.getLogger("gradsentinel").setLevel(logging.ERROR)
    rendezvous = f"file://{folder / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    tensor = LAYOUTS[layout]
    parallel_state.initialize_model_parallel(tensor)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    made = {name: training(checked="own check" in name, tensor=tensor) for name in VARIANTS}
    watched = made["watched"]
    callbacks = [NanCallback(state_warmup=0, state_every=0), Retry()]
    sentinel = megatron.attach(
        watched["model"], watched["optimizer"], callbacks=callbacks, run_dir=folder / "run"
    )
    watched["schedule"] = sentinel.schedule(watched["schedule"])
    steps = {name: stepper(parts) for name, parts in made.items()}
    order = random.Random(0)
    wall: dict[str, list[float]] = {name: [] for name in steps}
    own: dict[str, list[float]] = {name: [] for name in steps}
    shared = torch.Generator().manual_seed(rank if tensor == 1 else 0)
    for number in range(WARM_UP + ROUNDS):
        batches = [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=shared) for _ in range(MICROBATCHES)]
        for name in order.sample(sorted(steps), len(steps)):
            torch.distributed.barrier()
            begin, began = time.perf_counter(), time.thread_time()
            steps[name](batches)
            if number >= WARM_UP:
                wall[name].append(time.perf_counter() - begin)
                own[name].append(time.thread_time() - began)
    sentinel.close()
    if rank == 0:
        count = sum(p.numel() for p in made["plain"]["model"][0].parameters())
        results.put(
            {
                "ranks": RANKS,
                "parameters": count,
                "tokens": MICROBATCHES * BATCH * LENGTH,
                "plain_ms": 1e3 * statistics.median(wall["plain"]),
                "plain_cpu_ms": 1e3 * statistics.median(own["plain"]),
                "ratios": ratios(wall),
                "cpu_ratios": ratios(own),
            }
        )
    torch.distributed.barrier()


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the median, over the rounds, of each variant's step over the plain one's."""
    return {
        name: statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True))
        for name in times
    }


def main() -> None:
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt  # noqa: F401 - once, before the ranks are forked

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    found = {}
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                context.Process(target=race, args=(rank, Path(folder), layout, results))
                for rank in range(RANKS)
            ]
            for rank in ranks:
                rank.start()
            found[layout] = results.get(timeout=300)
            for rank in ranks:
                rank.join(timeout=30)
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import cuda_on_cpu

    cuda_on_cpu.install()
    import torch

    main()
