"""The Hugging Face Trainer on real text: a small GPT-2 made from a config, and one NaN that costs nothing."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradsentinel.demo.data import CharCorpus, Windows, stdlib_text
from gradsentinel.faults import FaultPlan, PoisonActivation
from gradsentinel.integrations.huggingface import NanCallback, Retry, Rollback


class FaultyTrainer(Trainer):
    """Has a NaN in one activation of one step, as a failing device might."""

    def training_step(self, *args, **kwargs):  # noqa: D102 - it is the Trainer's own
        with plan.at(self.state.global_step):
            return super().training_step(*args, **kwargs)


torch.manual_seed(0)
corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
text = [{"input_ids": w["tokens"], "labels": w["tokens"]} for w in Windows(corpus.train, 32)]
config = GPT2Config(vocab_size=corpus.vocab, n_positions=32, n_embd=32, n_layer=2, n_head=2)
config.loss_type = "ForCausalLM"
model = GPT2LMHeadModel(config)
plan = FaultPlan([PoisonActivation(steps=(20,), module="transformer.h.1.mlp")])

arguments = TrainingArguments(
    "runs/huggingface",
    per_device_train_batch_size=16,
    max_steps=40,
    learning_rate=3e-3,
    logging_steps=10,
    report_to=[],
    disable_tqdm=True,
)
callbacks = [NanCallback(), Retry(), Rollback()]
trainer = FaultyTrainer(model=model, args=arguments, train_dataset=text, callbacks=callbacks)
with plan.attach(model):
    result = trainer.train()
(told,) = [line for line in trainer.state.log_history if "gradsentinel_action" in line]
print(f"after step {told['step']}: loss {told['gradsentinel_loss']}, {told['gradsentinel_action']}")
print(f"loss {result.training_loss:.3f} over {result.global_step} steps")
print("all weights finite:", all(bool(p.isfinite().all()) for p in model.parameters()))
