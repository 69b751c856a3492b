"""A plain PyTorch loop, on real text, that survives the three faults of the demo."""

import torch
from torch import nn

from gradsentinel import MagnitudeCallback, NanCallback, Rollback, Sentinel
from gradsentinel.demo.data import CharCorpus, batches, stdlib_text
from gradsentinel.faults import FaultPlan, FlipBit, MatmulOverflow, PoisonSample


def loss_of(model, batch):
    logits = model["head"](model["rnn"](model["embed"](batch["tokens"]))[0]).transpose(1, 2)
    losses = nn.functional.cross_entropy(logits, batch["targets"], reduction="none").mean(dim=1)
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


torch.manual_seed(0)
corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
layers = {"embed": nn.Embedding(corpus.vocab, 64), "rnn": nn.GRU(64, 64, batch_first=True)}
model = nn.ModuleDict({**layers, "head": nn.Linear(64, corpus.vocab)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = batches(corpus, batch_size=16, steps=120, context=48, seed=0)
record = PoisonSample(steps=(60,), field="weight")  # one NaN in one record
overflow = MatmulOverflow(steps=(75,), module="head", persistent=True)  # a product leaves float16's range
bit = FlipBit(steps=(90,), target="gradient", name="head.weight", bit=30)  # finite, and huge
plan = FaultPlan([record, overflow, bit])
callbacks = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip"), Rollback()]

sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir="runs/plain", forward=loss_of)
with sentinel, plan.attach(model):
    for step, batch in enumerate(sentinel.steps(plan.batches(loader))):
        loss = loss_of(model, batch)
        sentinel.backward(loss)
        sentinel.step(max_norm=1.0)  # check, clip, optimizer.step, zero_grad; or drop the step
        if step % 20 == 0 or not sentinel.applied:
            print(f"step {step:3}  loss {loss.item():.3f}  {sentinel.last_action.label}")
for incident in sentinel.incidents:
    print(f"\n{incident.id}: {incident.message}\nwhere: {incident.where} ({incident.diagnosis.cause})")
    print(f"why:   {incident.diagnosis.evidence[0]}\ndone:  {incident.recovery}")
print("all weights finite:", all(bool(p.isfinite().all()) for p in model.parameters()))
