"""Gradients of a rank of Megatron: its own before the reduction, and the final ones of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradsentinel.evidence import TensorEvidence
from gradsentinel.gradients import GradientView
from gradsentinel.ranks.blame import LocalGradients

_LAST = 2**20 - 1
"""Number of the last exchange of a forward pass: the output of the stage."""
_BACKWARD = 2**62
"""Forward passes come before backward passes, in which the last stage is the first."""
_WHOLE = 2**63
"""A stage whose gradients are bad, and which was not seen to hand on anything that is."""


class BucketGradients(LocalGradients):
    """How large this rank's own gradients are when their bucket is about to be reduced.

    The buckets hold the sum over the micro-batches, so which of those it was is not known. For a model that
    is spread over ranks it also keeps the size of what they exchange in forward and backward pass, within a
    layer and from stage to stage; each exchange has a number that tells which of two was the first.
    """

    def __init__(self, *, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.hooked = True
        self._stage = stage
        self._stages = stages
        self._flat: list[Tensor] = []
        self._names: list[Sequence[str]] = []
        """Of each entry of `_flat` the parameters; put together with them when somebody wants to know."""
        self._numbers: list[int] = []
        self._wrapped = False

    def watch_names(self, names: Sequence[str]) -> None:
        """Know which gradients are looked at before they are reduced."""
        self._watched.update(names)
        self._wrapped = True

    @property
    def watching(self) -> bool:
        """True as long as the buckets are looked at."""
        return self._wrapped

    def record(self, view: GradientView) -> None:
        """Take note of the gradients of a bucket group; one fused pass, no wait.

        One number for the whole flat buffer would not do: the reduction overwrites it before anybody can ask
        which parameter it was.
        """
        if self._suspended or not len(view):
            return
        self._flat.append(view.magnitudes)
        self._names.append(view.names)

    def keep_handle(self, handle: Any) -> None:
        """Keep the handle of a hook on a module, to be taken off in the end."""
        self._handles.append(handle)

    def record_exchange(self, what: str, value: Tensor, microbatch: int, chunk: int, count: int) -> None:
        """Take note of what a module is about to exchange with other ranks; one launch, no wait."""
        number = self._number(microbatch, chunk, min(count, _LAST - 1))
        self._hand(f"{what}, in micro-batch {microbatch},", value, number)

    def record_return(self, what: str, value: Tensor, microbatch: int, chunk: int, count: int) -> None:
        """Take note of what is about to be exchanged in a backward pass; one launch, no wait."""
        place = _LAST - (chunk * self._stages + self._stage)
        number = _BACKWARD + (microbatch << 40) + (place << 20) + min(count, _LAST)
        self._hand(f"{what}, in micro-batch {microbatch},", value, number)

    def record_output(self, output: Tensor, microbatch: int, chunk: int) -> None:
        """Take note of what a micro-batch leaves this stage as; one launch, no wait."""
        where = f"the output of {self.stage(chunk)}"
        number = self._number(microbatch, chunk, _LAST)
        self._hand(f"{where}, in micro-batch {microbatch},", output.detach(), number)

    def stage(self, chunk: int) -> str:
        """Return in words where a chunk of the model is in the pipeline."""
        return f"pipeline stage {self._stage}" + (f", chunk {chunk}" if chunk else "")

    def _number(self, microbatch: int, chunk: int, count: int) -> int:
        return (microbatch << 40) + ((chunk * self._stages + self._stage) << 20) + count

    def _hand(self, what: str, value: Tensor, number: int) -> None:
        self._handed_over(what, value)
        if len(self.seen.handed) > len(self._numbers):
            self._numbers.append(number)

    def peaks(self) -> list[Tensor]:
        """Return what was recorded of gradients in this step: 1-dim tensors."""
        return self._flat

    def begin_step(self) -> None:
        """Forget the last step."""
        super().begin_step()
        self._flat, self._names, self._numbers = [], [], []

    def end_microbatch(self) -> None:
        """Do nothing: the buckets are looked at once, when all micro-batches are in them."""

    def norm(self) -> Tensor | None:
        """Return the 2-norm of what was recorded, 0-dim float32, or None; no wait."""
        self._resolve()
        return super().norm()

    def _resolve(self) -> None:
        """Give each number its parameter's name."""
        for names, peaks in zip(self._names, self._flat, strict=True):
            self.seen.norms[-1].update(zip(names, peaks.unbind(), strict=True))

    def bad_places(self) -> tuple[int | None, tuple[str, ...]]:
        """Return which of this rank's own gradients were not finite; of which micro-batch nobody knows."""
        self._resolve()
        return None, super().bad_places()[1]

    def first_bad_handover(self) -> tuple[int, str] | None:
        """Return the first bad value handed to other ranks, numbered so that ranks can be compared."""
        found = super().first_bad_handover()
        if found is not None:
            return self._numbers[found[0]], found[1]
        if self._stages > 1 and self.bad_places()[1]:
            number = _WHOLE + self._stages - 1 - self._stage
            return number, f"the gradient in pipeline stage {self._stage}"
        return None

    def detach(self) -> None:
        """Stop looking."""
        super().detach()
        self._wrapped = False


class FinalGradients(GradientView):
    """What the optimizer is about to use on this rank, and, in the norm, what its own gradients were.

    `norms` are those of this rank's parameters or shards. `total_norm` is the norm of the whole model, on
    every rank: parameters that several ranks hold count once, but one that is not finite anywhere, be it a
    copy that does not count or a gradient before the reduction, makes it so.

    Args:
        gradients: by name.
        shares: how much the square of each one's norm counts, 1-dim; the sum over all ranks is the whole.
        local: what was measured before the reduction.
        total: adds up over all ranks; called on every rank, once.
        starts: where in the flattened parameter each one begins, and that parameter's shape.
        sharded: of which parameters other data-parallel ranks hold the rest.
    """

    def __init__(
        self,
        gradients: Sequence[tuple[str, Tensor]],
        *,
        shares: Tensor,
        local: Sequence[Tensor],
        total: Callable[[Tensor], Tensor],
        starts: Sequence[tuple[int, torch.Size]],
        sharded: Collection[str] = (),
    ) -> None:
        super().__init__(gradients)
        self._sharded = sharded
        self._shares = shares
        self._local = local
        self._add_up = total
        self._starts = starts

    @cached_property
    def total_norm(self) -> Tensor:
        """The norm of the whole model, 0-dim; every rank is to ask for it, as they add it up together."""
        return self._total()

    @torch.no_grad()
    def _total(self, alarm: Tensor | None = None) -> Tensor:
        del alarm
        device = self._shares.device
        squares = torch.zeros(1, device=device)
        if len(self):
            norms = self.norms.to(device, torch.float32)
            squares += (norms.square() * self._shares).sum()  # 0 times what is not finite is NaN
        if self._local:
            squares += torch.cat([peaks.to(device, torch.float32) for peaks in self._local]).sum() * 0.0
        return self._add_up(squares).sqrt().squeeze()

    @property
    def replicated(self) -> tuple[str, ...]:
        """Names of those that are not an optimizer's shards."""
        return tuple(name for name in self.names if name not in self._sharded)

    def inspect(self) -> tuple[TensorEvidence, ...]:
        """Return every gradient's evidence; of a shard with the place in the whole parameter."""
        found = super().inspect()
        return tuple(
            _placed(entry, start, shape) for entry, (start, shape) in zip(found, self._starts, strict=True)
        )


def _placed(entry: TensorEvidence, start: int, shape: torch.Size) -> TensorEvidence:
    index = entry.first_index
    if index is None or len(index) != 1 or (len(shape) == 1 and not start):
        return entry
    place = torch.unravel_index(torch.tensor(index[0] + start), shape)
    return TensorEvidence(
        name=entry.name,
        nonfinite=entry.nonfinite,
        numel=entry.numel,
        norm=entry.norm,
        first_index=tuple(map(int, place)),
    )
