"""The order of events on each framework's page is the order in which they come."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from drivers import hf, pl
from drivers.bare import forget_accelerator
from training import Recorder, Task, Trouble, quiet

from gradsentinel import Callback, NanCallback, events

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
DOCS = Path(__file__).resolve().parents[2] / "docs"
NAN = float("nan")
OURS = set(events.METHODS.values())
ON_AN_INCIDENT = {f"ours: {name}" for name in ("on_incident", "on_diagnosis", "on_recovery")}


class Teller(Callback):
    """Writes down what it hears."""

    def __init__(self, told):
        self.told = told


def _telling(name):
    def method(self, event):
        self.told.append(f"ours: {name}")

    return method


for _name in OURS:
    setattr(Teller, _name, _telling(_name))


def on_page(page: str, known: set[str], *, first: str) -> list[str]:
    """The rows of the table that begins with this name: the framework's names, then ours."""
    told = []
    rows = (DOCS / page).read_text(encoding="utf-8").splitlines()
    begin = next(number for number, row in enumerate(rows) if row.startswith(f"| `{first}`"))
    for row in rows[begin:]:
        if not row.startswith("| "):
            break
        theirs, ours = row.strip("|").split(" | ", 1)
        told += [name for name in re.findall(r"`([^`]+)`", theirs) if name in known]
        told += [f"ours: {name}" for name in re.findall(r"`([^`]+)`", ours) if name in OURS]
    return told


def check(told: list[str], expected: list[str], *, dropped: bool, not_if_dropped: str | None = None) -> None:
    missing = {not_if_dropped} if dropped else ON_AN_INCIDENT
    if dropped:  # in between the diagnosis runs the step again
        begin, end = told.index("ours: on_incident"), told.index("ours: on_diagnosis")
        told = told[: begin + 1] + told[end:]
    assert told == [name for name in expected if name not in missing]


def task(*, dropped: bool) -> Task:
    return Task(count=1, trouble=Trouble(loss={0: NAN} if dropped else {}, transient=False))


def tell(told, name, owner, method):
    """Note each call of a method, whoever has wrapped it before."""
    plain = getattr(owner, method)

    @functools.wraps(plain)
    def called(*args, **kwargs):
        told.append(name)
        return plain(*args, **kwargs)

    object.__setattr__(owner, method, called)


@pytest.mark.parametrize("dropped", [False, True], ids=["healthy", "dropped"])
def test_of_a_lightning_trainer(tmp_path, dropped):
    import lightning.pytorch

    told = []
    hooks = {
        *("on_fit_start", "on_train_start", "on_train_batch_start", "on_before_backward", "on_train_end"),
        *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    }
    of_module = {"training_step", "configure_gradient_clipping", "lr_scheduler_step"}
    first = lightning.pytorch.Callback()
    for name in hooks:
        setattr(first, name, lambda *_, name=name, **__: told.append(name))
    one = task(dropped=dropped)
    module = pl.lightning_module(lightning.pytorch, one, one.net(), manual=False)
    for name in of_module:
        tell(told, name, module, name)
    tell(told, "on_before_optimizer_step", module, "on_before_optimizer_step")
    make = module.configure_optimizers

    def configure_optimizers():
        optimizers, schedulers = make()
        optimizers[0].register_step_post_hook(lambda *_: told.append("optimizer.step"))
        return optimizers, schedulers

    module.configure_optimizers = configure_optimizers
    given = [first, *pl.native(tmp_path, Teller(told), NanCallback())]
    pl.fit(one, given, module=module)
    expected = on_page("lightning.md", hooks | of_module | {"optimizer.step"}, first="on_fit_start")
    check(told, expected, dropped=dropped, not_if_dropped="lr_scheduler_step")


@pytest.mark.parametrize("dropped", [False, True], ids=["healthy", "dropped"])
def test_of_the_hugging_face_trainer(tmp_path, dropped):
    from transformers import TrainerCallback

    told = []
    hooks = {*("on_train_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_train_end")}
    first, last = TrainerCallback(), TrainerCallback()
    for name in hooks:
        setattr(first, name, lambda *_, name=name, **__: told.append(name))
    trainer = hf.hf_trainer(
        task(dropped=dropped),
        tmp_path,
        [first, *hf.native(tmp_path / "run", Teller(told), NanCallback()), last],
    )
    tell(told, "compute_loss", trainer, "compute_loss")
    methods = {
        "training_step": lambda: (trainer, "training_step"),
        "accelerator.backward": lambda: (trainer.accelerator, "backward"),
        "accelerator.clip_grad_norm_": lambda: (trainer.accelerator, "clip_grad_norm_"),
        "optimizer.step": lambda: (trainer.optimizer, "step"),
        "lr_scheduler.step": lambda: (trainer.lr_scheduler, "step"),
    }

    def on_train_begin(*_, **__):
        for name, owner in methods.items():
            tell(told, name, *owner())

    last.on_train_begin = on_train_begin
    with quiet():
        trainer.train()
    expected = on_page("huggingface.md", hooks | methods.keys() | {"compute_loss"}, first="on_train_begin")
    check(told, expected, dropped=dropped, not_if_dropped="lr_scheduler.step")


@pytest.mark.parametrize("dropped", [False, True], ids=["healthy", "dropped"])
@pytest.mark.parametrize("kind", ["accelerate", "fabric"])
def test_of_a_loop_around_accelerate_or_fabric(tmp_path, kind, dropped):
    told = []
    one = task(dropped=dropped)
    net = one.net()
    inner = one.optimizer(net)
    own = one.scheduler(inner)
    if kind == "accelerate":
        from accelerate import Accelerator

        from gradsentinel.integrations.accelerate import prepare

        forget_accelerator()
        tool = Accelerator(cpu=True)
        model, optimizer, scheduler = tool.prepare(net, inner, own)
        clip = SimpleNamespace(name="accelerator.clip_grad_norm_")
        clip.call = lambda: tool.clip_grad_norm_(model.parameters(), 0.5)
    else:
        from lightning.fabric import Fabric

        from gradsentinel.integrations.lightning.fabric import prepare

        tool, scheduler = Fabric(accelerator="cpu", devices=1), own
        model, optimizer = tool.setup(net, inner)
        clip = SimpleNamespace(name="fabric.clip_gradients")
        clip.call = lambda: tool.clip_gradients(model, optimizer, max_norm=0.5)
    backward = "accelerator.backward" if kind == "accelerate" else "fabric.backward"
    told.append("prepare")
    sentinel = prepare(
        tool,
        model,
        optimizer,
        callbacks=[Teller(told), NanCallback()],
        scheduler=scheduler,
        run_dir=tmp_path,
    )
    told.append("sentinel.steps")
    for batch in sentinel.steps(one.loader()):
        told.append(backward)
        tool.backward(one.loss(model, batch))
        told.append(clip.name)
        clip.call()
        told.append("optimizer.step")
        optimizer.step()
        told.append("scheduler.step")
        scheduler.step()
        told.append("optimizer.zero_grad")
        optimizer.zero_grad()
    told.append("sentinel.close")
    sentinel.close()
    known = {name for name in told if not name.startswith("ours: ")}
    page = "accelerate.md" if kind == "accelerate" else "lightning.md"
    check(told, on_page(page, known, first="prepare"), dropped=dropped)
    assert own.last_epoch == (0 if dropped else 1)


def test_the_events_of_a_recorder_are_those_of_the_pages():
    """What the contract counts is what the pages name."""
    heard = {name for name in vars(Recorder) if name.startswith("on_")}
    assert heard == OURS - {name.removeprefix("ours: ") for name in ON_AN_INCIDENT}
