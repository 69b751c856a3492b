"""What the watch adds to a step of each framework: short runs with and without it, in turns.

A framework owns its loop, so steps cannot be raced one by one. The time of a step is that from one batch to
the next. What the watch adds is looked for in what is left of it without forward and backward pass: of each
run the median of the steps, of all pairs of runs the median of the differences.
"""

# ruff: noqa: PLC0415 - each framework is imported when it is its turn

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import operator
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from workload import CLOCK, batches, forward, model

from gradsentinel import NanCallback, Rollback, Sentinel

TOKENS, STEPS, WARM_UP, PAIRS = 64, 30, 5, 7
MAX_NORM = 1.0
Times = list[tuple[float, float]]
"""By step: when its batch was drawn, and how long forward and backward passes have taken by then."""
Loop = Callable[[Times, Path | None], None]
"""Makes a run, with the watch if there is a directory for it, and notes when each batch was drawn."""


def drawn(times: Times) -> Iterator[Tensor]:
    """Yield the batches of a run and note the time."""
    data = batches(TOKENS)
    for number in range(STEPS):
        times.append((CLOCK.now(), CLOCK.inside))
        yield data[number % len(data)]


class Drawn(torch.utils.data.IterableDataset):
    """The same for frameworks that want a data set."""

    def __init__(self, times: Times) -> None:
        self.times = times

    def __iter__(self) -> Iterator[Tensor]:
        return drawn(self.times)


def watch() -> list[Any]:
    """Return what everybody is watched by."""
    return [NanCallback(), Rollback()]


def ready() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def plain(times: Times, folder: Path | None) -> None:
    net, optimizer = ready()
    if folder is None:
        for x in drawn(times):
            forward(net, x, x).backward()
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return
    with Sentinel(net, optimizer, callbacks=watch(), run_dir=folder) as sentinel:
        for x in sentinel.steps(drawn(times)):
            sentinel.backward(forward(net, x, x))
            sentinel.step(max_norm=MAX_NORM)


def lightning(times: Times, folder: Path | None) -> None:
    import lightning.pytorch as pl

    from gradsentinel.integrations.lightning import RunSettings, adapt

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.own = ready()

        def training_step(self, batch: Tensor) -> Tensor:
            return forward(self.net, batch, batch)

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


def fabric(times: Times, folder: Path | None) -> None:
    from lightning.fabric import Fabric

    from gradsentinel.integrations.lightning.fabric import prepare

    tool = Fabric(accelerator="cpu", devices=1)
    net, optimizer = tool.setup(*ready())
    sentinel = None if folder is None else prepare(tool, net, optimizer, callbacks=watch(), run_dir=folder)
    with sentinel or contextlib.nullcontext():
        for x in drawn(times) if sentinel is None else sentinel.steps(drawn(times)):
            tool.backward(forward(net, x, x))
            tool.clip_gradients(net, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def accelerate(times: Times, folder: Path | None) -> None:
    from accelerate import Accelerator

    from gradsentinel.integrations.accelerate import prepare

    tool = Accelerator(cpu=True)
    net, optimizer = tool.prepare(*ready())
    sentinel = None if folder is None else prepare(tool, net, optimizer, callbacks=watch(), run_dir=folder)
    with sentinel or contextlib.nullcontext():
        for x in drawn(times) if sentinel is None else sentinel.steps(drawn(times)):
            tool.backward(forward(net, x, x))
            tool.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


class WithLoss(nn.Module):
    """Returns its loss as transformers' models do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # noqa: D102 - as everywhere
        return {"loss": forward(self.net, x, x)}


def huggingface(times: Times, folder: Path | None) -> None:
    from transformers import Trainer, TrainingArguments

    from gradsentinel.integrations.huggingface import RunSettings, adapt

    class Timed(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            times.append((CLOCK.now(), CLOCK.inside))
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


def step_time(loop: Loop, folder: Path | None) -> tuple[float, float]:
    """Return the seconds of a step of one run, and those outside of forward and backward pass."""
    times: Times = []
    loop(times, folder)
    steps = list(itertools.pairwise(times[WARM_UP:]))
    whole = [after[0] - before[0] for before, after in steps]
    inside = [after[1] - before[1] for before, after in steps]
    return statistics.median(whole), statistics.median(map(operator.sub, whole, inside))


def measure() -> dict[str, dict[str, float]]:
    """Return by framework the seconds of a step without the watch, of its rest, and what the watch adds."""
    logging.disable(logging.WARNING)
    CLOCK.watches_backward()
    found: dict[str, dict[str, float]] = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="gradsentinel-bench-") as place:
        warnings.simplefilter("ignore")
        for name, loop in LOOPS.items():
            steps, rests, added = [], [], []
            for number in range(PAIRS):
                pair = [None, Path(place) / f"{name}-{number}"]
                measured = {one is None: step_time(loop, one) for one in (pair if number % 2 else pair[::-1])}
                steps.append(measured[True][0])
                rests.append(measured[True][1])
                added.append(measured[False][1] - measured[True][1])
            found[name] = {
                "step": statistics.median(steps),
                "rest": statistics.median(rests),
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
