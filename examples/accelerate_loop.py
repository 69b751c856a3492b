"""An Accelerate loop on real text: a transient NaN is computed again, a bad record is dropped and named."""

import torch
from accelerate import Accelerator

from gradsentinel import NanCallback, Retry, Rollback
from gradsentinel.demo.data import CharCorpus, batches, stdlib_text
from gradsentinel.demo.model import CharGPT
from gradsentinel.faults import FaultPlan, PoisonActivation, PoisonSample
from gradsentinel.integrations.accelerate import prepare

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
model = CharGPT(vocab=corpus.vocab, width=32, heads=2, layers=2, context=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
loader = batches(corpus, batch_size=16, steps=60, context=32, seed=0)
flash = PoisonActivation(steps=(10,), module="blocks.1.attn")  # once, as from a failing device
record = PoisonSample(steps=(20,), field="weight")  # one NaN in one record
plan = FaultPlan([flash, record])
attached = plan.attach(model)

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
sentinel = prepare(
    accelerator,
    model,
    optimizer,
    scheduler=scheduler,
    callbacks=[NanCallback(), Retry(), Rollback()],
    forward=lambda model, batch: model(**batch).loss,
    run_dir="runs/accelerate",
)
with attached, sentinel:
    for batch in sentinel.steps(plan.batches(loader, accumulate=2)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # dropped if the step is bad, and the scheduler waits
            scheduler.step()
            optimizer.zero_grad()
for incident in sentinel.incidents:
    print(f"{incident.id}: {incident.message}; {incident.recovery}")
print(f"loss {loss.item():.3f} after {sentinel.step_count} steps")
print("all weights finite:", all(bool(p.isfinite().all()) for p in model.parameters()))
