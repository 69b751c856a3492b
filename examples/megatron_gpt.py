"""A GPT of megatron-core on real text, tensor x pipeline x data parallel; a gradient of one rank turns NaN.

The step is computed again by all ranks; if the fault comes back (--persistent), it is skipped. On CPUs:

torchrun --nproc-per-node 8 examples/megatron_gpt.py
"""

import argparse
import logging
import os
import warnings

import torch
import torch.distributed as dist

if not torch.accelerator.is_available():  # on an NPU: import torch_npu and its transfer_to_npu here
    import cuda_on_cpu

    cuda_on_cpu.install()
warnings.simplefilter("ignore")

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from gradsentinel import NanCallback, Retry, Rollback
from gradsentinel.demo.data import CharCorpus, batches, stdlib_text
from gradsentinel.integrations import megatron

LENGTH, MICROBATCH, MICROBATCHES = 32, 4, 4
LAYERS, HEADS = 4, 4


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/megatron", help="where events and incidents are written")
    parser.add_argument("--tensor", type=int, default=2, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline stages")
    parser.add_argument("--fault-rank", type=int, default=5, help="whose gradient turns NaN; -1: nobody's")
    parser.add_argument("--fault-step", type=int, default=8)
    parser.add_argument("--persistent", action="store_true", help="the fault comes back in the retry")
    parser.add_argument("--steps", type=int, default=20)
    options, ranks = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "0"))
    if not ranks:
        raise SystemExit("start it with torchrun --nproc-per-node 8 examples/megatron_gpt.py")
    if ranks % (options.tensor * options.pipeline) or HEADS % options.tensor or LAYERS % options.pipeline:
        raise SystemExit(f"--tensor, --pipeline: do not fit {ranks} ranks, {HEADS} heads, {LAYERS} layers")
    if not (-1 <= options.fault_rank < ranks and 0 <= options.fault_step < options.steps):
        raise SystemExit(f"--fault-rank: 0 to {ranks - 1}, -1: none; --fault-step: 0 to {options.steps - 1}")
    return options


def make_model(options, vocabulary):
    """Return the chunks of this rank's pipeline stage, as Megatron-LM's get_model does."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        deallocate_pipeline_outputs=False,  # gloo may still be reading them
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=-(-vocabulary // 16) * 16,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunk = DistributedDataParallel(config, ddp, Float16Module(config, model))
    chunk.broadcast_params()
    return [chunk]


def forward_step(data, model):
    records = next(data)
    length = torch.arange(LENGTH, device=records["tokens"].device)
    mask = length[:, None] < length[None]
    output = model(
        records["tokens"],
        length.expand_as(records["tokens"]),
        mask[None, None],
        labels=records["targets"],
    )

    def loss_func(values):
        loss = values.float().mean()
        return loss, {"lm loss": loss.detach().clone()}

    return output, loss_func


def poison(chunk, options, step):
    """Have one gradient of this rank turn NaN in one step: once, or whenever that step is computed."""
    name, parameter = next((n, p) for n, p in chunk.named_parameters() if n.endswith("linear_fc1.weight"))
    struck = []

    def spoil(gradient):
        if step[0] != options.fault_step or (struck and not options.persistent):
            return gradient
        struck.append(name)
        return gradient.index_fill(0, torch.tensor([3], device=gradient.device), float("nan"))

    parameter.register_hook(spoil)


def main(options):
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local)
        device = torch.device(torch.accelerator.current_accelerator().type, local)
    torch.set_num_threads(1)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    parallel_state.initialize_model_parallel(options.tensor, options.pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    logging.disable(logging.INFO)

    corpus = CharCorpus(stdlib_text(200_000))  # the sources of Python's own standard library
    model = make_model(options, corpus.vocab)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        min_lr=3e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(settings, model)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=3e-3,
        min_lr=3e-4,
        lr_warmup_steps=4,
        lr_decay_steps=200,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=200,
        wd_incr_style="constant",
    )
    model[0].config.finalize_model_grads_func = finalize_model_grads
    model[0].config.grad_scale_func = optimizer.scale_loss
    replica = parallel_state.get_data_parallel_rank()
    count = options.steps * MICROBATCHES
    loader = batches(corpus, batch_size=MICROBATCH, steps=count, context=LENGTH, seed=replica)
    data = ({name: values.to(device) for name, values in records.items()} for records in loader)

    # The two lines that a training loop of your own needs; the launcher does both for Megatron-LM's.
    callbacks = [NanCallback(), Retry(), Rollback(every=5, confirm_after=2)]
    sentinel = megatron.attach(
        model, optimizer, callbacks=callbacks, scheduler=scheduler, run_dir=options.run_dir
    )
    forward_backward = sentinel.schedule(get_forward_backward_func())

    now = [0]
    if dist.get_rank() == options.fault_rank:
        poison(model[0], options, now)
    reporter = dist.get_rank() == dist.get_world_size() - 1  # the last stage knows the loss
    for step in range(options.steps):
        now[0] = step
        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICROBATCH,
            forward_only=False,
        )
        applied, norm, _ = optimizer.step()  # the ranks agree: as it is, computed again, or dropped
        if applied:
            scheduler.step(increment=1)
        if reporter and (step % 5 == 0 or sentinel.last_action):
            loss = sum(report["lm loss"].item() for report in reports) / len(reports)
            shown = "-" if norm is None else f"{float(norm):.3f}"
            print(f"step {step:3}  loss {loss:.3f}  norm {shown}  {sentinel.last_action.label}", flush=True)

    if reporter:
        for incident in sentinel.incidents:
            places = "; ".join(
                " ".join(f"{name} {value}" for name, value in place.as_dict().items())
                for place in incident.ranks
            )
            print(f"\nstep {incident.step}: {incident.kind}, {incident.outcome}\n  {places}")
            print(f"  {incident.message}\n  evidence: {sentinel.run_dir / 'incidents' / incident.id}")
            found = incident.diagnosis  # of a fault that came back: --persistent
            if found is not None and found.op is not None:
                print(f"  micro-batch {incident.microbatch}: {found.op} in {found.module}")
    sentinel.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(arguments())
