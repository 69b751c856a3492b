"""Builds the simulated NPU once, or says why it cannot be built here."""

import pytest
import simulator
from on_npu import run_on_npu


@pytest.fixture(scope="session", autouse=True)
def _built():
    reason = simulator.compiler_is_missing()
    if reason is not None:
        pytest.skip(reason)
    run_on_npu(int, timeout=300.0)


def pytest_collection_modifyitems(items):
    for item in items:
        if "simnpu" in item.path.parts:
            item.add_marker(pytest.mark.simnpu)
            item.add_marker(pytest.mark.xdist_group("simnpu"))
            item.add_marker(pytest.mark.timeout(300))
