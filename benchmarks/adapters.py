"""What the watch adds to a step of each framework: short runs with and without it, in turns.

A framework owns its loop, so steps cannot be raced one by one. The time of a step is that from one batch to
the next; of each run the median counts, and of all pairs of runs the median of the differences.
"""

# ruff: noqa: PLC0415 - each framework is imported when it is its turn

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from workload import CLOCK, batches, loss_of, model

from gradsentinel import NanCallback, Rollback, Sentinel

TOKENS, STEPS, PAIRS = 64, 30, 9
MAX_NORM = 1.0
Loop = Callable[[list[float], Path | None], None]
"""Makes a run, with the watch if there is a directory for it, and notes when each batch was drawn."""


def drawn(times: list[float]) -> Iterator[Tensor]:
    """Yield the batches of a run and note the time."""
    data = batches(TOKENS)
    for number in range(STEPS):
        times.append(CLOCK.now())
        yield data[number % len(data)]


class Drawn(torch.utils.data.IterableDataset):
    """The same for frameworks that want a data set."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def __iter__(self) -> Iterator[Tensor]:
        return drawn(self.times)


def watch() -> list[Any]:
    """Return what everybody is watched by."""
    return [NanCallback(), Rollback()]


def ready() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def plain(times: list[float], folder: Path | None) -> None:
    net, optimizer = ready()
    if folder is None:
        for x in drawn(times):
            loss_of(net, x, x).backward()
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return
    with Sentinel(net, optimizer, callbacks=watch(), run_dir=folder) as sentinel:
        for x in sentinel.steps(drawn(times)):
            sentinel.backward(loss_of(net, x, x))
            sentinel.step(max_norm=MAX_NORM)


def lightning(times: list[float], folder: Path | None) -> None:
    import lightning.pytorch as pl

    from gradsentinel.integrations.lightning import RunSettings, adapt

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.own = ready()

        def training_step(self, batch: Tensor) -> Tensor:
            return loss_of(self.net, batch, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.own

    given = [] if folder is None else [*map(adapt, watch()), RunSettings(run_dir=folder)]
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=MAX_NORM,
        callbacks=given,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Drawn(times), batch_size=None))


def fabric(times: list[float], folder: Path | None) -> None:
    from lightning.fabric import Fabric

    from gradsentinel.integrations.lightning.fabric import prepare

    tool = Fabric(accelerator="cpu", devices=1)
    net, optimizer = tool.setup(*ready())
    sentinel = None if folder is None else prepare(tool, net, optimizer, callbacks=watch(), run_dir=folder)
    with sentinel or contextlib.nullcontext():
        for x in drawn(times) if sentinel is None else sentinel.steps(drawn(times)):
            tool.backward(loss_of(net, x, x))
            tool.clip_gradients(net, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def accelerate(times: list[float], folder: Path | None) -> None:
    from accelerate import Accelerator

    from gradsentinel.integrations.accelerate import prepare

    tool = Accelerator(cpu=True)
    net, optimizer = tool.prepare(*ready())
    sentinel = None if folder is None else prepare(tool, net, optimizer, callbacks=watch(), run_dir=folder)
    with sentinel or contextlib.nullcontext():
        for x in drawn(times) if sentinel is None else sentinel.steps(drawn(times)):
            tool.backward(loss_of(net, x, x))
            tool.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


class WithLoss(nn.Module):
    """Returns its loss as transformers' models do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # noqa: D102 - as everywhere
        return {"loss": loss_of(self.net, x, x)}


def huggingface(times: list[float], folder: Path | None) -> None:
    from transformers import Trainer, TrainingArguments

    from gradsentinel.integrations.huggingface import RunSettings, adapt

    class Timed(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            times.append(CLOCK.now())
            return super().training_step(*args, **kwargs)

    net, optimizer = ready()
    given = [] if folder is None else [*map(adapt, watch()), RunSettings(run_dir=folder)]
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            max_steps=STEPS,
            per_device_train_batch_size=TOKENS // 64,
            max_grad_norm=MAX_NORM,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            dataloader_pin_memory=False,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        data = [{"x": row} for batch in batches(TOKENS) for row in batch]
        Timed(
            model=WithLoss(net),
            args=arguments,
            train_dataset=data,
            callbacks=given,
            optimizers=(optimizer, scheduler),
        ).train()


LOOPS: dict[str, Loop] = {
    "plain loop": plain,
    "Lightning": lightning,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Hugging Face Trainer": huggingface,
}


def step_time(loop: Loop, folder: Path | None) -> float:
    """Return the seconds of a step of one run, the first ones left out."""
    times: list[float] = []
    loop(times, folder)
    gaps = [after - before for before, after in itertools.pairwise(times[5:])]
    return statistics.median(gaps)


def measure() -> dict[str, dict[str, float]]:
    """Return seconds of a step without the watch, and what it adds, by framework."""
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, float]] = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="gradsentinel-bench-") as place:
        warnings.simplefilter("ignore")
        for name, loop in LOOPS.items():
            alone, added = [], []
            for number in range(PAIRS):
                pair = [None, Path(place) / f"{name}-{number}"]
                measured = {one is None: step_time(loop, one) for one in (pair if number % 2 else pair[::-1])}
                alone.append(measured[True])
                added.append(measured[False] - measured[True])
            found[name] = {
                "step": statistics.median(alone),
                "added": statistics.median(added),
                "least": min(added),
                "most": max(added),
            }
    logging.disable(logging.NOTSET)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    CLOCK.now = time.thread_time  # what others take away does not count
    print(json.dumps(measure(), indent=2))
