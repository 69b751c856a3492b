"""Megatron-Core: one line in a training script, or a launcher for scripts that stay as they are.

`megatron.attach(model, optimizer, scheduler=opt_param_scheduler)`, or
`torchrun ... -m gradsentinel.integrations.megatron pretrain_gpt.py ...`.
"""

from gradsentinel.integrations.megatron.attach import attach
from gradsentinel.integrations.megatron.sentinel import MegatronSentinel

__all__ = ["MegatronSentinel", "attach"]
