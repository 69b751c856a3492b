"""Two ranks over simulated HCCL: healthy runs untouched, bad updates on none, in DDP and FSDP2."""

import re

import pytest
import simulator
import torch
import torch.distributed as dist
from on_npu import run_ranks_on_npu
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradsentinel import (
    Action,
    BeforeClip,
    ConfigurationError,
    CrossRankCallback,
    Finding,
    Kind,
    NanCallback,
    Retry,
    Rollback,
    Sentinel,
)

STEPS = 14
BAD = 9
NAN = float("nan")
_STREAM = re.compile(r"\d+")


class Net(nn.Module):
    """Fails once where it is told to, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(16, 4)
        self.fail_at = -1
        self.calls = 0

    def forward(self, batch):
        hidden = torch.relu(self.first(batch))
        self.calls += 1
        if self.calls - 1 == self.fail_at:
            hidden = hidden * NAN
        return self.last(hidden)


def make(rank, kind):
    torch.manual_seed(0)
    model = Net().to(torch.device("npu", rank))
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    else:
        wrapped = fully_shard(model)
    return model, wrapped, torch.optim.AdamW(wrapped.parameters(), 1e-2, fused=True)


def batches(rank, bad=None):
    torch.manual_seed(rank)
    drawn = torch.randn(STEPS, 5, 6)
    if bad is not None and rank == 1:
        drawn[bad, 0, 0] = NAN
    return list(drawn.to(torch.device("npu", rank)))


def state(model, optimizer):
    kept = [value for entries in optimizer.state.values() for value in entries.values()]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (*model.parameters(), *kept)]
    return [tensor.detach().cpu() for tensor in whole]


def by_hand(rank, kind):
    model, wrapped, optimizer = make(rank, kind)
    simulator.reset()
    for batch in batches(rank):
        wrapped(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    found = simulator.counts()
    return state(model, optimizer), found


def watched(rank, folder, kind, guard, callbacks=(), *, bad=None, fail_at=-1, back_at=None):
    """Returns what was told, the state, hazards, and the waits of the loop itself."""
    model, wrapped, optimizer = make(rank, kind)
    model.fail_at = fail_at if rank == 1 else -1

    def forward(wrapped, batch):
        return wrapped(batch).square().mean()

    sentinel = Sentinel(
        wrapped,
        optimizer,
        callbacks=[NanCallback(state_warmup=0, state_every=0), *callbacks],
        run_dir=folder,
        guard=guard,
        forward=forward,
    )
    states, pinned = {}, []
    if back_at is not None:
        sentinel.on(
            BeforeClip,
            lambda event: Finding(
                kind=Kind.SPIKE,
                value=torch.tensor(event.step == back_at and not sentinel.incidents, device=f"npu:{rank}"),
                action=Action.ROLLBACK,
            ),
        )
    simulator.reset()
    with sentinel:
        for batch in sentinel.steps(batches(rank, bad)):
            before = sentinel.step_count
            sentinel.backward(forward(wrapped, batch))
            sentinel.step(0.1)
            if back_at is not None:
                if sentinel.step_count < before:
                    states["restored"] = sentinel.step_count, state(model, optimizer)
                else:
                    states[sentinel.step_count] = state(model, optimizer)
        counted = simulator.counts()
        good = sentinel._watch.run.known_good
        pinned = [] if good is None else [value.is_pinned() for value in good.parameters.values()]
    told = [(i.step, str(i.kind), str(i.outcome), [r.rank for r in i.ranks]) for i in sentinel.incidents]
    return told, state(model, optimizer), counted, states, pinned


def beyond(hazards, plain):
    """The hazards that the loop does not have by itself: FSDP2 frees what another stream has used."""
    own = {_STREAM.sub("", hazard) for hazard in plain.hazards}
    return [hazard for hazard in hazards if _STREAM.sub("", hazard) not in own]


def alike(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def everything(rank, folder, kind):
    torch.npu.set_device(rank)
    places = iter(folder / str(number) for number in range(20))
    expected, plain = by_hand(rank, kind)
    found = {}
    for guard in ("host", "device"):
        told, weights, counted, _, _ = watched(rank, next(places), kind, guard)
        found[f"healthy {guard}"] = (
            told,
            alike(weights, expected),
            beyond(counted.hazards, plain),
            len(counted.hazards) - len(plain.hazards),
            counted.fallbacks,
        )
        found[f"syncs {guard}"] = {
            name: n - plain.syncs.get(name, 0)
            for name, n in counted.syncs.items()
            if n != plain.syncs.get(name, 0)
        }
        told, weights, counted, _, _ = watched(rank, next(places), kind, guard, bad=BAD)
        finite = all(bool(tensor.isfinite().all()) for tensor in weights)
        found[f"bad {guard}"] = (
            told,
            finite,
            [float(t.double().sum()) for t in weights],
            beyond(counted.hazards, plain),
        )
    told, weights, counted, _, _ = watched(rank, next(places), kind, "host", [Retry()], fail_at=BAD)
    found["retry"] = told, alike(weights, expected), beyond(counted.hazards, plain)
    rollback = Rollback(every=3, confirm_after=1)
    told, _, counted, states, pinned = watched(rank, next(places), kind, "host", [rollback], back_at=BAD)
    step, restored = states.pop("restored")
    found["rollback"] = told, alike(restored, states[step]), beyond(counted.hazards, plain), pinned
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_promises_hold_over_hccl(tmp_path, kind):
    ranks = run_ranks_on_npu(everything, 2, tmp_path, tmp_path, kind)
    one, other = ranks
    for found in ranks:
        for guard in ("host", "device"):
            assert found[f"healthy {guard}"] == ([], True, [], 0, {})  # P1
            told, finite, sums, hazards = found[f"bad {guard}"]
            assert [entry[0] for entry in told] == [BAD]
            assert told[0][2] == "skipped"
            assert told[0][3] == [1]
            assert finite  # P2
            assert hazards == []
            assert sums == one[f"bad {guard}"][2]
        assert found["syncs device"] == {}
        told, same, hazards = found["retry"]
        assert [(entry[0], entry[2]) for entry in told] == [(BAD, "retried")]
        assert same
        assert hazards == []
        told, same, hazards, pinned = found["rollback"]
        assert [(entry[0], entry[2]) for entry in told] == [(BAD, "rolled_back")]
        assert same
        assert hazards == []
        assert pinned
        assert all(pinned)
    assert one["bad host"][2] == other["bad host"][2] == one["bad device"][2]


def compared(rank, folder):
    """Replicas that are compared: a healthy run, one in which a rank drifts, and what travels for it."""
    torch.npu.set_device(rank)
    expected, plain = by_hand(rank, "ddp")
    compare = CrossRankCallback(every=2)
    told, weights, counted, _, _ = watched(rank, folder / "healthy", "ddp", "host", [compare])
    found = {"healthy": (told, alike(weights, expected), beyond(counted.hazards, plain), counted.fallbacks)}

    model, wrapped, optimizer = make(rank, "ddp")
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=1, confirm_after=0)]
    with Sentinel(wrapped, optimizer, callbacks=callbacks, run_dir=folder / "drifting") as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(rank))):
            sentinel.backward(wrapped(batch).square().mean())
            sentinel.step(0.1)
            if (number, rank) == (6, 1):
                with torch.no_grad():
                    model.last.weight[0, 0] += 1.0
        consensus = sentinel._watch.run.consensus
        sums = consensus.total(torch.tensor([rank + 1.0], dtype=torch.float64))
        values = [torch.full((2,), rank, dtype=kind) for kind in (torch.float64, torch.bfloat16, torch.bool)]
        consensus.copy_from(1, values, None)
    found["drifted"] = [(str(i.kind), str(i.outcome)) for i in sentinel.incidents]
    found["weights"] = [float(tensor.double().sum()) for tensor in state(model, optimizer)]
    found["travelled"] = sums.dtype, sums.tolist(), [value.double().tolist() for value in values]
    return found


@pytest.mark.multiprocess
def test_what_ranks_compare_and_copy_is_what_hccl_takes(tmp_path):
    one, other = run_ranks_on_npu(compared, 2, tmp_path, tmp_path)
    for found in (one, other):
        assert found["healthy"] == ([], True, [], {})
        assert found["drifted"] == [("rank_divergence", "rolled_back")]
        assert found["travelled"] == (torch.float64, [3.0], [[1.0, 1.0]] * 3)
    assert one["weights"] == other["weights"]


def guarded(rank, folder, lags):
    model, wrapped, optimizer = make(rank, "ddp")
    del model
    guard = {"guard": "host"} if lags[rank] is None else {"guard": "device", "lag": lags[rank]}
    try:
        Sentinel(wrapped, optimizer, run_dir=folder, **guard).close()
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.multiprocess
def test_ranks_that_would_hear_of_an_incident_at_different_steps_are_refused(tmp_path):
    for lags, words in (((2, 3), "lag=3"), ((2, None), "guard='host'")):
        for said in run_ranks_on_npu(guarded, 2, tmp_path, tmp_path / words, lags):
            assert "different" in said
            assert words in said


def table(rank):
    """What the process group takes and what it refuses, as the real one does."""
    torch.npu.set_device(rank)
    device = torch.device("npu", rank)
    taken, refused = [], []
    for dtype in (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for name in ("SUM", "MAX", "MIN", "BAND", "BOR", "BXOR"):
            try:
                dist.all_reduce(torch.ones(2, dtype=dtype, device=device), op=getattr(dist.ReduceOp, name))
                taken.append((dtype, name))
            except RuntimeError:
                refused.append((dtype, name))
    moved = torch.ones(2, dtype=torch.float64, device=device) * rank
    dist.broadcast(moved, 1)
    return taken, refused, moved.tolist()


@pytest.mark.multiprocess
def test_the_simulated_hccl_takes_what_the_real_one_takes(tmp_path):
    for taken, refused, moved in run_ranks_on_npu(table, 2, tmp_path):
        assert {dtype for dtype, _ in taken} == {
            *(torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32),
        }
        assert {name for _, name in taken} == {"SUM", "MAX", "MIN"}
        assert len(refused) == 6 * 6 - len(taken) == 6 * 6 - 5 * 3
        assert moved == [1.0, 1.0]
