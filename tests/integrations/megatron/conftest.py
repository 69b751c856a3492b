"""One process with Megatron for all tests of a worker."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent, HERE.parents[1] / "multiprocess", HERE.parents[2] / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

pytest.register_assert_rewrite("contract", "outcomes")

from server import MegatronServer  # noqa: E402 - found by the path above


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronServer]:
    """Runs jobs on ranks that have Megatron; skipped where that is not installed."""
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    server = MegatronServer(tmp_path_factory.mktemp("megatron"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def alone(megatron: MegatronServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return trainings that nobody watches, each run once."""
    known: dict[Any, list[dict[str, Any]]] = {}

    def run(layout: Any, **settings: Any) -> list[dict[str, Any]]:
        key = (layout, tuple(sorted(settings.items())))
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            known[key] = megatron.run("train", layout.world, layout, folder, **settings)
        return known[key]

    return run
