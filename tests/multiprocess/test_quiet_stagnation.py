"""StagnationCallback asks no rank more than the NaN check does where the norm carries the alarm (FSDP)."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradsentinel import NanCallback, Sentinel, StagnationCallback

pytestmark = pytest.mark.multiprocess


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 8)
        self.gate = 1.0

    def forward(self, x):
        return (self.left(x) + self.gate * self.right(x)).square().mean()


def train(rank, folder, callbacks, dies):
    torch.manual_seed(0)
    model = Gated()
    fully_shard(model.left)
    fully_shard(model.right)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder, timeout=20.0)
    consensus, asked = sentinel._watch.run.consensus, []
    agree = consensus.agree

    def counted(levels):
        asked.append(sentinel.step_count)
        return agree(levels)

    consensus.agree = counted
    torch.manual_seed(rank)
    with sentinel:
        for step, batch in enumerate(sentinel.steps(list(torch.randn(70, 3, 4)))):
            model.gate = float(step < dies)
            sentinel.backward(model(batch))
            sentinel.step(1.0)
        asked = list(asked)
    told = [(i.step, str(i.kind), {t.name for t in i.tensors}) for i in sentinel.incidents]
    return told, len(asked), sentinel.applied_steps


def both(rank, folder):
    def watch(*more):
        return [NanCallback(state_warmup=0, state_every=0), *more]

    return {
        "nan": train(rank, folder / "nan", watch(), 1000),
        "healthy": train(rank, folder / "healthy", watch(StagnationCallback()), 1000),
        "dead": train(rank, folder / "dead", watch(StagnationCallback()), 40),
        "skip": train(rank, folder / "skip", watch(StagnationCallback(action="skip")), 1000),
    }


def test_it_asks_nobody_until_there_is_something_to_say(tmp_path):
    first, second = run_ranks(both, 2, tmp_path, tmp_path)
    assert first == second
    assert first["healthy"][:2] == first["nan"][:2] == ([], first["nan"][1])
    assert first["nan"][1] < 10
    assert first["dead"][0] == [(49, "stagnation", {"right.weight", "right.bias"})]
    assert first["dead"][1] < first["nan"][1] + 10
    assert first["skip"][1] > 60  # what is to drop the very step has to be agreed on in it
    assert [first[name][2] for name in ("nan", "healthy", "dead", "skip")] == [70] * 4
