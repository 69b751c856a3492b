"""One process with Megatron for all tests of a worker."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent, HERE.parents[1] / "multiprocess", HERE.parents[2] / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

pytest.register_assert_rewrite("contract")

from server import MegatronServer  # noqa: E402 - found by the path above


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronServer]:
    """Runs jobs on ranks that have Megatron; skipped where that is not installed."""
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    server = MegatronServer(tmp_path_factory.mktemp("megatron"))
    yield server
    server.stop()
