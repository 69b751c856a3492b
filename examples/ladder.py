"""Every rung of the recovery ladder, on real text: what each fault is, what was done, and what it cost."""

import math

import torch
from torch import nn

from gradsentinel import NanCallback, Rescue, Retry, Rollback, Sentinel, Skip, TrainingAborted
from gradsentinel.demo.data import CharCorpus, batches, stdlib_text
from gradsentinel.faults import FaultPlan, MatmulOverflow, PoisonActivation, PoisonGradient, PoisonSample

RUN_DIR = "runs/ladder"
FAULTS = [
    PoisonGradient(steps=(20,), parameter="head.weight"),  # a glitch: gone when the step is computed again
    MatmulOverflow(steps=(40,), module="head", persistent=True),  # a product leaves float16's range
    PoisonSample(steps=(60,), field="weight"),  # one NaN in one record of the data
    PoisonActivation(
        steps=range(100, 200), module="rnn", persistent=True
    ),  # a device that is broken for good
]
RUINED = 80
"""At this step the weights themselves are hit."""

corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
data = batches(corpus, batch_size=16, steps=120, context=48, seed=0)


def loss_of(model, batch):
    logits = model["head"](model["rnn"](model["embed"](batch["tokens"]))[0]).transpose(1, 2)
    losses = nn.functional.cross_entropy(logits, batch["targets"], reduction="none").mean(dim=1)
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def train(faults, resume):
    """One process's life; returns the last loss."""
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(corpus.vocab, 64), "rnn": nn.GRU(64, 64, batch_first=True)}
    model = nn.ModuleDict({**layers, "head": nn.Linear(64, corpus.vocab)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rollback = Rollback(every=10, confirm_after=3, max_rollbacks=1, on_disk=1)
    ladder = [NanCallback(), Retry(), Rescue(), Skip(), rollback]
    sentinel = Sentinel(model, optimizer, callbacks=ladder, run_dir=RUN_DIR, forward=loss_of, resume=resume)
    plan = FaultPlan(faults)
    print(f"starts at step {sentinel.step_count}, batch {sentinel.data_position['batch']} of the data")
    try:
        with sentinel, plan.attach(model):
            for batch in sentinel.steps(plan.batches(data)):
                loss = loss_of(model, batch)
                sentinel.backward(loss)
                sentinel.step(max_norm=1.0)
                if faults and sentinel.step_count == RUINED and len(sentinel.incidents) == 3:
                    model["head"].weight.data[0, 0] = math.nan
    finally:
        for incident in sentinel.incidents:
            seconds = incident.seconds["recover"]
            print(f"  step {incident.step:3}  {incident.outcome:<11}  {seconds:.2f} s  {incident.message}")
            print(f"{'':31}{incident.recovery.partition('. ')[0][:120]}")
        cost = rollback.cost
        print(f"  {cost.count} snapshots took {cost.seconds:.3f} s and {cost.nbytes / 1e6:.1f} MB of memory")
    return loss.item()


try:
    train(FAULTS, resume=None)
except TrainingAborted as stop:
    print(f"stopped; uncaught, the exit code would be {stop.exit_code}\n")
final = train([], resume="auto")  # as torchrun --max-restarts would, on another machine
print(f"the last loss is {final:.3f}")
