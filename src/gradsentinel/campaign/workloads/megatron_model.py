"""The model and the optimizer of the Megatron runs."""

from __future__ import annotations

from typing import Any

import torch


def make(vocabulary: int, length: int, width: int, tensor: int, *, check: bool) -> tuple[Any, Any]:
    """Return the list of chunks and the optimizer; `check` switches Megatron's own check for NaN on."""
    from megatron.core import tensor_parallel  # noqa: PLC0415 - optional
    from megatron.core.distributed import (  # noqa: PLC0415 - likewise
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415 - likewise
    from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: PLC0415 - likewise
        get_gpt_layer_local_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415 - likewise
    from megatron.core.transformer.transformer_config import (  # noqa: PLC0415 - likewise
        TransformerConfig,
    )

    config = TransformerConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=-(-vocabulary // 16) * 16,
        max_sequence_length=length,
        share_embeddings_and_output_weights=True,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False, check_for_nan_in_grad=check)
    chunk = DistributedDataParallel(config, ddp, model)
    chunk.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        min_lr=3e-3,
        weight_decay=0.0,
        params_dtype=torch.float32,
        use_distributed_optimizer=False,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(settings, [chunk])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return [chunk], optimizer
