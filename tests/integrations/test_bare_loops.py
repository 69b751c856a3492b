"""Loops that are written around Accelerate and Fabric: what differs from one loop to the next."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

from types import SimpleNamespace

import pytest
import torch
from drivers.bare import forget_accelerator
from torch import nn
from training import Recorder, Task, Trouble

from gradsentinel import (
    AfterStep,
    ConfigurationError,
    NanCallback,
    Outcome,
    Retry,
    Rollback,
)
from loops import Net, differences, seed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


def accelerator(**settings):
    from accelerate import Accelerator

    forget_accelerator()
    return Accelerator(cpu=True, **settings)


def fabric(**settings):
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1, **settings)


def state_of(net, optimizer, scheduler=None):
    return {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.last_epoch,
    }


def accelerate_loop(
    task, callbacks, folder, *, prepared=True, showing=True, clear="after", clip="norm", **settings
):
    """The loop as people write it, in its variants; with callbacks None, without a sentinel."""
    from gradsentinel.integrations.accelerate import prepare

    tool = accelerator(gradient_accumulation_steps=task.accumulate, **settings)
    net = task.net()
    inner = task.optimizer(net)
    own = task.scheduler(inner)
    model, optimizer, loader = tool.prepare(net, inner, task.loader())
    scheduler = tool.prepare(own) if prepared else own
    sentinel = None
    if callbacks is not None:
        sentinel = prepare(
            tool,
            model,
            optimizer,
            callbacks=callbacks,
            scheduler=scheduler,
            forward=task.loss,
            run_dir=folder,
        )
    for batch in sentinel.steps(loader) if sentinel and showing else loader:
        with tool.accumulate(model):
            if clear == "before":
                optimizer.zero_grad()
            tool.backward(task.loss(model, batch))
            if tool.sync_gradients and clip == "norm":
                tool.clip_grad_norm_(model.parameters(), 0.5)
            elif tool.sync_gradients and clip == "value":
                tool.clip_grad_value_(model.parameters(), 0.01)
            elif tool.sync_gradients and clip == "part":
                tool.clip_grad_norm_(net.head.parameters(), 0.1)
            optimizer.step()
            if clear == "between":
                optimizer.zero_grad()
            scheduler.step()
            if clear == "after":
                optimizer.zero_grad()
    if sentinel:
        sentinel.close()
    return state_of(net, inner, own), sentinel, tool


VARIANTS = [
    {},
    {"showing": False},
    {"prepared": False},
    {"prepared": False, "showing": False, "clear": "between"},
    {"clear": "before", "showing": False},
    {"clip": "value"},
    {"clip": "part"},
    {"clip": "none"},
    {"mixed_precision": "bf16"},
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_however_an_accelerate_loop_is_written_it_is_untouched_and_drops_exactly(tmp_path, variant):
    alone, _, _ = accelerate_loop(Task(), None, None, **variant)
    healthy, _, _ = accelerate_loop(Task(), [NanCallback(), Rollback(every=2)], tmp_path / "h", **variant)
    assert differences(alone, healthy) == []
    spoilt = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    dropped, sentinel, _ = accelerate_loop(spoilt, [Recorder(), NanCallback()], tmp_path / "s", **variant)
    without, _, _ = accelerate_loop(Task(without=(2,)), None, None, **variant)
    assert differences(dropped, without) == []
    assert [one.outcome for one in sentinel.incidents] == [Outcome.SKIPPED]


class FakeScaler:
    """Puts a GradScaler for the CPU into an Accelerator, which has none of its own."""

    def __init__(self, scale):
        self.scale = scale

    def loop(self, task, callbacks, folder):
        from gradsentinel.integrations.accelerate import prepare

        tool = accelerator()
        tool.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=3)
        tool.native_amp = True
        tool.state._mixed_precision = "fp16"
        net = task.net()
        inner = task.optimizer(net)
        own = task.scheduler(inner)
        optimizer = tool.prepare_optimizer(inner)
        scheduler = tool.prepare_scheduler(own)
        sentinel = None
        if callbacks is not None:
            sentinel = prepare(
                tool,
                net,
                optimizer,
                callbacks=callbacks,
                scheduler=scheduler,
                forward=task.loss,
                run_dir=folder,
            )
        for batch in sentinel.steps(task.loader()) if sentinel else task.loader():
            tool.backward(task.loss(net, batch))
            tool.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if sentinel:
            sentinel.close()
        return [state_of(net, inner, own), tool.scaler.state_dict()], sentinel


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**4, 2.0**127], ids=["found", "searching"])
def test_with_a_gradscaler_the_run_is_untouched_a_nan_dropped_or_retried(tmp_path, scale):
    scaler = FakeScaler(scale)
    alone, _ = scaler.loop(Task(), None, None)
    watched, sentinel = scaler.loop(Task(), [NanCallback(), Retry()], tmp_path / "h")
    assert differences(alone, watched) == []
    assert sentinel.incidents == ()
    if scale > 16:
        return
    retried, _ = scaler.loop(Task(trouble=Trouble(loss={2: NAN})), [NanCallback(), Retry()], tmp_path / "r")
    assert differences(alone, retried) == []
    spoilt = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    (dropped, _), _ = scaler.loop(spoilt, [NanCallback()], tmp_path / "s")
    assert dropped["scheduler"] == 5


def test_of_two_optimizers_only_the_bad_one_is_dropped(tmp_path):
    from gradsentinel.integrations.accelerate import prepare

    def run(task, callbacks, folder):
        tool = accelerator()
        seed(0)
        nets = [Net(), Net()]
        inner = [task.optimizer(net) for net in nets]
        own = [task.scheduler(one) for one in inner]
        prepared = tool.prepare(*nets, *inner, *own)
        models, optimizers, schedulers = prepared[:2], prepared[2:4], prepared[4:]
        sentinel = None
        if callbacks is not None:
            sentinel = prepare(
                tool,
                list(models),
                list(optimizers),
                callbacks=callbacks,
                scheduler=list(schedulers),
                run_dir=folder,
            )
        for batch in sentinel.steps(task.loader()) if sentinel else task.loader():
            for index, model in enumerate(models):
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                if index == 1:
                    loss = task.trouble.strike(int(batch["number"][0]), nets[1], loss)
                tool.backward(loss)
                tool.clip_grad_norm_(model.parameters(), 0.5)
                optimizers[index].step()
                schedulers[index].step()
                optimizers[index].zero_grad()
        if sentinel:
            sentinel.close()
        return [state_of(*each) for each in zip(nets, inner, own, strict=True)]

    alone = run(Task(), None, None)
    assert differences(alone, run(Task(), [NanCallback(), Rollback(every=2)], tmp_path / "h")) == []
    record = Recorder()
    spoilt = run(
        Task(trouble=Trouble(loss={2: NAN}, transient=False)), [record, NanCallback()], tmp_path / "s"
    )
    assert differences(alone[0], spoilt[0]) == []
    assert [one["scheduler"] for one in spoilt] == [6, 5]
    assert record.applied.count(False) == 1
    assert len(record.applied) == 12


def test_a_sentinel_is_part_of_accelerates_checkpoint(tmp_path):
    from gradsentinel.integrations.accelerate import prepare

    def run(folder, *, load=None):
        task = Task(trouble=Trouble(loss={2: NAN}, transient=False))
        tool = accelerator()
        net = task.net()
        model, optimizer = tool.prepare(net, task.optimizer(net))
        sentinel = prepare(tool, model, optimizer, run_dir=folder)
        tool.register_for_checkpointing(sentinel)
        if load is not None:
            tool.load_state(str(load))
            return sentinel
        for batch in sentinel.steps(task.loader()):
            tool.backward(task.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        tool.save_state(str(tmp_path / "saved"))
        return sentinel

    first = run(tmp_path / "a")
    second = run(tmp_path / "b", load=tmp_path / "saved")
    assert first.step_count == second.step_count == 6
    assert second.state_dict()["callbacks"]["Skip"] == {"spent": [2]}
    first.close()
    second.close()


def fabric_loop(  # noqa: C901 - likewise
    task, callbacks, folder, *, clear="after", showing=True, held=True, clip="norm", epochs=1, **settings
):
    from gradsentinel.integrations.lightning.fabric import prepare

    tool = fabric(**settings)
    net = task.net()
    inner = task.optimizer(net)
    scheduler = task.scheduler(inner)
    model, optimizer = tool.setup(net, inner)
    sentinel = None
    if callbacks is not None:
        sentinel = prepare(
            tool,
            model,
            optimizer,
            callbacks=callbacks,
            scheduler=scheduler,
            forward=task.loss,
            run_dir=folder,
        )
    for _ in range(epochs):
        for batch in sentinel.steps(task.loader()) if sentinel and showing else task.loader():
            if clear == "before":
                optimizer.zero_grad()
            tool.backward(task.loss(model, batch))
            if clip == "norm":
                tool.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            elif clip == "value":
                tool.clip_gradients(model, optimizer, clip_val=0.01)
            optimizer.step()
            if clear == "between":
                optimizer.zero_grad()
            if held:
                scheduler.step()
            if clear == "after":
                optimizer.zero_grad()
        if not held:
            scheduler.step()
    if sentinel:
        sentinel.close()
    return state_of(net, inner, scheduler), sentinel


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"showing": False},
        {"clear": "before", "showing": False},
        {"clear": "between", "showing": False},
        {"clip": "value"},
        {"clip": "none"},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_however_a_fabric_loop_is_written_it_is_untouched_and_drops_exactly(tmp_path, variant):
    alone, _ = fabric_loop(Task(), None, None, **variant)
    healthy, _ = fabric_loop(Task(), [NanCallback(), Rollback(every=2)], tmp_path / "h", **variant)
    assert differences(alone, healthy) == []
    spoilt = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    dropped, sentinel = fabric_loop(spoilt, [Recorder(), NanCallback()], tmp_path / "s", **variant)
    without, _ = fabric_loop(Task(without=(2,)), None, None, **variant)
    assert differences(dropped, without) == []
    assert [one.outcome for one in sentinel.incidents] == [Outcome.SKIPPED]


def test_a_schedule_of_epochs_is_not_held_back_when_an_epochs_last_step_was_dropped(tmp_path):
    spoilt = Task(trouble=Trouble(loss={5: NAN}))
    after, _ = fabric_loop(spoilt, [NanCallback()], tmp_path, held=False, epochs=2)
    assert after["scheduler"] == 2


def test_under_mixed_precision_fabric_lets_a_step_be_computed_again(tmp_path):
    alone, _ = fabric_loop(Task(random=True), None, None, precision="bf16-mixed")
    spoilt = Task(random=True, trouble=Trouble(loss={2: NAN}))
    retried, sentinel = fabric_loop(spoilt, [NanCallback(), Retry()], tmp_path, precision="bf16-mixed")
    assert [one.outcome for one in sentinel.incidents] == [Outcome.RETRIED]
    assert differences(alone, retried) == []
    from lightning.fabric import wrappers

    assert wrappers._in_fabric_backward is False


def test_what_was_not_prepared_is_refused_and_functions_can_listen(tmp_path):
    from gradsentinel.integrations.accelerate import prepare
    from gradsentinel.integrations.lightning.fabric import prepare as prepare_fabric

    net = Task().net()
    optimizer = Task().optimizer(net)
    with pytest.raises(ConfigurationError, match="was not prepared"):
        prepare(accelerator(), net, optimizer)
    with pytest.raises(ConfigurationError, match="was not set up"):
        prepare_fabric(fabric(), net, optimizer)
    deepspeed = SimpleNamespace(distributed_type=SimpleNamespace(name="DEEPSPEED"))
    with pytest.raises(ConfigurationError, match="distributed_type=DEEPSPEED clips and steps by itself"):
        prepare(deepspeed, net, optimizer)
    tool = accelerator()
    model, optimizer = tool.prepare(net, optimizer)
    with pytest.raises(ConfigurationError, match="must be a list"):
        prepare(tool, model, optimizer, callbacks=NanCallback())
    heard = []
    with prepare(tool, model, optimizer, run_dir=tmp_path) as sentinel:
        sentinel.on(AfterStep, heard.append)
        with pytest.raises(ConfigurationError, match="cannot be iterated over"):
            sentinel.steps(3)
        for batch in sentinel.steps(Task(count=2).loader()):
            tool.backward(Task().loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            assert sentinel.applied
    assert [event.step for event in heard] == [0, 1]
