"""A real GPT of megatron-core, small enough for a test, in any parallel layout, on CPUs over gloo."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import cuda_on_cpu

cuda_on_cpu.install()  # before the first import of Megatron

import torch
from context import GatheringAttention, mine
from injection import Injector
from layouts import Fault, Layout
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.transformer import transformer_block
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 64, 16, 32
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # missing without Transformer Engine
for _name in ("TEColumnParallelGroupedLinear", "TEColumnParallelLinear", "TERowParallelLinear"):
    setattr(gpt_layer_specs, _name, getattr(gpt_layer_specs, _name, None))  # likewise, asked for by 0.10
KNOWS_OVERLAP = "overlap_param_gather" in inspect.signature(OptimizerConfig).parameters
"""False up to 0.10: there it is a matter of DistributedDataParallel alone."""


class _SequenceParallelNorm(nn.LayerNorm):
    """The local norm refuses sequence parallelism; all that is needed is the attribute."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def start(layout: Layout, *, seed: int = 7) -> None:
    """Make Megatron's groups and seeds; torch.distributed is initialised."""
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
    }
    if layout.cp > 1:
        sizes["context_parallel_size"] = layout.cp
    if layout.vpp:
        sizes["virtual_pipeline_model_parallel_size"] = layout.vpp
    if layout.experts:
        sizes["expert_tensor_parallel_size"] = 1
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def stop() -> None:
    parallel_state.destroy_model_parallel()


def _config(layout: Layout) -> TransformerConfig:
    dtype = TYPES[layout.precision]
    more: dict[str, Any] = {}
    if layout.vpp:  # what Megatron's arguments enforce
        more.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if layout.recompute:
        more.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if layout.experts:
        more.update(
            num_moe_experts=layout.experts,
            moe_router_topk=2,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            moe_token_dispatcher_type="alltoall",  # noqa: S106 - tokens of text
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
        )
    return TransformerConfig(
        num_layers=layout.layers,
        hidden_size=WIDTH,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        add_bias_linear=not layout.experts,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        virtual_pipeline_model_parallel_size=layout.vpp or None,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=layout.precision == "bf16",
        fp16=layout.precision == "fp16",
        hidden_dropout=layout.dropout,
        attention_dropout=layout.dropout,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        attention_softmax_in_fp32=True,
        deallocate_pipeline_outputs=False,  # gloo may still be reading what is sent
        **more,
    )


def _chunk(layout: Layout, config: TransformerConfig, stage: int | None) -> nn.Module:
    where = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=layout.experts or None)
    if layout.sequence_parallel:
        transformer_block.LayerNormImpl = _SequenceParallelNorm
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            setattr(spec.submodules, name, _SequenceParallelNorm)
    if layout.cp > 1:
        spec.submodules.self_attention.submodules.core_attention = GatheringAttention
    more = {"vp_stage": stage} if "vp_stage" in inspect.signature(GPTModel.__init__).parameters else {}
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=layout.tied,
        **more,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model if layout.precision == "fp32" else Float16Module(config, model)


def _batches(rank: int, microbatch: int = 2) -> Iterator[dict[str, Tensor]]:
    """Arithmetic progressions modulo the vocabulary; other ones on each data-parallel rank."""
    number = 0
    while True:
        generator = torch.Generator().manual_seed(1000 * rank + number)
        begin = torch.randint(0, VOCABULARY, (microbatch, 1), generator=generator)
        tokens = (begin + torch.arange(LENGTH + 1) * 3) % VOCABULARY
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(microbatch, LENGTH),
        }
        number += 1


class Training:
    """Model, optimizer, schedule, data and the loop: what Megatron-LM's training script sets up and does."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        config = _config(layout)
        stages: list[int | None] = list(range(layout.vpp)) if layout.vpp else [None]
        chunks = [_chunk(layout, config, stage) for stage in stages]
        sharded_overlap = layout.overlap and layout.distributed
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=layout.overlap,
            use_distributed_optimizer=layout.distributed,
            overlap_param_gather=sharded_overlap,
            check_for_nan_in_grad=layout.check_for_nan,
            bucket_size=4000 if layout.overlap else None,
        )
        self.model = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        for chunk in self.model:
            chunk.broadcast_params()
        scaling = {"initial_loss_scale": layout.loss_scale, "min_loss_scale": 1.0, "hysteresis": 1}
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=3e-3,
                min_lr=0.0,
                weight_decay=0.0,
                bf16=layout.precision == "bf16",
                fp16=layout.precision == "fp16",
                params_dtype=TYPES[layout.precision],
                use_distributed_optimizer=layout.distributed,
                clip_grad=layout.clip,
                **(scaling if layout.precision == "fp16" else {}),
                **({"overlap_param_gather": True} if sharded_overlap and KNOWS_OVERLAP else {}),
            ),
            self.model,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=3e-3,
            min_lr=0.0,
            lr_warmup_steps=2,
            lr_decay_steps=1000,
            lr_decay_style="cosine",
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=1000,
            wd_incr_style="constant",
        )
        config.finalize_model_grads_func = self._finalize
        config.grad_scale_func = self.optimizer.scale_loss
        if layout.overlap:
            syncs = [chunk.no_sync for chunk in self.model]
            config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        replica = parallel_state.get_data_parallel_rank()
        # Each chunk of an interleaved pipeline reads the same data.
        self.data = [RerunDataIterator(self._read(replica)) for _ in self.model]
        self.forward_backward = get_forward_backward_func()
        self.step = 0
        self.losses: list[float] = []
        self.norms: list[float | None] = []
        self.skipped: list[int] = []
        self.machine: Any = None
        """Megatron's rerun machine, if it is on."""
        self.suspicious: set[int] = set()
        """Steps whose losses the rerun machine is told to distrust."""
        self.reruns = 0
        """How often the schedule was run."""
        self.left_out: set[int] = set()
        """Steps that this loop does not make: what comes of it is what a watched run should be."""
        self.injector: Injector | None = None
        self.after_reduction: Callable[[], None] = lambda: None
        self._mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def inject(self, faults: tuple[Fault, ...], rank: int) -> None:
        self.injector = Injector(self, faults, rank)

    def _read(self, replica: int) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(_batches(replica)):
            if self.injector is not None:
                self.injector.read(batch, number)
            yield batch

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        finalize_model_grads(*args, **kwargs)
        self.after_reduction()
        if self.injector is not None:
            self.injector.begin()

    def forward_step(self, data: Any, model: nn.Module) -> Any:
        batch = next(data)
        positions = torch.arange(LENGTH).unsqueeze(0).expand(batch["tokens"].shape[0], -1)
        causal = self._mask
        if self.layout.cp > 1:  # each context-parallel rank has its part of the sequence, and sees all of it
            batch = {name: mine(values, 1) for name, values in batch.items()}
            positions, causal = mine(positions, 1), mine(causal, 2)
        # A loop may take its batch apart; Megatron's own rerun machine keeps the very same ones.
        labels = batch.pop("labels") if self.machine is None else batch["labels"]
        output = model(batch["tokens"], positions, causal, labels=labels)

        mask = batch["loss_mask"]

        def loss(values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = (values.float() * mask).sum() / mask.sum()
            if self.machine is not None:
                self.machine.validate_result(
                    result=mean,
                    rejection_func=lambda _: self.step in self.suspicious,
                    message="a spike",
                    tolerance=0.0,
                    fatal=False,
                )
            # A fresh one, as in Megatron-LM: 0.10 divides it in place, and the machine keeps what it saw.
            return mean.clone(), {"lm loss": mean.detach().clone()}

        return output, loss

    def train_step(self) -> None:
        """One iteration, in the order of Megatron-LM's own `train_step`."""
        data = self.data if len(self.model) > 1 else self.data[0]
        machine = self.machine
        again = True
        while again if machine is None else machine.should_run_forward_backward(data):
            again = False
            reports = self._compute(data)
        if machine is not None:
            assert machine.should_checkpoint_and_exit() == (False, False, 0)
        left_out = self.step in self.left_out
        successful, norm, _ = (False, None, None) if left_out else self.optimizer.step()
        if successful:
            self.scheduler.step(increment=1)
        else:
            self.skipped.append(self.step)
        if reports:
            self.losses.append(sum(float(report["lm loss"]) for report in reports) / len(reports))
        self.norms.append(None if norm is None else float(norm))
        self.step += 1

    def _compute(self, data: Any) -> Any:
        """Zero gradients, forward and backward."""
        self.reruns += 1
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self.forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=data,
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=self.layout.microbatches,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )

    def start_machine(self, mode: str, suspicious: tuple[int, ...]) -> None:
        """Switch Megatron's rerun machine on."""
        initialize_rerun_state_machine(mode=RerunMode(mode))
        self.machine = get_rerun_state_machine()
        # Its report reads attributes that its own records have lost (0.16.1).
        self.machine._maybe_report_stats = lambda: None
        self.suspicious = set(suspicious)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.train_step()

    # -- what a test compares ----------------------------------------------------------------------

    def parts(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def state(self) -> dict[str, str]:
        """Digests of all that a step changes: weights, what the optimizer holds, scaler and schedule."""
        if self.layout.overlap and self.layout.distributed:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        weights = [p for chunk in self.model for p in chunk.parameters()]
        buffers = [b for chunk in self.model for b in chunk.buffers if isinstance(b, Tensor)]
        held: list[Tensor] = []
        scalers: list[Any] = []
        for part in self.parts():
            if part.optimizer is not None:
                for group in part.optimizer.param_groups:
                    for parameter in group["params"]:
                        state = part.optimizer.state[parameter]
                        held += [parameter, *(torch.as_tensor(state[key]) for key in sorted(state))]
            if getattr(part, "grad_scaler", None) is not None:
                scaler = part.grad_scaler
                scalers.append((float(scaler.scale), scaler._growth_tracker, scaler._hysteresis_tracker))
        rates = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        return {
            "weights": _digest(weights),
            "buffers": _digest(buffers),
            "optimizer": _digest(held),
            "scaler": str(scalers),
            "schedule": str((self.scheduler.num_steps, rates)),
            "random": _digest(
                [torch.get_rng_state(), *tensor_parallel.get_cuda_rng_tracker().get_states().values()]
            ),
        }

    def outcome(self) -> dict[str, Any]:
        return {**self.state(), "losses": self.losses, "norms": self.norms, "reruns": self.reruns}


def _digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
