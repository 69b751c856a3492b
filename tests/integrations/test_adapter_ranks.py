"""Two ranks of each framework: untouched while healthy, of one mind about a fault, and cured together."""

# ruff: noqa: PLC0415 - what a rank needs of a framework is imported there

import contextlib
import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from drivers.bare import forget_accelerator
from drivers.hf import hf_trainer
from drivers.pl import Lightning, Manual, lightning_module
from ranks import run_ranks
from torch.utils.data import DataLoader
from training import BATCH, Recorder, Task, Trouble

from gradsentinel import NanCallback, Retry, Rollback
from loops import differences, seed

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
NAN = float("nan")


def callbacks():
    return [NanCallback(), Retry(), Rollback(every=2, confirm_after=1)]


def lightning_ddp(task, folder, record):
    return with_lightning(Lightning(), task, folder, record, strategy="ddp")


def lightning_manual_ddp(task, folder, record):
    return with_lightning(Manual(), task, folder, record, strategy="ddp")


def lightning_fsdp2(task, folder, record):
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return with_lightning(Lightning(), task, folder, record, strategy=strategy)


def lightning_manual_fsdp2(task, folder, record):
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return with_lightning(Manual(), task, folder, record, strategy=strategy)


def with_lightning(driver, task, folder, record, **settings):
    given = [] if record is None else driver.settings(folder, [record, *callbacks()])
    pl, trainer = driver.trainer(task, given, devices=2, use_distributed_sampler=False, **settings)
    net = task.net()
    module = lightning_module(pl, task, net, manual=driver.manual)
    if not isinstance(settings["strategy"], str):
        module.configure_model = lambda: shard(net, module.device_mesh["data_parallel"])
    trainer.fit(module, task.loader())
    return net, trainer.lr_scheduler_configs[0].scheduler, [] if record is None else record.run.incidents


def shard(net, mesh):
    from torch.distributed.fsdp import fully_shard

    for module in (net.enter, net.head, net):
        if not hasattr(module, "set_requires_gradient_sync"):
            fully_shard(module, mesh=mesh)


def fabric_ddp(task, folder, record):
    from lightning.fabric import Fabric

    from gradsentinel.integrations.lightning.fabric import prepare

    tool = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    tool.launch()
    net = task.net()
    inner = task.optimizer(net)
    scheduler = task.scheduler(inner)
    model, optimizer = tool.setup(net, inner)
    loader = task.loader()
    sentinel = None
    if record is not None:
        sentinel = prepare(
            tool,
            model,
            optimizer,
            callbacks=callbacks(),
            scheduler=scheduler,
            forward=task.divided,
            run_dir=folder,
        )
    with sentinel or contextlib.nullcontext():
        for number, batch in enumerate(sentinel.steps(loader) if sentinel else loader, 1):
            due = task.ends_step(number, loader)
            with tool.no_backward_sync(model, enabled=not due):
                tool.backward(task.divided(model, batch))
            if due:
                tool.clip_gradients(model, optimizer, max_norm=task.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return net, scheduler, sentinel.incidents if sentinel else []


def accelerate_ddp(task, folder, record):
    return with_accelerate(task, folder, record)


def accelerate_fsdp2(task, folder, record):
    """A model that the user has sharded, since Accelerate shards none on CPUs."""
    return with_accelerate(task, folder, record, sharded=True)


def with_accelerate(task, folder, record, *, sharded=False):
    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh

    from gradsentinel.integrations.accelerate import prepare

    forget_accelerator()
    tool = Accelerator(cpu=True, gradient_accumulation_steps=task.accumulate)
    net = task.net()
    if sharded:
        shard(net, init_device_mesh("cpu", (2,)))
    inner = task.optimizer(net)
    own = task.scheduler(inner)
    model = net if sharded else tool.prepare(net)
    optimizer, scheduler = tool.prepare(inner, own)
    loader = task.loader()
    sentinel = None
    if record is not None:
        sentinel = prepare(
            tool,
            model,
            optimizer,
            callbacks=callbacks(),
            scheduler=scheduler,
            forward=task.loss,
            run_dir=folder,
        )
    with sentinel or contextlib.nullcontext():
        for number, batch in enumerate(sentinel.steps(loader) if sentinel else loader, 1):
            tool.gradient_state._set_sync_gradients(task.ends_step(number, loader))
            due = tool.sync_gradients
            with contextlib.nullcontext() if due or sharded else tool.no_sync(model):
                tool.backward(task.loss(model, batch))
            if due:
                tool.clip_grad_norm_(model.parameters(), task.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return net, own, sentinel.incidents if sentinel else []


def huggingface_ddp(task, folder, record):
    """Shuffled, two epochs: the order of each is drawn anew, and every batch is spoilt once."""
    task.trouble.loss = dict.fromkeys(range(task.count), NAN) if task.trouble.loss else {}
    given = native(folder, record)
    output = folder / str(record is None)
    trainer = hf_trainer(task, output, given, shuffled=True, ddp_backend="gloo", num_train_epochs=2)
    trainer.train()
    return trainer.model.net, trainer.lr_scheduler, [] if record is None else record.run.incidents


def huggingface_fsdp2(task, folder, record):
    """A model that transformers itself has sharded while loading it."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.distributed.configuration_utils import DistributedConfig

    forget_accelerator()
    home = os.environ["GRADSENTINEL_TEST_MODEL"]
    model = LlamaForCausalLM.from_pretrained(home, distributed_config=DistributedConfig(fsdp_size=2))
    numbers = iter(range(100))

    class Spoilt(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * task.trouble.loss.get(next(numbers), 1.0)

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(32, (8,), generator=generator) for _ in range(32)]
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=task.accumulate,
        max_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        learning_rate=1e-2,
        ddp_backend="gloo",
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Spoilt(model=model, args=arguments, train_dataset=data, callbacks=native(folder, record))
    trainer.train()
    return model, trainer.lr_scheduler, [] if record is None else record.run.incidents


def native(folder, record):
    from gradsentinel.integrations.huggingface import RunSettings, adapt

    if record is None:
        return []
    return [*(adapt(one) for one in (record, *callbacks())), RunSettings(run_dir=folder)]


WAYS = {
    way.__name__: way
    for way in (
        lightning_ddp,
        lightning_fsdp2,
        lightning_manual_ddp,
        lightning_manual_fsdp2,
        fabric_ddp,
        accelerate_ddp,
        accelerate_fsdp2,
        huggingface_ddp,
        huggingface_fsdp2,
    )
}
FRAMEWORKS = {"lightning": "lightning.pytorch", "accelerate": "accelerate", "huggingface": "transformers"}


def train_three_times(rank: int, folder: Path, way: str) -> dict[str, Any]:
    """Alone, watched, and watched with a fault on rank 1."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        NODE_RANK="0",
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="x",
        ACCELERATE_USE_CPU="true",
    )
    warnings.simplefilter("ignore")
    found = {}
    sharded = way.endswith("fsdp2")
    for name, faults, watched in (("alone", {}, False), ("healthy", {}, True), ("spoilt", {2: NAN}, True)):
        task = RankTask(
            count=8,
            accumulate=1 if sharded else 2,
            random="ddp" in way and "huggingface" not in way,
            trouble=Trouble(loss=faults if rank == 1 else {}),
        )
        task.rank = rank
        seed(rank)
        record = Recorder(keeps_states=False) if watched else None
        net, scheduler, incidents = WAYS[way](task, folder / name, record)
        assert all(hasattr(p, "full_tensor") == sharded for p in net.parameters())
        weights = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in net.named_parameters()
        }
        told = [(one.step, str(one.outcome), [r.rank for r in one.ranks]) for one in incidents]
        found[name] = (weights, scheduler.last_epoch, torch.rand(2), told)
    return found


class RankTask(Task):
    """Each rank has data of its own."""

    rank = 0

    def data(self):
        data = super().data()
        generator = torch.Generator().manual_seed(self.rank)
        for record in data.records:
            record["x"] = record["x"] + torch.randn(6, generator=generator)
        return data

    def loader(self):
        return DataLoader(self.data(), batch_size=BATCH)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_decide_alike_and_retry_together(tmp_path, way, monkeypatch):
    framework = FRAMEWORKS[way.partition("_")[0]] if way != "fabric_ddp" else "lightning.pytorch"
    importlib.import_module(framework)  # before the ranks are forked
    importlib.import_module("gradsentinel.integrations.lightning")
    importlib.import_module("gradsentinel.integrations.huggingface")
    if way == "huggingface_fsdp2":
        monkeypatch.setenv("GRADSENTINEL_TEST_MODEL", str(small_llama(tmp_path / "model")))
    for rank in (found := run_ranks(train_three_times, 2, tmp_path, tmp_path, way)):
        alone, healthy, spoilt = rank["alone"], rank["healthy"], rank["spoilt"]
        assert differences(alone[:3], healthy[:3]) == []
        assert differences(alone[:3], spoilt[:3]) == []
        assert healthy[3] == []
        assert all(torch.isfinite(value).all() for value in spoilt[0].values())
    told = found[0]["spoilt"][3]
    assert found[1]["spoilt"][3] == told != []
    assert {(outcome, *ranks) for _, outcome, ranks in told} == {("retried", 1)}


def small_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
