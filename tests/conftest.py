"""What every test gets: fixed seeds, one torch thread, and a failure for each exception the bus swallowed."""

import random
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from gradsentinel import testing
from gradsentinel.callbacks.peaks import anything_compiled

torch.set_num_threads(1)  # the test workers share the cores

# A deadline would make the outcome depend on how busy the machine is.
settings.register_profile("gradsentinel", deadline=None)
settings.load_profile("gradsentinel")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the code under test saves and restores this global generator
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_swallowed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test during which the bus caught an exception, unless it is marked `expects_swallowed`."""
    testing.clear_swallowed()
    yield
    swallowed = testing.swallowed()
    testing.clear_swallowed()
    if swallowed and request.node.get_closest_marker("expects_swallowed") is None:
        traces = "\n".join("".join(traceback.format_exception(error)) for error in swallowed)
        pytest.fail(f"the bus swallowed {len(swallowed)} exception(s):\n{traces}", pytrace=False)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    """Have each test begin in a process that has compiled nothing: where something was, less is watched."""
    yield
    if anything_compiled():
        torch._dynamo.reset()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory that does not exist yet, as at the start of a run."""
    return tmp_path / "run"
