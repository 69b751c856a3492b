"""Runs that every kind of device must pass: the simulated NPU in CI, a CUDA device where there is one."""

from contextlib import nullcontext

import torch
from torch import nn

from gradsentinel import (
    Action,
    BeforeClip,
    Finding,
    HeadroomCallback,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Rollback,
    Sentinel,
    SpikeCallback,
)
from gradsentinel.devices import device_of
from gradsentinel.measures.mailbox import Mailbox
from gradsentinel.ranks.replicas import checksum
from gradsentinel.state.rng import RngState

WARM_UP = 12
STEPS = 20


class Net(nn.Module):
    """Has what makes steps interesting: statistics in buffers, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(16, 3)

    def forward(self, batch):
        return self.last(self.drop(torch.relu(self.norm(self.first(batch)))))


def make(device):
    torch.manual_seed(0)
    model = Net().to(device)
    return model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True)


def batches(device, count, bad=None):
    torch.manual_seed(1)
    drawn = torch.randn(count, 5, 6)
    if bad is not None:
        drawn[bad, 0, 0] = float("nan")
    return list(drawn.to(device))


def state(model, optimizer):
    kept = [value for entries in optimizer.state.values() for value in entries.values()]
    return [tensor.detach().cpu().clone() for tensor in (*model.state_dict().values(), *kept)]


def by_hand(device, max_norm=0.1):
    model, optimizer = make(device)
    data = batches(device, WARM_UP + STEPS)
    torch.manual_seed(2)
    for batch in data:
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return state(model, optimizer)


def watched(device, folder, guard, *, quiet=nullcontext, scaled=False, max_norm=0.1):
    """A healthy run; its steps after the first few are made within `quiet()`."""
    model, optimizer = make(device)
    data = batches(device, WARM_UP + STEPS)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, init_scale=1.0, growth_interval=1000) if scaled else None
    callbacks = [
        NanCallback(),
        MagnitudeCallback(max_global_norm=1e6, max_parameter_norm=1e6),
        SpikeCallback(),
        HeadroomCallback(every=5),
    ]
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder, guard=guard, scaler=scaler)
    torch.manual_seed(2)
    loader = iter(sentinel.steps(data))

    def step():
        sentinel.backward(model(next(loader)).square().mean())
        sentinel.step(max_norm)

    for _ in range(WARM_UP):
        step()
    with quiet():
        for _ in range(STEPS):
            step()
    final = state(model, optimizer)
    sentinel.close()
    return final, [str(incident.kind) for incident in sentinel.incidents]


def spoilt(device, folder, guard, bad=7):
    """A run with one bad batch: what was told, and the state it ends with."""
    model, optimizer = make(device)
    torch.manual_seed(2)
    with Sentinel(model, optimizer, run_dir=folder, guard=guard) as sentinel:
        for batch in sentinel.steps(batches(device, 14, bad)):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(0.1)
    told = [(i.step, str(i.kind), str(i.outcome)) for i in sentinel.incidents]
    return told, state(model, optimizer)


def sent_back(device, folder):
    """A run that is sent back once: the state it went back to, that state as it was, and where it is kept."""
    model, optimizer = make(device)
    torch.manual_seed(2)
    seen, restored = {}, None
    rollback = Rollback(every=3, confirm_after=1)
    with Sentinel(model, optimizer, callbacks=[NanCallback(), rollback], run_dir=folder) as sentinel:
        sentinel.on(
            BeforeClip,
            lambda event: Finding(
                kind=Kind.SPIKE,
                value=torch.tensor(event.step == 11 and not sentinel.incidents, device=device),
                action=Action.ROLLBACK,
            ),
        )
        for batch in sentinel.steps(batches(device, 16)):
            before = sentinel.step_count
            sentinel.backward(model(batch).square().mean())
            sentinel.step(0.1)
            if sentinel.step_count < before:
                restored = sentinel.step_count, state(model, optimizer)
            else:
                seen[sentinel.step_count] = state(model, optimizer)
        good = sentinel._watch.run.known_good
        pinned = [value.is_pinned() for value in good.parameters.values()]
    step, kept = restored
    return kept, seen[step], pinned


def letters(device):
    """Numbers on their way to the host, in memory that is used again."""
    mailbox = Mailbox(torch.device(device))
    found = []
    for number in range(5):
        letter = mailbox.post(torch.arange(3.0, device=device) + number)
        found.append(letter.read())
        mailbox.take_back(letter)
    return found, mailbox.spare


def pieces(device):
    """The small things: generators, checksums, factors, tables sent to the device."""
    here = device_of(device)
    torch.rand(1, device=device)
    random = RngState.capture([torch.device(device).type])
    first = torch.rand(4, device=device).cpu()
    missing = random.restore()
    again = torch.rand(4, device=device).cpu()
    torch.manual_seed(0)
    values = torch.randn(5, 3)
    sums = int(checksum(values)), int(checksum(values.to(device)))
    ours, theirs = ([torch.randn(7, device=device).mul_(n + 1) for n in range(3)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.copy_(one)
    factor = torch.tensor(0.3, device=device)
    here.scale_(ours, factor)
    torch._foreach_mul_(theirs, factor)
    alike = all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(ours, theirs, strict=True))
    sent = here.send(torch.arange(4))
    with here.mark("gradsentinel/test"):
        name = here.name
    return {
        "generators": [str(name) for name, _ in random.devices],
        "missing": missing,
        "same draws": torch.equal(first, again),
        "same checksum": sums[0] == sums[1],
        "same product": alike,
        "sent": (sent.device.type, sent.tolist()),
        "saturates": here.saturates,
        "flag": here.overflow_flag(),
        "named": name != str(here.device),
    }
