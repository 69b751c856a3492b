"""What a snapshot costs the training, in memory and on disk, beside a blocking torch.save.

Interleaved: steps, and blocks of steps, with and without a snapshot alternate in one run, so that what else
the machine does hits both alike, and both use the same memory: two models of the same size differ by more
than a snapshot costs, by where in memory they happen to lie.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import workload
from torch import Tensor

from gradsentinel import NanCallback, Rollback, Sentinel

TOKENS = 64
PERIOD = 50
"""One snapshot per so many steps is what the cost is spread over."""
IN_MEMORY = f"in memory, one per {PERIOD} steps"
ON_DISK = f"and on disk, one per {PERIOD} steps"
BY_CLOCK = f"and on disk by the clock, one per {PERIOD} steps"
BY_HAND = f"torch.save, one per {PERIOD} steps"
BLOCK = 25
BEFORE = 20
"""The first block begins so many steps after a snapshot. The next one is taken 5 steps after the second block
has begun, good 5 steps later, and has 15 to be written in."""
WARM_UP = 6


class Loop:
    """A watched training whose steps are timed."""

    def __init__(self, rollback: Rollback, run_dir: Path | None = None) -> None:
        self.net = workload.model()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-4)
        self.sentinel = Sentinel(
            self.net,
            self.optimizer,
            callbacks=[NanCallback(state_every=0, state_warmup=0), rollback],
            run_dir=run_dir,
        )
        self.run = self.sentinel._watch.run

    def steps(self, x: Tensor, count: int) -> Iterator[float]:
        """Yield the seconds of each step."""
        for _ in range(count):
            start = time.perf_counter()
            for _ in self.sentinel.steps([x]):
                self.sentinel.backward(workload.loss_of(self.net, x, x))
                self.sentinel.step(max_norm=1.0)
            yield time.perf_counter() - start

    def save(self, path: Path) -> float:
        """Return the seconds of the checkpoint that one would write by hand, blocking."""
        start = time.perf_counter()
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        return time.perf_counter() - start


def in_memory(x: Tensor, folder: Path, rounds: int) -> dict[str, float]:
    """Return the milliseconds of a step, of a snapshot on top of it, and of a torch.save."""
    loop = Loop(Rollback(every=2, confirm_after=2))
    list(loop.steps(x, 2 * WARM_UP))
    extra, plain, saves = [], [], []
    for number in range(rounds):
        without, with_snapshot = loop.steps(x, 2)
        plain.append(without)
        extra.append(with_snapshot - without)
        if number % 5 == 0:
            saves.append(loop.save(folder / "by-hand.pt"))
    return {
        "step": 1e3 * statistics.median(plain),
        "snapshot": 1e3 * statistics.median(extra),
        "torch.save": 1e3 * statistics.median(saves),
        "state MB": loop.run.known_good.nbytes() / 1e6 if loop.run.known_good else 0.0,
        "held MB": loop.run.staging.cost.nbytes / 1e6,
    }


def spent() -> tuple[float, float]:
    """Return the seconds that this thread used a processor, and that it stood in line for one.

    The second is 0 where the system does not tell (Linux does). What is neither it waited for a lock or the
    disk.
    """
    try:
        _, queued, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    except OSError:
        return time.thread_time(), 0.0
    return time.thread_time(), int(queued) / 1e9  # what the file says of the first is some milliseconds old


def on_disk(x: Tensor, folder: Path, blocks: int) -> dict[str, float]:
    """Return the time of a block of steps with one snapshot that is taken and written, over one without.

    By the clock, which on a machine with other work counts that as well; and without the time in which the
    training's thread stood in line for a processor, which leaves what the snapshot itself takes from it: its
    own work, and waiting for locks and the disk. On a machine with a core to spare the two are the same.
    """
    loop = Loop(Rollback(every=2 * BLOCK, confirm_after=5, on_disk=1), folder / "run")
    list(loop.steps(x, 12 * BLOCK + BEFORE))  # until no snapshot needs new memory
    ratios, stalls, waits, beside, plain = [], [], [], [], []
    for _ in range(blocks):
        times, own, waited, all_threads = [], [], [], []
        for _ in ("without", "with"):
            loop.run.states.finish()  # what the block before has left over is not this block's
            (used, queued), everyone = spent(), time.process_time()
            times.append(sum(loop.steps(x, BLOCK)))
            now = spent()
            own.append(now[0] - used)
            waited.append(max(0.0, times[-1] - own[-1] - (now[1] - queued)))
            all_threads.append(time.process_time() - everyone)
        ratios.append(times[1] / times[0])
        stalls.append(own[1] + waited[1] - own[0] - waited[0])
        waits.append(waited[1] - waited[0])
        beside.append(all_threads[1] - own[1])
        plain.append(own[0])
    cost = loop.run.staging.cost
    loop.sentinel.close()
    return {
        "block over plain block": statistics.median(ratios),
        "stall of a snapshot on disk": 1e3 * statistics.median(stalls),
        "stall of a snapshot on disk, mean": 1e3 * statistics.mean(stalls),
        "of that, waiting for locks and the disk, mean": 1e3 * statistics.mean(waits),
        "processor time of the thread beside the training": 1e3 * statistics.median(beside),
        "write beside the training": 1e3 * cost.write_seconds / max(cost.written, 1),
        "waited for the disk": 1e3 * cost.wait_seconds / max(cost.written, 1),
        "processor time of a plain step": 1e3 * statistics.median(plain) / BLOCK,
    }


def measure(tokens: int = TOKENS, rounds: int = 40, blocks: int = 20) -> dict[str, Any]:
    """Return what snapshots cost: milliseconds, and fractions of the training at one per 50 steps."""
    x = torch.randint(0, 256, (max(1, tokens // 64), 64))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = in_memory(x, folder, rounds)
        disk = on_disk(x, folder, blocks)
    return {
        "tokens": tokens,
        "milliseconds": {**memory, **disk},
        "amortised": {
            IN_MEMORY: memory["snapshot"] / (PERIOD * memory["step"]),
            ON_DISK: disk["stall of a snapshot on disk"] / (PERIOD * disk["processor time of a plain step"]),
            BY_CLOCK: (disk["block over plain block"] - 1) * BLOCK / PERIOD,
            BY_HAND: memory["torch.save"] / (PERIOD * memory["step"]),
        },
        "snapshot over torch.save": memory["snapshot"] / memory["torch.save"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("gradsentinel").setLevel(logging.ERROR)
    print(json.dumps(measure(), indent=2))
