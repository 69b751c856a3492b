"""The largest values that pass through a model in a step: hooks while they are needed, nothing otherwise."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel.again.model_calls import OwnHooks
from gradsentinel.run import Run
from gradsentinel.state.tree import tensors_in

logger = logging.getLogger("gradsentinel")

ACTIVATION, GRADIENT, LOGITS, PRODUCT = "activation", "gradient", "logits", "product"
"""What is measured: outputs of modules, their gradients, what a softmax is given, products batch by batch."""
_HALF = (torch.float16, torch.bfloat16)
_SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}
_PRODUCTS = {"bmm", "baddbmm"}


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model where something is measured."""

    name: str
    """The module's full name, '' for the model itself."""
    what: str
    dtype: torch.dtype
    """The narrowest type that the values pass through there."""

    @property
    def limit(self) -> float:
        """The largest finite value."""
        return torch.finfo(self.dtype).max

    def __str__(self) -> str:
        return f"{self.what} of {self.name or 'the model'}"


@dataclass(slots=True)
class Measured:
    """Smallest and largest value of each site in each call, on the device."""

    sites: list[Site] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)
    high: list[Tensor] = field(default_factory=list)

    def add(self, site: Site, low: Tensor, high: Tensor) -> None:
        """Take one pair of 0-dim tensors in."""
        self.sites.append(site)
        self.low.append(low)
        self.high.append(high)

    @torch.no_grad()
    def at_the_end(self, what: str, dtype: torch.dtype, *, below: bool) -> tuple[list[Site], Tensor] | None:
        """Return the sites of a kind and dtype, and which of them reach the largest number; no wait.

        `below` asks for the lowest one too. None if there is no such site.
        """
        chosen = [i for i, site in enumerate(self.sites) if site.what == what and site.dtype is dtype]
        if not chosen:
            return None
        device = self.high[chosen[0]].device
        limit = torch.finfo(dtype).max
        flags = torch.stack([self.high[i].to(device) for i in chosen]) == limit
        if below:
            flags |= torch.stack([self.low[i].to(device) for i in chosen]) == -limit
        return [self.sites[i] for i in chosen], flags

    @torch.no_grad()
    def stacked(self, device: torch.device) -> tuple[list[Site], Tensor]:
        """Return the sites and their pairs as [number, 2] float32 on a device; no wait.

        One launch per dtype, device and column; a value beyond float32 becomes infinite.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, value in enumerate(self.high):
            groups.setdefault((value.device, value.dtype), []).append(index)
        sites: list[Site] = []
        parts: list[Tensor] = []
        for indices in groups.values():
            sites += [self.sites[index] for index in indices]
            pair = [torch.stack([column[index] for index in indices]) for column in (self.low, self.high)]
            part = torch.stack(pair, 1).to(torch.float32)
            parts.append(part.to(device, non_blocking=True))
        return sites, torch.cat(parts) if parts else torch.zeros(0, 2, device=device)


class Peaks:
    """Notes the smallest and largest value at many places of a model while it is attached.

    Measures outputs of modules and the gradients of those; with `operators` also, within the modules, what
    a softmax is given and what is multiplied batch by batch (attention scores). Everything stays on the
    device, nothing is changed, and an exception never reaches the program: it is kept in `failure`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._handles: list[Any] = []
        self._measured = Measured()
        self._last: Any = None
        """The output that was measured last, weakly: a container often returns its last child's."""
        self._autocast: list[tuple[str, torch.dtype | None]] = []
        """Modules that are running, and the narrow type that autocast computes in there."""
        self._looker: _Operators | None = None
        self._told = False
        self.failure: Exception | None = None

    @property
    def attached(self) -> bool:
        """True while hooks are on the modules."""
        return bool(self._handles)

    def attach(self, *, operators: bool) -> None:
        """Put hooks on all modules; call `detach` when the step is over.

        Not where torch.compile is at work: compiled code would be compiled again for the hooks, and
        compute other bits.
        """
        self.detach()
        if anything_compiled():
            if not self._told:
                logger.warning("torch.compile is in use: the values within the model are not measured")
            self._told = True
            return
        for name, module in self._modules():
            if operators:
                self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(
                module.register_forward_hook(self._leaving(name, inside=operators), always_call=True)
            )
        self._looker = _Operators(self) if operators else None

    def detach(self) -> None:
        """Take every hook off again; what was measured stays to be taken."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._autocast.clear()
        if self._looker is not None:
            self._looker.leave(entirely=True)
            self._looker = None

    def take(self) -> Measured:
        """Return what was measured since the last call."""
        measured, self._measured = self._measured, Measured()
        self._last = None
        return measured

    # -- in the model's forward and backward pass -----------------------------------------------------

    def measure(self, site: Site, tensor: Tensor) -> None:
        """Note the range of a tensor; two numbers, one launch."""
        values = tensor.detach()
        if values.dtype.itemsize == 1:
            values = values.to(torch.float32)
        low, high = torch.aminmax(values)
        self._measured.add(site, low, high)

    def here(self) -> tuple[str, torch.dtype | None]:
        """Return the module that is running, and the type that autocast uses there."""
        return self._autocast[-1] if self._autocast else ("", None)

    def guarded(self, action: Callable[[], None]) -> None:
        """Do something on the model's own path; whatever goes wrong stops the measuring, not the model."""
        if self.failure is not None:
            return
        try:
            with torch.no_grad():
                action()
        except Exception as error:  # noqa: BLE001 - the model must not fail because somebody watches it
            self.failure = error

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_module: nn.Module, _args: Any) -> None:
            looker = self._looker
            if looker is None:
                return
            self._autocast.append((name, _autocast_dtype(self._run.host.device.type)))
            if len(self._autocast) == 1:
                looker.enter()

        return enter

    def _leaving(self, name: str, *, inside: bool) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if inside and self._autocast:
                self._autocast.pop()
                if not self._autocast and self._looker is not None:
                    self._looker.leave()
            if output is not None and torch.is_grad_enabled():  # not while somebody evaluates
                self.guarded(lambda: self._note_output(name, output))

        return leave

    def _note_output(self, name: str, output: Any) -> None:
        for path, tensor in tensors_in(output):
            if not is_plain(tensor) or (self._last is not None and self._last() is tensor):
                continue
            self._last = weakref.ref(tensor)
            place = f"{name}:{path}" if path else name
            self.measure(Site(place, ACTIVATION, tensor.dtype), tensor)
            if tensor.requires_grad:
                site = Site(place, GRADIENT, tensor.dtype)
                tensor.register_hook(lambda gradient, site=site: self._note_gradient(site, gradient))  # type: ignore[no-untyped-call]
                OwnHooks.registered += 1

    def _note_gradient(self, site: Site, gradient: Tensor) -> None:
        if self.attached and is_plain(gradient):
            self.guarded(lambda: self.measure(site, gradient))

    def _modules(self) -> list[tuple[str, nn.Module]]:
        seen: dict[int, tuple[str, nn.Module]] = {}
        for prefix, root in self._run.host.modules():
            for path, module in root.named_modules():
                seen.setdefault(id(module), (".".join(part for part in (prefix, path) if part), module))
        return list(seen.values())


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the operators of attention while the model's forward pass runs."""

    def __init__(self, peaks: Peaks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._peaks = peaks
        self._depth = 0

    def enter(self) -> None:
        """Begin to look."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1

    def leave(self, *, entirely: bool = False) -> None:
        """Stop looking."""
        while self._depth:
            self._depth -= 1
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if not entirely:
                return

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and look at what it was given or what it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _SOFTMAX or name in _PRODUCTS or name.startswith("_scaled_dot_product"):
            self._peaks.guarded(lambda: self._note(name, args, kwargs, result))
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        module, narrow = self._peaks.here()
        if name in _PRODUCTS:
            if is_plain(result):
                self._peaks.measure(Site(module, PRODUCT, result.dtype), result)
            return
        given = args[0]
        if not is_plain(given):
            return
        dtype = narrow if narrow is not None and given.dtype is torch.float32 else given.dtype
        site = Site(module, LOGITS, dtype)
        if name in _SOFTMAX:
            self._peaks.measure(site, given)
        elif is_plain(args[1]):
            self._peaks.measure(site, _largest_logit(given, args[1], kwargs.get("scale")))


def _largest_logit(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """A bound on the scores of fused attention, which never exist: longest query times longest key."""
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (query, key)]
    bound: Tensor = norms[0] * norms[1] * (query.shape[-1] ** -0.5 if scale is None else scale)
    return bound.reshape(1)


def is_plain(value: Any) -> bool:
    """Return True for a floating-point tensor whose smallest and largest value torch can give."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter)
        and value.is_floating_point()
        and value.layout is torch.strided
        and value.device.type != "meta"
        and not value.is_nested
        and value.numel() > 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def anything_compiled() -> bool:
    """Return True if this process has given any function or module to torch.compile."""
    wrapped = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    compiled = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
    return bool(compiled) or any(backend is not None for backend in wrapped.values())


def _autocast_dtype(device: str) -> torch.dtype | None:
    if not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    return dtype if dtype in _HALF else None
