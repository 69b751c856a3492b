"""What people would use instead, each as its own documentation says."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from race import Step, Variant
from torch import Tensor, nn
from workload import adamw, forward, model

SLOW = 3
"""What costs tens of per cent takes part in every third round."""


def plain(max_norm: float | None, *, fused: bool = False) -> Step:
    """The loop that everything is compared with."""
    net = model()
    optimizer = adamw(net, fused=fused)

    def step(x: Tensor, y: Tensor) -> None:
        forward(net, x, y).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def checked(max_norm: float | None, check: Callable[[nn.Module], bool]) -> Step:
    """The plain loop with a check of one's own before the step."""
    net = model()
    optimizer = adamw(net)

    def step(x: Tensor, y: Tensor) -> None:
        forward(net, x, y).backward()
        good = check(net)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        if good:
            optimizer.step()
        optimizer.zero_grad()

    return step


def isnan_loop(net: nn.Module) -> bool:
    """What people write by hand."""
    return not any(
        bool(torch.isnan(p.grad).any()) or bool(torch.isinf(p.grad).any()) for p in net.parameters()
    )


def norms_of_each(net: nn.Module) -> bool:
    """Each parameter's norm as a number for the log, as Composer's OptimizerMonitor has it."""
    norms = {name: torch.linalg.vector_norm(p.grad).item() for name, p in net.named_parameters()}
    return len(norms) > 0


def tensor_hooks(max_norm: float | None) -> Step:
    """A hook on each parameter that raises at the first gradient that is not finite."""
    net = model()
    optimizer = adamw(net)

    def check(gradient: Tensor) -> None:
        if not torch.isfinite(gradient).all():
            raise FloatingPointError

    for parameter in net.parameters():
        parameter.register_hook(check)

    def step(x: Tensor, y: Tensor) -> None:
        forward(net, x, y).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def within(max_norm: float | None, context: Callable[[], contextlib.AbstractContextManager[object]]) -> Step:
    """The plain loop's forward and backward pass in a context."""
    inner = plain(max_norm)

    def step(x: Tensor, y: Tensor) -> None:
        with context():
            inner(x, y)

    return step


def skip_step_rule(max_norm: float | None) -> Step:
    """OLMo's rule: a step is left out if loss or gradient norm is 6 sigma above the last 128 steps' mean.

    As published: over the numbers on the device, from 128 steps on; the step is then skipped there too. Here
    the decision is read, as torch's AdamW has no factor to multiply an update with.
    """
    net = model()
    optimizer = adamw(net)
    losses: deque[Tensor] = deque(maxlen=128)
    norms: deque[Tensor] = deque(maxlen=128)

    def within_bounds(history: deque[Tensor], value: Tensor) -> Tensor:
        deviation, mean = torch.std_mean(torch.stack(tuple(history)))
        return value - mean <= 6 * deviation

    def step(x: Tensor, y: Tensor) -> None:
        loss = forward(net, x, y)
        loss.backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        losses.append(loss.detach())
        norms.append(norm)
        good = True
        if len(losses) >= 2:
            good = bool(within_bounds(losses, losses[-1]) & within_bounds(norms, norms[-1]))
        if good:
            optimizer.step()
        optimizer.zero_grad()

    return step


def debug_underflow_overflow(max_norm: float | None) -> Step:
    """Hooks on all modules that look at weights, inputs and outputs: transformers' own debugging tool."""
    from transformers.debug_utils import DebugUnderflowOverflow  # noqa: PLC0415 - optional

    net = model()
    DebugUnderflowOverflow(net)
    optimizer = adamw(net)

    def step(x: Tensor, y: Tensor) -> None:
        forward(net, x, y).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def spike_detection(max_norm: float | None) -> Step:
    """Lightning Fabric's SpikeDetection, after each step, as its callback is called."""
    from lightning.fabric import Fabric  # noqa: PLC0415 - optional
    from lightning.fabric.utilities.spike import SpikeDetection  # noqa: PLC0415 - optional

    folder = tempfile.mkdtemp()
    fabric = Fabric(accelerator="cpu", devices=1)
    detection = SpikeDetection(exclude_batches_path=str(Path(folder) / "skipped.json"))
    net = model()
    optimizer = adamw(net)
    number = 0

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal number
        loss = forward(net, x, y)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        detection.on_train_batch_end(fabric, loss.detach(), x, number)
        optimizer.zero_grad()
        number += 1

    return step


def peers(max_norm: float | None) -> list[Variant]:
    """Return all that can be had here; the others are named by `missing`."""
    found = [
        Variant("isnan and isinf per parameter", checked(max_norm, isnan_loop)),
        Variant("hook on each parameter", tensor_hooks(max_norm), in_place=False),
        Variant(
            "torch.autograd.detect_anomaly",
            within(max_norm, lambda: torch.autograd.set_detect_anomaly(True)),
            in_place=False,
            every=SLOW,
        ),
        Variant("norm of each parameter, .item()", checked(max_norm, norms_of_each)),
        Variant("OLMo's skip-step rule", skip_step_rule(max_norm)),
    ]
    if has("transformers"):
        step = debug_underflow_overflow(max_norm)
        found.append(Variant("transformers DebugUnderflowOverflow", step, in_place=False, every=SLOW))
    if has("lightning"):
        found.append(Variant("Lightning SpikeDetection", spike_detection(max_norm)))
    return found


def missing() -> list[str]:
    """Return the packages that are not there to be compared with."""
    return [name for name in ("transformers", "lightning") if not has(name)]


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
