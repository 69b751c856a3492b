"""The names that parameters have in the whole model, and where each one lies in flat buffers and shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron.compat import asked, bucket_groups

_EXPERTS = re.compile(r"(.*\bexperts\.linear_fc\d+\.(?:weight|bias))(\d+)")
"""Grouped experts have one weight each, numbered from 0 on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """What the optimizer steps: a parameter itself, its float32 copy, or this rank's shard of one."""

    tensor: Tensor
    model: Tensor
    """The parameter of the model."""
    start: int
    """Where in the flattened parameter it begins."""


class ParameterNames:
    """Names with the real numbers of layers and experts, the same on every rank that holds a copy or part.

    A pipeline stage counts its layers from 0, an expert-parallel rank its experts; in the names they have
    the numbers of the whole model.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.order: list[tuple[str, Tensor]] = []
        self._renamed: list[_Renamed] = []
        self._names: dict[int, str] = {}
        self._chunk: dict[int, int] = {}
        taken: set[str] = set()
        for number, chunk in enumerate(chunks):
            renamed = _Renamed(chunk.module)
            self._renamed.append(renamed)
            for local, parameter in chunk.module.named_parameters():
                name = renamed(local)
                if name in taken:
                    name = f"chunk{number}.{name}"
                taken.add(name)
                self._names[id(parameter)] = name
                self._chunk[id(parameter)] = number
                self.order.append((name, parameter))
        self._places = {id(p): place for chunk in chunks for p, place in _places(chunk)}

    def refuse_strangers(self, stepped: Iterable[Inner]) -> None:
        """Raise ConfigurationError if a parameter that an optimizer steps is none of the model's."""
        strange = [one.model for one in stepped if id(one.model) not in self._names]
        if strange:
            shapes = ", ".join(dict.fromkeys(str(tuple(one.shape)) for one in strange[:4]))
            raise ConfigurationError(
                f"the optimizer steps {len(strange)} parameter(s) that the model does not have (of the shape "
                f"{shapes}): give the whole list of model chunks, and the optimizer that "
                "get_megatron_optimizer made of it"
            )

    def of(self, parameter: Tensor) -> str:
        """Return a model parameter's name; raises KeyError for a stranger."""
        return self._names[id(parameter)]

    def module(self, path: str, chunk: int) -> str:
        """Return what a module is called in the whole model; its path is that in the unwrapped chunk."""
        return self._renamed[chunk](f"{self._renamed[chunk].wrapped}{path}")

    def describe(self, parameter: Tensor) -> dict[str, Any]:
        """Return where the parameter lies: model chunk, bucket group and bucket, elements of its buffer."""
        return {"chunk": self._chunk[id(parameter)], **self._places.get(id(parameter), {})}


class _Renamed:
    """Turns a chunk's own names into those of the whole model."""

    def __init__(self, root: nn.Module) -> None:
        self._numbers: list[tuple[list[str], int]] = []
        self._first_expert: list[tuple[str, int]] = []
        self.wrapped = "module." * _depth(root)
        """What the wrappers around the model put before its own names."""
        place = asked("get_expert_model_parallel_rank", 0) or 0
        for path, module in root.named_modules():
            layer = getattr(module, "layer_number", None)
            if isinstance(layer, int) and re.search(r"(^|\.)layers\.\d+$", path):
                self._numbers.append((path.split("."), layer - 1))
            experts = getattr(module, "local_experts", None)
            if isinstance(experts, nn.ModuleList):
                inside = f"{path}.local_experts".lstrip(".").split(".")
                count = len(experts)
                self._numbers += [([*inside, str(i)], place * count + i) for i in range(count)]
            grouped = getattr(module, "num_gemms", None)
            if isinstance(grouped, int):
                self._first_expert.append((f"{path}.", place * grouped))

    def __call__(self, local: str) -> str:
        parts = local.split(".")
        renamed = list(parts)
        for inside, number in self._numbers:
            if parts[: len(inside)] == inside:
                renamed[len(inside) - 1] = str(number)
        name = ".".join(renamed)
        match = _EXPERTS.fullmatch(name)
        first = next((n for path, n in self._first_expert if local.startswith(path)), 0)
        if match is not None:
            name = f"{match[1]}{int(match[2]) + first}"
        return re.sub(r"^(?:module\.)+", "", name)


def _depth(root: nn.Module) -> int:
    return 1 + _depth(root.module) if type(root).__name__ == "Float16Module" else 0  # type: ignore[arg-type]


def _places(chunk: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    buffers = [*chunk.buffers, *getattr(chunk, "expert_parallel_buffers", [])]
    groups = {id(bucket): n for n, group in enumerate(bucket_groups(chunk)) for bucket in group.buckets}
    for number, buffer in enumerate(buffers):
        for parameter, (start, end, bucket) in buffer.param_index_map.items():
            yield (
                parameter,
                {
                    "buffer": number,
                    "bucket": bucket,
                    "bucket_group": groups.get(id(buffer.buckets[bucket])),
                    "start": start,
                    "end": end,
                },
            )


def in_bucket(group: Any, names: ParameterNames) -> list[tuple[str, Tensor]]:
    """Return the gradients of a bucket group by name: views into its flat buffers, in their order there."""
    found = []
    for bucket in group.buckets:
        parameters = getattr(bucket, "params_list", None) or list(bucket.params)
        # The views know their places; `bucket.param_to_index` leaves out the distributed optimizer's padding.
        ordered = sorted(parameters, key=lambda p: p.main_grad.storage_offset())
        found += [(names.of(p), p.main_grad) for p in ordered]
    return found


def inner_parameters(part: Any) -> Iterator[Inner]:
    """Yield what one of Megatron's optimizers steps, in the order of its parameter groups."""
    known = {id(inner.tensor): inner for inner in _pairs(part)}
    inner_optimizer = getattr(part, "optimizer", None)
    for group in inner_optimizer.param_groups if inner_optimizer is not None else ():
        for tensor in group["params"]:
            yield known.get(id(tensor)) or Inner(tensor=tensor, model=tensor, start=0)


def is_sharded(part: Any) -> bool:
    """Return True for a distributed optimizer: each data-parallel rank steps a part of the parameters."""
    return hasattr(part, "_get_model_param_range_map")


def _pairs(part: Any) -> Iterator[Inner]:
    sharded = is_sharded(part)
    kinds = (
        (
            ("model_float16_groups", "shard_fp32_from_float16_groups"),
            ("model_float16_groups", "shard_float16_groups"),
            ("model_fp32_groups", "shard_fp32_groups"),
        )
        if sharded
        else (("float16_groups", "fp32_from_float16_groups"),)
    )
    for ours, theirs in kinds:
        for models, tensors in zip(getattr(part, ours, ()), getattr(part, theirs, ()), strict=False):
            for model, tensor in zip(models, tensors, strict=False):
                if tensor is not None:
                    start = part._get_model_param_range_map(model)["param"].start if sharded else 0
                    yield Inner(tensor=tensor, model=model, start=start)


def final_gradient(tensor: Tensor) -> Tensor | None:
    """Return the gradient that the optimizer is about to use."""
    decoupled = getattr(tensor, "decoupled_grad", None)
    return tensor.grad if decoupled is None else decoupled
