"""Runs one step of a loop that knows how to compute its loss, and returns what the incident says."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from verdicts import line_of

from gradsentinel import Incident, NanCallback, Sentinel


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def sentinel_for(run_dir: Path) -> Iterator[Callable[..., Sentinel]]:
    """Make a sentinel that can run steps again; closed after the test."""
    made: list[Sentinel] = []

    def make(model: nn.Module, forward: Any, *callbacks: Any, optimizer: Any = None, **more: Any) -> Sentinel:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        callbacks = callbacks or (NanCallback(),)
        made.append(Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, forward=forward, **more))
        return made[-1]

    yield make
    for sentinel in made:
        sentinel.close()


@pytest.fixture
def diagnosed(sentinel_for) -> Callable[..., Incident | None]:
    """Run steps over the batches and return the one incident, or None; two would fail."""

    def run(
        model: nn.Module,
        batches: list[Any],
        forward: Any,
        *,
        after_backward: Callable[[nn.Module], None] | None = None,
        accumulate: int = 1,
        max_norm: float | None = 1.0,
        **more: Any,
    ) -> Incident | None:
        sentinel = sentinel_for(model, forward, **more)
        for batch in sentinel.steps(batches, accumulate=accumulate):
            sentinel.backward(forward(model, batch))
            if after_backward is not None:
                after_backward(model)
            sentinel.step(max_norm=max_norm)
        assert len(sentinel.incidents) <= 1
        return sentinel.incidents[0] if sentinel.incidents else None

    return run


@pytest.fixture
def line() -> Callable[[Any, str], str]:
    """The line of a function that holds a text, as a diagnosis names it."""
    return line_of
