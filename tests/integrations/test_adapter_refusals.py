"""What an adapter cannot watch is refused at the start, with the reason or with both versions."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import importlib
from types import SimpleNamespace

import pytest
import torch
from drivers import hf, pl
from torch import nn
from training import Task, quiet

from gradsentinel import ConfigurationError, NanCallback
from gradsentinel._version import __version__
from gradsentinel.integrations.versions import FrameworkError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_an_optimizer_that_runs_the_model_itself(tmp_path):
    class Closure(torch.optim.SGD):
        def step(self, closure):
            return super().step(closure)

    task = Task()
    task.optimizer = lambda net: Closure(net.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="needs a closure"):
        pl.fit(task, pl.native(tmp_path, NanCallback()))


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "XLAStrategy"])
def test_lightning_strategies_that_clip_and_step_by_themselves(tmp_path, name):
    """The real classes, without the libraries that they would set up."""
    from gradsentinel.integrations.lightning.session import _check_strategy

    strategies = importlib.import_module("lightning.pytorch.strategies")
    kind = getattr(strategies, name)
    strategy = kind.__new__(kind)
    with pytest.raises(ConfigurationError, match=f"{name} clips and steps by itself, where no hook sees"):
        _check_strategy(strategy)


def test_lightning_strategies_that_are_supported():
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    from gradsentinel.integrations.lightning.session import _check_strategy

    for strategy in (DDPStrategy(), ModelParallelStrategy(), SingleDeviceStrategy("cpu")):
        _check_strategy(strategy)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA", "TP"])
def test_accelerators_that_clip_and_step_by_themselves(kind):
    from accelerate.utils import DistributedType

    from gradsentinel.integrations.accelerate.driver import check_accelerator

    if not hasattr(DistributedType, kind):
        assert kind == "TP"  # went in the course of the 1.x releases
        return
    tool = SimpleNamespace(distributed_type=getattr(DistributedType, kind))
    with pytest.raises(ConfigurationError, match=f"distributed_type={kind} clips and steps by itself"):
        check_accelerator(tool)
    for fine in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "FSDP"):
        check_accelerator(SimpleNamespace(distributed_type=getattr(DistributedType, fine)))


def test_the_trainer_refuses_before_anything_is_trained(tmp_path, monkeypatch):
    from accelerate.utils import DistributedType

    trainer = hf.hf_trainer(Task(), tmp_path, hf.native(tmp_path / "run", NanCallback()))
    monkeypatch.setattr(
        type(trainer.accelerator), "distributed_type", property(lambda _: DistributedType.XLA)
    )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with quiet(), pytest.raises(ConfigurationError, match="distributed_type=XLA"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_fsdp1_hides_which_parameter_a_gradient_belongs_to():
    """An empty shell of the real class: on a CPU torch makes no whole one any more."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from gradsentinel.integrations.host import FrameworkHost

    shell = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(shell)
    shell._fsdp_wrapped_module, shell._sync_gradients = nn.Linear(4, 4), True
    model = nn.Sequential(shell, nn.Linear(4, 2))
    with pytest.raises(ConfigurationError, match=r"wrapped by FSDP1 .* use FSDP2 \(fully_shard\)"):
        FrameworkHost(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("package", "module", "extra", "oldest"),
    [
        ("accelerate", "gradsentinel.integrations.huggingface", "huggingface", "1.10"),
        ("transformers", "gradsentinel.integrations.huggingface", "huggingface", "5.0"),
        ("lightning", "gradsentinel.integrations.lightning", "lightning", "2.6"),
    ],
)
def test_an_old_package_is_an_error_that_names_both_versions(monkeypatch, package, module, extra, oldest):
    import sys

    owner = importlib.import_module(package)
    if package == "lightning":
        importlib.import_module("lightning.pytorch")
        monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    for loaded in [one for one in sys.modules if one.startswith(module)]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(owner, "__version__", "0.9.5")
    with pytest.raises(FrameworkError) as caught:
        importlib.import_module(module)
    assert str(caught.value) == (
        f"{package} 0.9.5 is too old: gradsentinel {__version__} needs {package} {oldest} or newer, "
        f"pip install -U 'gradsentinel[{extra}]'"
    )
    assert isinstance(caught.value, ImportError)
    for loaded in [one for one in sys.modules if one.startswith(module)]:
        monkeypatch.delitem(sys.modules, loaded)


def test_a_callback_of_the_core_says_where_the_one_is_that_a_trainer_takes(tmp_path):
    with pytest.raises(AttributeError, match=r"takes NanCallback from gradsentinel\.integrations\.lightning"):
        pl.fit(Task(), [NanCallback()])
    with (
        quiet(),
        pytest.raises(AttributeError, match=r"from gradsentinel\.integrations\.huggingface, or adapt"),
    ):
        hf.train(Task(), tmp_path, [NanCallback()])
    with pytest.raises(AttributeError, match=r"^'NanCallback' object has no attribute 'nonsense'$"):
        _ = NanCallback().nonsense


def test_a_callback_that_no_trainer_calls(tmp_path):
    from gradsentinel.integrations.huggingface import NanCallback as Native

    with pytest.raises(ConfigurationError, match=r"in the callbacks of a transformers\.Trainer only"):
        Native().on_train_begin(None, None, None)
