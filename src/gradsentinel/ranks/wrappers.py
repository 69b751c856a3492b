"""What DDP and FSDP2 tell of the parameters that they take care of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def find_ddp(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP wrapper in a stack of wrappers, or None."""
    while not isinstance(module, nn.parallel.DistributedDataParallel):
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module


def ddp_ignores(parallel: nn.parallel.DistributedDataParallel, parameter: Tensor) -> bool:
    """Return True if DDP was told to leave a parameter alone, and does.

    It does not where it only delays the reduction, nor with a trained parameter of the outermost module,
    whose name it composes in another way.
    """
    names = getattr(parallel, "parameters_to_ignore", None)
    if not names or any(parameter is entry for entry in getattr(parallel, "_delay_all_reduce_params", ())):
        return False
    for path, module in parallel.module.named_modules():
        for name, entry in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path or entry.requires_grad else name
            if entry is parameter and full not in names:
                return False
    return True


def fsdp_meshes(module: nn.Module) -> Iterator[Any]:
    """Yield the meshes along which `fully_shard` shards and replicates a module's parameters.

    If this torch does not tell, those that the parameters themselves are distributed over, which may have
    more dimensions.
    """
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    told = [getattr(getattr(group, "mesh_info", None), "mesh", None) for group in groups]
    own = (getattr(parameter, "device_mesh", None) for parameter in module.parameters())
    meshes = [mesh for mesh in told if mesh is not None] or [mesh for mesh in own if mesh is not None]
    yield from {id(mesh): mesh for mesh in meshes}.values()
