"""The simulator itself: does it count, and does it see work that is not ordered?"""

import pytest
import simulator
import torch
import torch.distributed as dist
from on_npu import run_on_npu, run_ranks_on_npu
from torch import nn


def mlp_learns_as_on_the_cpu():
    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x = torch.linspace(-1, 1, 64).view(16, 4).to(device)
        for _ in range(30):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    assert train("cpu") == train("npu")


def every_wait_is_counted():
    x = torch.ones(4, device="npu")
    with simulator.counted() as found:
        x.sum().item()
        bool(x.isfinite().all())
        x.nonzero()
        x.cpu()
    assert found.syncs == {"item": 2, "aten::nonzero": 1, "blocking_d2h": 1}


def clipping_waits_for_nothing_and_takes_one_launch_for_all_norms():
    gradients = [torch.ones(3, device="npu") for _ in range(20)]
    with simulator.counted() as found:
        torch._foreach_norm(gradients)
    assert found.launches == {"aten::_foreach_norm.Scalar": 1}
    assert found.syncs == {}


def operators_without_a_kernel_are_counted():
    with simulator.counted() as found:
        torch.ones(4, device="npu").lgamma()
    assert list(found.fallbacks) == ["aten::lgamma.out"]


def unordered_work_on_a_side_stream_is_a_hazard():
    side = torch.npu.Stream()
    x = torch.ones(4, device="npu")
    with simulator.counted() as found, torch.npu.stream(side):
        x * 2
    assert len(found.hazards) == 1
    assert "not ordered" in found.hazards[0]
    with simulator.counted() as found:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x * 2
    assert found.hazards == []


def memory_that_is_freed_too_early_is_a_hazard():
    side = torch.npu.Stream()
    x = torch.ones(4, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with simulator.counted() as found:
        with torch.npu.stream(side):
            y = x * 2
        del x
        assert y is not None
    assert any("freed" in hazard for hazard in found.hazards)


def a_pinned_copy_holds_nothing_until_its_event_has_come():
    paper = torch.zeros(4).pin_memory()
    sent = torch.arange(4.0, device="npu")
    event = torch.npu.Event()
    with simulator.counted() as found:
        paper.copy_(sent, non_blocking=True)
        event.record()
        assert paper.isnan().all()
        assert [event.query(), event.query()] == [False, True]
    assert found.syncs == {}
    assert paper.tolist() == [0, 1, 2, 3]


def an_unpinned_copy_is_a_wait():
    target, sent = torch.zeros(4), torch.arange(4.0, device="npu")
    with simulator.counted() as found:
        target.copy_(sent, non_blocking=True)
    assert found.syncs == {"blocking_d2h": 1}


def a_pinned_source_must_not_change_on_its_way():
    source = torch.ones(4).pin_memory()
    with simulator.counted() as found:
        on_device = source.to("npu", non_blocking=True)
        source.fill_(7)
        torch.npu.synchronize()
        assert on_device is not None
    assert any("pinned source modified" in hazard for hazard in found.hazards)


def the_random_state_of_the_device_can_be_put_back():
    state = torch.npu.get_rng_state()
    first = torch.rand(4, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device="npu"))


CHECKS = (
    mlp_learns_as_on_the_cpu,
    every_wait_is_counted,
    clipping_waits_for_nothing_and_takes_one_launch_for_all_norms,
    operators_without_a_kernel_are_counted,
    unordered_work_on_a_side_stream_is_a_hazard,
    memory_that_is_freed_too_early_is_a_hazard,
    a_pinned_copy_holds_nothing_until_its_event_has_come,
    an_unpinned_copy_is_a_wait,
    a_pinned_source_must_not_change_on_its_way,
    the_random_state_of_the_device_can_be_put_back,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_simulator(check):
    run_on_npu(check)


def hccl(rank):
    torch.npu.set_device(rank)
    device = torch.device("npu", rank)
    flags = torch.tensor([rank, -rank], device=device, dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    refused = []
    for dtype, operation in ((torch.float64, dist.ReduceOp.SUM), (torch.int32, dist.ReduceOp.BAND)):
        try:
            dist.all_reduce(torch.ones(1, device=device, dtype=dtype), op=operation)
        except RuntimeError:
            refused.append(str(operation))
    simulator.reset()
    running = torch.ones(3, device=device)
    work = dist.all_reduce(running, async_op=True)
    early = running + 0
    hazards = len(simulator.counts().hazards)
    work.wait()
    assert early is not None
    return flags.tolist(), len(refused), hazards > 0


def test_hccl_takes_only_what_the_real_one_takes(tmp_path):
    assert run_ranks_on_npu(hccl, 2, tmp_path) == [([1, 0], 2, True)] * 2
