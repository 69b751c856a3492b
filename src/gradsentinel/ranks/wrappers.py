"""The modules that a loop gives, what is wrapped around them, and what DDP and FSDP2 tell of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gradsentinel.errors import ConfigurationError


def named_roots(model: Any) -> list[tuple[str, nn.Module]]:
    """Return one module, several, or those of a mapping, with name prefixes; raises ConfigurationError."""
    if isinstance(model, nn.Module):
        named = [("", model)]
    elif isinstance(model, Mapping):
        named = [(str(name), module) for name, module in model.items()]
    elif isinstance(model, Iterable):
        modules = list(model)
        named = [("" if len(modules) == 1 else str(index), module) for index, module in enumerate(modules)]
    else:
        named = [("", model)]
    for _, module in named:
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"{type(module).__name__} is not a torch.nn.Module")
    return named


def unwrapped(module: nn.Module) -> nn.Module:
    """Look through torch.compile and DDP, so that names are those of the user's own model."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


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
