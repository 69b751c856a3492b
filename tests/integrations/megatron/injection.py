"""Faults for the tiny GPT: one element of one gradient on one rank, before or after the reduction."""

from __future__ import annotations

import functools
from typing import Any

import torch
from layouts import Fault
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BACKWARD = {"LinearWith": "mm", "NativeLayerNorm": "native_layer_norm_backward"}
"""What makes the gradient of a module's input, by the beginning of its autograd function's name."""


class Injector:
    """Puts faults into a training on this rank; counts how often each has struck."""

    def __init__(self, training: Any, faults: tuple[Fault, ...], rank: int) -> None:
        self._training = training
        self.struck = 0
        self._mine = [fault for fault in faults if fault.rank == rank]
        self._done: set[int] = set()
        self._calls: dict[int, int] = {}
        for fault in self._mine:
            if fault.when == "before":
                self._parameter(fault).register_hook(lambda g, fault=fault: self._in_backward(g, fault))
            elif fault.when in {"forward", "overflow"}:
                self._module(fault).register_forward_hook(
                    lambda _m, _i, output, fault=fault: self._in_forward(output, fault)
                )
            elif fault.when == "product":
                self._spoil_products(self._module(fault), fault)
            elif fault.when == "returned":
                self._module(fault).register_forward_hook(
                    lambda _m, _i, output, fault=fault: self._spoil_return(output, fault)
                )
            elif fault.when == "lookup":
                module = self._module(fault)
                module.forward = self._spoil_within(module.forward, fault, "embedding")
            elif fault.when == "loss":
                root = self._root()
                name = "compute_language_model_loss"
                plain = getattr(root, name, None)  # of a stage that makes no loss nobody asks for it
                setattr(root, name, self._spoil_within(plain, fault, fault.parameter))
            elif fault.when == "operator":
                module = self._module(fault)
                module.activation_func = self._wrong(module.activation_func, fault)
        training.after_reduction = self._after_reduction

    def begin(self) -> None:
        """Hear that forward and backward passes begin, for the first time or again."""
        self._calls.clear()

    def _parameter(self, fault: Fault) -> Any:
        for chunk in self._training.model:
            for name, parameter in chunk.module.named_parameters():
                # A reduced gradient counts only where its parameter is stepped.
                if fault.parameter in name and (fault.when == "before" or self._owned(parameter) is not None):
                    return parameter
        raise AssertionError(f"rank {fault.rank} has no parameter like {fault.parameter}")

    def _module(self, fault: Fault) -> Any:
        for chunk in self._training.model:
            for name, module in chunk.module.named_modules():
                if name.endswith(fault.parameter):
                    return module
        raise AssertionError(f"rank {fault.rank} has no module like {fault.parameter}")

    def _strikes(self, fault: Fault, *, counted: bool = True) -> bool:
        key = id(fault)
        call = self._calls.get(key, 0)
        self._calls[key] = call + 1
        if self._training.step != fault.step or (counted and call != fault.microbatch):
            return False
        if key in self._done and not fault.persistent:
            return False
        self._done.add(key)
        self.struck += 1
        return True

    def _in_backward(self, gradient: Tensor, fault: Fault) -> Tensor | None:
        return _spoiled(gradient, fault) if self._strikes(fault) else None

    def _wrong(self, plain: Any, fault: Fault) -> Any:
        def activation(values: Tensor) -> Tensor:
            made: Tensor = plain(values)
            if not self._strikes(fault):
                return made
            # Of 0 the root is fine, and has no derivative.
            return torch.sqrt(made * 0.0 if fault.value == 0.0 else made - 100.0)

        return activation

    def _spoil_products(self, module: Any, fault: Fault) -> None:
        """Put the fault into what a linear layer multiplies; this process ends with the training."""
        from megatron.core.tensor_parallel import layers  # noqa: PLC0415 - only where Megatron is

        name = "linear_with_grad_accumulation_and_async_allreduce"
        plain = getattr(layers, name)

        @functools.wraps(plain)  # it keeps a mark of its own there
        def multiply(*args: Any, **kwargs: Any) -> Tensor:
            made: Tensor = plain(*args, **kwargs)
            weight = kwargs["weight"] if "weight" in kwargs else args[1]
            return _spoiled(made, fault) if weight is module.weight and self._strikes(fault) else made

        setattr(layers, name, multiply)

    def _root(self) -> Any:
        root = self._training.model[-1].module
        return getattr(root, "module", root)

    def _spoil_within(self, plain: Any, fault: Fault, kernel: str) -> Any:
        """Put the fault into what one kernel makes, somewhere within a function."""

        def spoilt(*args: Any, **kwargs: Any) -> Any:
            if not self._strikes(fault):
                return plain(*args, **kwargs)
            with Spoilt(fault, kernel):
                return plain(*args, **kwargs)

        return spoilt

    def _spoil_return(self, output: Any, fault: Fault) -> None:
        # Where activations are computed again, the first time has no backward pass.
        if torch.is_grad_enabled() and self._strikes(fault):
            spoil_return(output, fault)

    def read(self, batch: dict[str, Tensor], number: int) -> None:
        """Spoil a batch as it is read, if that is a fault of it."""
        per_step = self._training.layout.microbatches
        for fault in self._mine:
            if fault.when == "input" and number == fault.step * per_step + fault.microbatch:
                batch[fault.parameter][1, 3] = fault.value
                self.struck += 1
            if fault.when == "empty" and number == fault.step * per_step + fault.microbatch:
                batch[fault.parameter].zero_()
                self.struck += 1

    def _in_forward(self, output: Any, fault: Fault) -> Any:
        if not self._strikes(fault):
            return None
        if fault.when == "overflow":
            scaled = (output[0] if isinstance(output, tuple) else output) * fault.value
            return (scaled, *output[1:]) if isinstance(output, tuple) else scaled
        if isinstance(output, tuple):
            return (_spoiled(output[0], fault), *output[1:])
        return _spoiled(output, fault)

    def _after_reduction(self) -> None:
        for fault in self._mine:
            if fault.when == "after" and self._strikes(fault, counted=False):
                parameter = self._parameter(fault)
                index = self._owned(parameter) or 0
                _spoil(parameter.main_grad.view(-1)[index : index + 1], fault)

    def _owned(self, parameter: Any) -> int | None:
        """An element that this rank's optimizer uses, None if there is none."""
        sharded = [part for part in self._training.parts() if hasattr(part, "_get_model_param_range_map")]
        for part in sharded:
            try:
                start: int = part._get_model_param_range_map(parameter)["param"].start
            except KeyError:
                continue
            return start
        return None if sharded else 0


def spoil_return(output: Any, fault: Fault) -> None:
    """Given a module's output, put the fault into its input's gradient, as the backward pass makes it."""
    node = (output[0] if isinstance(output, tuple) else output).grad_fn
    while not (kernels := [BACKWARD[kind] for kind in BACKWARD if type(node).__name__.startswith(kind)]):
        node = node.next_functions[0][0]
    mode = Spoilt(fault, kernels[0])
    node.register_prehook(lambda _: mode.__enter__() and None)
    node.register_hook(lambda _i, _o: mode.__exit__(None, None, None))


class Spoilt(TorchDispatchMode):
    """One kernel makes something else in the block, the first time that it is called."""

    def __init__(self, fault: Fault, kernel: str) -> None:
        super().__init__()
        self._fault, self._kernel = fault, kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, tuple) else made
        if func.overloadpacket.__name__ == self._kernel and first.is_floating_point():
            self._kernel = ""
            part = first[..., -1] if first.dim() > 1 else first  # of the vocabulary one may be another rank's
            part.fill_(self._fault.value)
        return made


def _spoiled(values: Tensor, fault: Fault) -> Tensor:
    spoiled = values.clone()
    index = 5 % spoiled.numel()
    _spoil(spoiled.view(-1)[index : index + 1], fault)
    return spoiled


@torch.no_grad()
def _spoil(element: Tensor, fault: Fault) -> None:
    """Change one element, given as a view of one."""
    if fault.bit is None:
        element.fill_(fault.value)
        return
    words = {2: torch.int16, 4: torch.int32}[element.element_size()]
    bits = element.view(words)
    width = 8 * element.element_size()
    flipped = (int(bits) ^ (1 << fault.bit)) % (1 << width)
    bits.fill_(flipped - (1 << width) if flipped >= 1 << (width - 1) else flipped)
