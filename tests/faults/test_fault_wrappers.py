import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsentinel.faults import (
    FaultPlan,
    FlipBit,
    MatmulOverflow,
    PoisonActivation,
    PoisonGradient,
    WrongOperator,
)


def compiled(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("around", [compiled, compiled_in_place])
@pytest.mark.parametrize(
    "fault",
    [
        PoisonActivation(steps=(0, 2), module="blocks.0.mlp"),
        PoisonActivation(steps=(2,), module=""),
        MatmulOverflow(steps=(2,), module="head"),
        WrongOperator(steps=(2,), module="head", operator="zero", phase="backward"),
        PoisonGradient(steps=(0, 2), parameter="enter.weight"),
        FlipBit(steps=(2,), target="parameter", name="head.weight", bit=3, persistent=True),
    ],
)
def test_compiled_models_are_hit_before_and_after_they_are_compiled(fault, around, train):
    torch._dynamo.reset()
    plan = FaultPlan([fault])
    train(plan, around=around)
    assert [i.step for i in plan.log] == sorted(fault.steps)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_compiled_run_without_a_due_fault_is_bit_identical(train):
    torch._dynamo.reset()
    clean = train(around=compiled)
    torch._dynamo.reset()
    run = train(FaultPlan([PoisonActivation(steps=(99,))]), around=compiled)
    assert run.losses == clean.losses


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_is_refused_at_attach():
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="TorchScript"):
        FaultPlan([PoisonActivation(steps=(1,), module="0")]).attach(model)


@pytest.fixture
def lonely_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lonely_group")
def test_names_need_no_wrapper_prefix_and_gradients_are_hit_before_the_reduction(tiny, train):
    reduced = []

    def around(model):
        ddp = DistributedDataParallel(model)

        def hook(state, bucket):
            reduced.append(bool(bucket.buffer().isfinite().all()))
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, hook)
        return ddp

    plan = FaultPlan(
        [
            PoisonGradient(steps=(1,), parameter="enter.weight"),
            PoisonActivation(steps=(3,), module="module.blocks.0.mlp"),
        ]
    )
    assert plan.rank == 0
    run = train(plan, around=around)
    assert [i.where for i in plan.log] == ["enter.weight", "blocks.0.mlp"]
    assert run.bad(1) == {"enter.weight"}
    assert not all(reduced)
    assert reduced[0]


def test_a_parameter_shared_by_two_modules_is_found_under_both_names_and_drawn_once():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    for name in ("a.weight", "b.weight", None):
        plan = FaultPlan([PoisonGradient(steps=(0,), parameter=name)])
        with plan.attach(model), plan.at(0):
            model["a"](torch.ones(1, 2)).sum().backward()
        assert plan.log[0].where == (name or "a.weight")


def test_a_parameter_that_is_replaced_after_attach_is_hit_where_it_is_now(tiny, loader):
    model = tiny()
    plan = FaultPlan([PoisonGradient(steps=(0,), parameter="head.bias")])
    with plan.attach(model):
        model.head.bias = nn.Parameter(torch.zeros(2))
        with plan.at(0):
            model(loader[0]).sum().backward()
    assert model.head.bias.grad.isnan().any()
