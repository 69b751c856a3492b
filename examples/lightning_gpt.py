"""Lightning on real text: one transient NaN is computed again, one bad record is dropped and named."""

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger

from gradsentinel.demo.data import CharCorpus, batches, stdlib_text
from gradsentinel.demo.model import CharGPT
from gradsentinel.faults import FaultPlan, PoisonActivation, PoisonSample
from gradsentinel.integrations.lightning import NanCallback, Retry, Rollback, RunSettings


class LightningGPT(lightning.LightningModule):
    """An ordinary module: nothing in it knows of GradSentinel."""

    def __init__(self, vocab):
        super().__init__()
        self.gpt = CharGPT(vocab=vocab, width=32, heads=2, layers=2, context=32)

    def training_step(self, batch, batch_idx):  # noqa: D102 - as everywhere
        loss = self.gpt(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):  # noqa: D102 - likewise
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


lightning.seed_everything(0)
corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
module = LightningGPT(corpus.vocab)
loader = batches(corpus, batch_size=16, steps=60, context=32, seed=0)
flash = PoisonActivation(steps=(20,), module="gpt.blocks.1.attn")  # once, as from a failing device
record = PoisonSample(steps=(40,), field="weight")  # one NaN in one record
plan = FaultPlan([flash, record])

trainer = lightning.Trainer(
    max_epochs=1,
    gradient_clip_val=1.0,
    logger=CSVLogger("runs", name="lightning"),
    enable_progress_bar=False,
    callbacks=[NanCallback(), Retry(), Rollback(), RunSettings(run_dir="runs/lightning/gradsentinel")],
)
with plan.attach(module):
    trainer.fit(module, plan.batches(loader))
print(f"loss {trainer.callback_metrics['loss']:.3f} after {trainer.global_step} steps")
print("all weights finite:", all(bool(p.isfinite().all()) for p in module.parameters()))
