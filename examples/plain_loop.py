"""A plain PyTorch loop, on real text, that goes on when a record is poisoned."""

import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, Sentinel
from gradsentinel.demo.data import CharCorpus, batches, stdlib_text
from gradsentinel.faults import FaultPlan, PoisonSample


def loss_of(model, batch):
    hidden, _ = model["rnn"](model["embed"](batch["tokens"]))
    logits = model["head"](hidden).transpose(1, 2)
    losses = nn.functional.cross_entropy(logits, batch["targets"], reduction="none").mean(dim=1)
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


torch.manual_seed(0)
corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
layers = {"embed": nn.Embedding(corpus.vocab, 64), "rnn": nn.GRU(64, 64, batch_first=True)}
model = nn.ModuleDict({**layers, "head": nn.Linear(64, corpus.vocab)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = batches(corpus, batch_size=16, steps=120, context=48, seed=0)
plan = FaultPlan([PoisonSample(steps=(60,), field="weight")])  # one NaN in one record of batch 60

with Sentinel(model, optimizer, callbacks=[NanCallback(), Rollback()], run_dir="runs/plain") as sentinel:
    for step, batch in enumerate(sentinel.steps(plan.batches(loader))):
        loss = loss_of(model, batch)
        sentinel.backward(loss)
        sentinel.step(max_norm=1.0)  # check, clip, optimizer.step, zero_grad; or drop the step
        if step % 20 == 0 or not sentinel.applied:
            print(f"step {step:3}  loss {loss.item():.3f}  {sentinel.last_action.label}")

for incident in sentinel.incidents:
    print(f"\n{incident.id}: {incident.message}")
    print(f"where: {incident.where}\ndone:  {incident.recovery}")
print("all weights finite:", all(bool(p.isfinite().all()) for p in model.parameters()))
