"""What agreement costs on two ranks that talk through gloo, and what a comparison of replicas costs.

Every step is done by all variants in the same random order on both ranks, so that the noise of a shared
machine hits them alike; the numbers are rank 0's.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from race import Variant
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workload import loss_of, model

from gradsentinel import Callback, CrossRankCallback, NanCallback, Sentinel
from gradsentinel.ranks.comparison import compare_replicas
from gradsentinel.ranks.replicas import checksums

RANKS = 2
ROUNDS = 40
WARM_UP = 5
TOKENS = 512


def plain() -> Callable[[Tensor, Tensor], None]:
    net = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(net, x, y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def watched(callbacks: list[Callback], run_dir: Path) -> tuple[Sentinel, Callable[[Tensor, Tensor], None]]:
    net = DistributedDataParallel(model())
    sentinel = Sentinel(net, torch.optim.AdamW(net.parameters(), 1e-4), callbacks=callbacks, run_dir=run_dir)

    def step(x: Tensor, y: Tensor) -> None:
        for _ in sentinel.steps([x]):
            sentinel.backward(loss_of(net, x, y))
            sentinel.step(max_norm=1.0)

    return sentinel, step


def measure() -> dict[str, Any]:
    """Return ratios of whole steps, and milliseconds of the parts."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, Path(folder))) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return json.loads((Path(folder) / "results.json").read_text())


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    logging.getLogger("gradsentinel").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    never = {"state_every": 0, "state_warmup": 0}
    sentinel, nan = watched([NanCallback(**never)], folder / "nan")
    comparing, both = watched([NanCallback(**never), CrossRankCallback(every=1)], folder / "both")
    variants = [
        Variant("plain DDP", plain()),
        Variant("plain again (A/A)", plain()),
        Variant("NanCallback", nan),
        Variant("NanCallback, CrossRankCallback(every=1)", both),
    ]
    x = torch.randint(0, 256, (TOKENS // 64, 64), generator=torch.Generator().manual_seed(rank))
    order = random.Random(0)
    for number in range(WARM_UP + ROUNDS):
        for variant in order.sample(variants, len(variants)):
            dist.barrier()
            start = time.perf_counter()
            variant.step(x, x)
            if number >= WARM_UP:
                variant.whole.append(time.perf_counter() - start)
    base = variants[0].whole
    found = {
        "ranks": RANKS,
        "parameters": sum(p.numel() for p in model().parameters()),
        "plain_ms": 1e3 * statistics.median(base),
        "ratios": {
            variant.name: statistics.median(
                mine / theirs for mine, theirs in zip(variant.whole, base, strict=True)
            )
            for variant in variants
        },
        "parts_ms": _parts(sentinel, comparing),
    }
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found))
    dist.barrier()
    sentinel.close()
    comparing.close()
    dist.destroy_process_group()


def _parts(sentinel: Sentinel, comparing: Sentinel) -> dict[str, float]:
    """Return the milliseconds of the agreement alone and of one comparison alone."""
    consensus, watch = sentinel._watch.run.consensus, comparing._watch
    levels = torch.zeros(sentinel._watch.bus.slots + 1, dtype=torch.int32)
    parameters = [parameter for _, parameter in comparing.host.named_parameters()]
    parts: dict[str, Callable[[], object]] = {
        "agree: one all_reduce": lambda: consensus.agree(levels),
        "checksums of all parameters": lambda: checksums(parameters),
        "comparison of all parameters": lambda: compare_replicas(
            watch.run, watch.bus, watch.run.step, watch.bus.comparers()
        ),
        "for scale: all_reduce of all gradients": lambda: [_reduce(p) for p in parameters],
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(30):
        for name, part in parts.items():
            dist.barrier()
            start = time.perf_counter()
            part()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def _reduce(parameter: nn.Parameter) -> None:
    dist.all_reduce(torch.zeros_like(parameter))
