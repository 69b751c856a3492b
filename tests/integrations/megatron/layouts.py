"""How the tiny GPT is spread over ranks, and what goes wrong in it; plain data, without Megatron."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["LAYOUTS", "Fault", "Layout", "replace"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is spread over the ranks, and in which precision it is trained."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 0
    cp: int = 1
    ep: int = 1
    experts: int = 0
    sequence_parallel: bool = False
    distributed: bool = False
    """The optimizer's state is spread over the data-parallel ranks."""
    overlap: bool = False
    precision: str = "fp32"
    recompute: bool = False
    """Each layer's activations are computed again in the backward pass."""
    tied: bool = True
    layers: int = 4
    dropout: float = 0.1
    microbatches: int = 2
    clip: float = 1.0
    check_for_nan: bool = False
    loss_scale: float = 2.0**12


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One element goes bad on one rank in one step."""

    rank: int
    step: int = 2
    parameter: str
    """Part of its name on that rank; of a module for `forward`."""
    when: str = "before"
    """before: in the gradient of a micro-batch; after: in the reduced gradient; forward: in the output of the
    module whose name ends with that; product: in what such a linear layer multiplies, before the ranks add it
    up; returned: in the gradient of such a module's input, as it is made; lookup: in what such an embedding
    finds in its part of the vocabulary; loss: in what a kernel of that name makes within the loss; operator:
    the activation function of such an MLP takes a root, of zeros if `value` is 0, else of negative numbers;
    overflow: the output of such a module is scaled by `value`; input: in the batch, what is read."""
    value: float = float("nan")
    bit: int | None = None
    """Flip this bit of the element instead of giving it the value; 0 is the lowest of the mantissa."""
    persistent: bool = False
    """It comes back when the step is computed again."""
    microbatch: int = 1


LAYOUTS = {
    "tp2dp2": Layout(world=4, tp=2, precision="bf16", distributed=True),
    "pp2": Layout(world=2, pp=2),
    "tp2pp2dp2": Layout(world=8, tp=2, pp=2, precision="bf16", distributed=True),
    "dp2-overlap": Layout(world=2, precision="bf16", distributed=True, overlap=True),
    "dp2-overlap-plain": Layout(world=2, precision="bf16", overlap=True),
    "tp2-fp16": Layout(world=2, tp=2, precision="fp16"),
    "dp2-fp16-distributed": Layout(world=2, precision="fp16", distributed=True),
    "tp2-sequence": Layout(world=2, tp=2, sequence_parallel=True, precision="bf16"),
    "tp2-recompute": Layout(world=2, tp=2, recompute=True, precision="bf16"),
    "ep2": Layout(world=2, ep=2, experts=4, precision="bf16", distributed=True),
    "pp2vpp2": Layout(world=2, pp=2, vpp=2, precision="bf16"),
    "cp2dp2": Layout(world=4, cp=2, precision="bf16", distributed=True),
    "tp2cp2": Layout(world=4, tp=2, cp=2, precision="bf16"),
    "dp3": Layout(world=3, precision="bf16", layers=2),
    "dp2-distributed": Layout(world=2, precision="bf16", distributed=True, layers=2),
    "one": Layout(precision="bf16"),
}
