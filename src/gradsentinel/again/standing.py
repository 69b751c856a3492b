"""What the loop has made of the step in flight, to be put back after it was computed again."""

from __future__ import annotations

import torch

from gradsentinel.again.recompute import close_marks, marks_of
from gradsentinel.run import Run


class Standing:
    """Gradients, buffers and numbers of the step as the loop has made them.

    The gradients are held by reference: a computation from the start makes new ones. Where it writes into
    the same memory, as with gradients in the buckets of DDP, they are only back if it came to the same.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._marks = marks_of(run)
        self._gradients = [(p, p.grad) for _, p in run.host.named_parameters() if p.grad is not None]
        self._buffers = {name: buffer.detach().clone() for name, buffer in run.scene.buffers.named()}
        self._numbers = run.last_loss, run.last_grad_norm

    @property
    def marks(self) -> dict[str, tuple[float, float]]:
        """Norm and largest magnitude of each gradient, by parameter."""
        return dict(self._marks)

    @torch.no_grad()
    def put_back(self) -> bool:
        """Put everything back, and return True if the gradients are those of the loop on this rank."""
        run = self._run
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        # Only what differs is written: a buffer may lie in memory that cannot be.
        moved = {
            name: self._buffers[name]
            for name, buffer in run.scene.buffers.named()
            if name in self._buffers and not torch.equal(buffer, self._buffers[name])
        }
        if moved:
            run.scene.buffers.put(moved)
        run.last_loss, run.last_grad_norm = self._numbers
        return close_marks(self._marks, marks_of(run))
