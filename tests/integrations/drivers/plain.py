"""Loops in plain torch: around a Sentinel, and watched through the optimizer's hooks."""

from typing import ClassVar

from torch import nn
from training import Driver, Result

from gradsentinel import Sentinel


class Plain(Driver):
    name = "plain"
    lacks: ClassVar = {"checkpoint": "torch has none of its own; the known-good state is on disk"}

    def train(self, task, folder, callbacks):
        net = task.net()
        optimizer = task.optimizer(net)
        scheduler = task.scheduler(optimizer)
        result = Result(net, optimizer, scheduler)
        task.begins()
        for _ in range(task.runs):
            if callbacks is None:
                by_hand(task, net, optimizer, scheduler)
                continue
            with Sentinel(
                net, optimizer, callbacks=callbacks, scheduler=scheduler, run_dir=folder, forward=task.loss
            ) as sentinel:
                for batch in sentinel.steps(task.loader(), accumulate=task.accumulate):
                    sentinel.backward(task.loss(net, batch))
                    sentinel.step(max_norm=task.max_norm)
                result.incidents += sentinel.incidents
        return result


class Attached(Driver):
    """The loop itself knows of nothing."""

    name = "attached"
    lacks: ClassVar = {
        "batches": "the loop shows none",
        "draws": "the loop does it",
        "loss": "the loop shows none",
        "retry": "there is nothing to compute a step from",
        "accumulate": "a hook does not tell which backward pass is the last",
        "schedule": "the loop steps it, whatever became of the step",
        "checkpoint": "torch has none of its own",
    }

    def window(self, accumulate):
        return ["after_backward"] * accumulate

    def train(self, task, folder, callbacks):
        net = task.net()
        optimizer = task.optimizer(net)
        scheduler = task.scheduler(optimizer)
        result = Result(net, optimizer, scheduler, holds_schedule=False)
        task.begins()
        for _ in range(task.runs):
            if callbacks is None:
                by_hand(task, net, optimizer, scheduler)
                continue
            with Sentinel(net, optimizer, callbacks=callbacks, run_dir=folder) as sentinel:
                with sentinel.attached():
                    by_hand(task, net, optimizer, scheduler)
                result.incidents += sentinel.incidents
        return result


def by_hand(task, net, optimizer, scheduler):
    """The loop as anybody writes it."""
    loader = task.loader()
    for number, batch in enumerate(loader, 1):
        task.divided(net, batch).backward()
        if task.ends_step(number, loader):
            if task.max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), task.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
