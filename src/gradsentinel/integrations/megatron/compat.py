"""What this version of Megatron-Core is, and whether this model and optimizer can be watched."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError

logger = logging.getLogger("gradsentinel")

OLDEST = (0, 10)
"""The oldest release of Megatron-Core that is supported."""
NEWEST = (0, 20)
"""The newest one that was tried."""
_FLAG = "--no-check-for-nan-in-loss-and-grad"


def check_version() -> str:
    """Return the version of Megatron-Core; raises ConfigurationError if it is missing or too old.

    One that is newer than what was tried, or that nobody can read ("dev"), is only warned of.
    """
    try:
        core = importlib.import_module("megatron.core")
    except ImportError as error:
        raise ConfigurationError(
            f"Megatron-Core cannot be imported ({error}); install megatron-core {OLDEST[0]}.{OLDEST[1]} or "
            "newer, or put the checkout of Megatron-LM on PYTHONPATH"
        ) from error
    version = str(getattr(core, "__version__", "of unknown version"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])
    if not numbers:
        logger.warning(
            "nobody knows how old megatron-core %s is; it works with %d.%d to %d.%d",
            version,
            *OLDEST,
            *NEWEST,
        )
        return version
    if numbers < OLDEST:
        raise ConfigurationError(
            f"megatron-core {version} is too old: it works with {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]}"
        )
    if numbers > NEWEST:
        logger.warning("megatron-core %s is newer than %d.%d, the newest that was tried", version, *NEWEST)
    return version


def chunks_of(model: Any) -> list[nn.Module]:
    """Return the model's chunks; raises ConfigurationError if they are not under Megatron's own DDP."""
    chunks = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else [model]
    if not chunks:
        raise ConfigurationError("the model is an empty list: give what setup_model_and_optimizer returned")
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise ConfigurationError(f"model holds a {type(chunk).__name__}, which is no torch.nn.Module")
        missing = [name for name in ("ddp_config", "buffers", "bucket_groups") if not hasattr(chunk, name)]
        if missing or not isinstance(chunk.bucket_groups, list):
            raise ConfigurationError(
                f"{type(chunk).__name__} keeps its gradients in no flat buffers that are known here; wrap "
                "the model in megatron.core.distributed.DistributedDataParallel (Megatron's FSDP and torch's "
                "FSDP2 are not supported)"
            )
    return chunks


def bucket_groups(chunk: Any) -> list[Any]:
    """Return what the gradients of a chunk are reduced in, expert-parallel ones last."""
    return [*chunk.bucket_groups, *getattr(chunk, "expert_parallel_bucket_groups", [])]


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers in Megatron's outermost one; raises ConfigurationError for what is none."""
    for name in ("prepare_grads", "step", "zero_grad"):
        if not hasattr(optimizer, name):
            raise ConfigurationError(
                f"{type(optimizer).__name__} is no optimizer of Megatron-Core (it has no {name}): give what "
                "get_megatron_optimizer returned"
            )
    parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    for part in parts:
        config = getattr(part, "config", None)
        if getattr(config, "optimizer_cpu_offload", False):
            raise ConfigurationError("optimizer_cpu_offload is not supported: its state is in two places")
        if getattr(config, "overlap_param_gather_with_optimizer_step", False):
            raise ConfigurationError(
                "overlap_param_gather_with_optimizer_step is not supported: a chunk's new weights are on "
                "their way before it is known what the step comes to"
            )
    return parts


def check_stateful(scheduler: Any, extra: Any) -> None:
    """Raise ConfigurationError for a schedule or a further object whose state nobody can take and set."""
    wanted = ("num_steps", "step"), ("state_dict", "load_state_dict")
    if scheduler is not None and not any(all(hasattr(scheduler, n) for n in names) for names in wanted):
        raise ConfigurationError(
            f"scheduler is a {type(scheduler).__name__}, whose state cannot be taken: give the "
            "OptimizerParamScheduler, or an object with state_dict and load_state_dict"
        )
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigurationError(f"extra is a {type(extra).__name__}: give a dict from name to object")
    for name, entry in (extra or {}).items():
        if not all(hasattr(entry, method) for method in wanted[1]):
            raise ConfigurationError(
                f"extra {name!r} ({type(entry).__name__}) needs state_dict and load_state_dict methods"
            )


def data_iterators_of(given: Any) -> list[Any]:
    """Return Megatron's data iterators; raises ConfigurationError for what cannot be looked into."""
    found: list[Any] = []
    for iterator in given if isinstance(given, (list, tuple)) else [given]:
        if iterator is None or any(iterator is known for known in found):
            continue
        if not hasattr(iterator, "iterable") or not hasattr(iterator, "__dict__"):
            raise ConfigurationError(
                f"data_iterator is a {type(iterator).__name__}, of which nobody can see what it draws: wrap "
                "it in megatron.core.rerun_state_machine.RerunDataIterator and give the loop that one, or "
                "leave it out and call what sentinel.schedule(get_forward_backward_func()) returns"
            )
        found.append(iterator)
    return found


def refuse_callbacks(callbacks: Iterable[Callback], chunks: Sequence[Any]) -> None:
    """Raise ConfigurationError for a callback that could do nothing, or harm, with this model."""
    for callback in callbacks:
        kind = type(callback).__name__
        reason = _REFUSED[kind](chunks) if kind in _REFUSED else None
        if reason is not None:
            raise ConfigurationError(f"{kind} cannot work here: {reason}")


def _against_rescue(chunks: Sequence[Any]) -> str | None:
    if (asked("get_pipeline_model_parallel_world_size", 1) or 1) > 1:
        return (
            "pipeline stages exchange values of one type, so a step cannot be computed in a wider one; leave "
            "it out, or train without pipeline parallelism"
        )
    if any(getattr(chunk.config, "gradient_accumulation_fusion", False) for chunk in chunks):
        return (
            "gradient_accumulation_fusion adds gradients to buffers that wider copies of the weights do not "
            "have; set gradient_accumulation_fusion=False (--no-gradient-accumulation-fusion)"
        )
    return None


def _against_resync(chunks: Sequence[Any]) -> str | None:
    del chunks
    return (
        "what Megatron's optimizers hold of a parameter (float32 copies, shards) is not on every rank that "
        "holds the parameter, so the majority's values are not all there to copy; use Rollback()"
    )


_REFUSED = {"Rescue": _against_rescue, "Resync": _against_resync}


def nan_checks(chunks: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the owner and name of each switch by which Megatron ends the run at a NaN by itself."""
    seen: set[int] = set()
    for chunk in chunks:
        for config in (chunk.ddp_config, *(group.ddp_config for group in bucket_groups(chunk))):
            if id(config) not in seen and getattr(config, "check_for_nan_in_grad", False):
                seen.add(id(config))
                yield config, "check_for_nan_in_grad"
    arguments = training_arguments()
    if getattr(arguments, "check_for_nan_in_loss_and_grad", False):
        yield arguments, "check_for_nan_in_loss_and_grad"


def refuse_nan_checks(chunks: Sequence[Any]) -> None:
    """Raise ConfigurationError if Megatron would end the run before anybody can save it."""
    found = sorted({name for _, name in nan_checks(chunks)})
    if found:
        raise ConfigurationError(
            f"{' and '.join(found)} is on: Megatron would end the run at a NaN, on the rank that has it and "
            f"in the midst of a collective, before a step can be dropped. Start with {_FLAG} (or set "
            "DistributedDataParallelConfig.check_for_nan_in_grad=False), or let it be switched off with "
            "attach(..., allow_nan_check_off=True)"
        )


def training_arguments() -> Any:
    """Return the arguments of Megatron-LM's training script, None where it does not run."""
    module = sys.modules.get("megatron.training.global_vars")
    try:
        return None if module is None else module.get_args()
    except AssertionError:  # not initialised: another script's own loop
        return None


@contextmanager
def unvalidated() -> Iterator[None]:
    """Have Megatron's rerun machine look away, in the block: it insists on being in its own loop.

    A loss function that shows it its result (as the check for spiky losses does) would raise otherwise,
    on one pipeline stage alone, for which the others wait.
    """
    module = sys.modules.get("megatron.core.rerun_state_machine")
    machine = getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)
    if machine is None or "validate_result" in vars(machine):
        yield
        return
    machine.validate_result = lambda *_, **__: None
    try:
        yield
    finally:
        del machine.validate_result


def state() -> Any:
    """Return Megatron-Core's module of parallel groups."""
    return importlib.import_module("megatron.core.parallel_state")


def asked(name: str, default: Any = None, **kwargs: Any) -> Any:
    """Return what a function of `parallel_state` says, or the default where this version has no answer."""
    try:
        return getattr(state(), name)(**kwargs)
    except Exception:  # noqa: BLE001 - versions differ in what they raise for a group that is not there
        return default


def ranks_in(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group; of a list of groups (several pipelines) those of all."""
    groups = group if isinstance(group, list) else [group]
    return tuple(sorted({rank for one in groups for rank in dist.get_process_group_ranks(one)}))
