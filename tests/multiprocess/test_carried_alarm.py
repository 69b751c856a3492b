"""Where the global norm carries the alarm, a rank that alone knows of something still brings all to agree."""

from dataclasses import dataclass

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradsentinel import Action, BeforeClip, Detector, Finding, Kind, MagnitudeCallback, NanCallback, Sentinel

pytestmark = [pytest.mark.multiprocess, pytest.mark.expects_swallowed]
STEPS, BAD = 6, 3

RAISING = ("on_step_start", "on_batch", "on_after_backward", "on_after_step", "checks_after_step")
STRIKES = (
    "nothing",
    "loss",
    "gradient",
    "large gradient",
    "finding",
    "function",
    "answer",
    *(f"raise in {method}" for method in RAISING),
)


@dataclass(kw_only=True)
class Odd(Detector):
    """Does on rank 1 what it does not do on rank 0; it looks at no gradient before clipping."""

    strike: str
    rank: int

    def __repr__(self):
        return "Odd()"

    def _raise(self, method, step):
        if self.rank == 1 and step == BAD and self.strike == f"raise in {method}":
            raise ValueError(method)

    def on_step_start(self, event):
        self._raise("on_step_start", event.step)

    def on_batch(self, event):
        self._raise("on_batch", event.step)

    def on_after_backward(self, event):
        self._raise("on_after_backward", event.step)
        if self.strike == "finding" and self.rank == 1 and event.step == BAD:
            return Finding(kind=Kind.CUSTOM, value=torch.tensor(True), action=Action.SKIP, message="odd")
        return None

    def on_after_step(self, event):
        self._raise("on_after_step", event.step)

    def checks_after_step(self, step):
        self._raise("checks_after_step", step)
        return self.strike == "answer" and self.rank == 1 and step == BAD


def train(rank, folder, strike):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    callbacks = [
        NanCallback(state_warmup=0, state_every=0),
        MagnitudeCallback(max_global_norm=1e3, action="skip"),
        Odd(strike=strike, rank=rank),
    ]
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / strike, timeout=20.0)
    assert sentinel._watch.agreement._norm_bound == 1e3
    seen = []
    if strike == "function" and rank == 1:
        sentinel.on(BeforeClip, lambda event: seen.append(float(event.gradients.total_norm)))
    torch.manual_seed(rank)
    norms = []
    with sentinel:
        for step, batch in enumerate(sentinel.steps(list(torch.randn(STEPS, 3, 4)))):
            struck = step == BAD and rank == 1
            out = model(batch)
            if struck and "gradient" in strike:
                out.register_hook(lambda g: g * (1e8 if strike == "large gradient" else float("nan")))
            loss = out.square().mean()
            if struck and strike == "loss":
                loss = loss + float("nan")
            sentinel.backward(loss)
            norms.append(float(sentinel.step(1.0)))
    weights = [p.full_tensor() for p in model.parameters()]
    told = [(i.step, str(i.kind), str(i.outcome), [r.rank for r in i.ranks]) for i in sentinel.incidents]
    return told, weights, sentinel.applied_steps, norms


def all_strikes(rank, folder):
    return {strike: train(rank, folder, strike) for strike in STRIKES}


def test_every_rank_hears_of_what_one_of_them_knows(tmp_path):
    first, second = run_ranks(all_strikes, 2, tmp_path, tmp_path)
    healthy = first["nothing"]
    assert healthy[0] == []
    for strike in STRIKES:
        one, other = first[strike], second[strike]
        assert (one[0], one[2]) == (other[0], other[2]), strike
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True)), strike
        assert all(torch.isfinite(weight).all() for weight in one[1]), strike
        dropped = strike in {"loss", "gradient", "large gradient", "finding"}
        assert one[2] == STEPS - dropped, strike
        assert one[3][:BAD] == other[3][:BAD] == healthy[3][:BAD], strike
        if not dropped:  # the alarm was taken back, and the clip was that of the true norm
            assert one[3] == healthy[3], strike
            assert all(torch.equal(a, b) for a, b in zip(one[1], healthy[1], strict=True)), strike
        if strike not in {"nothing", "function", "answer"}:
            assert len(one[0]) == 1, strike
            assert one[0][0][3] == [1] or strike == "large gradient", strike
