"""The contract of all adapters, held on Megatron-Core's: on one rank, in the process that has Megatron."""

from typing import ClassVar

import pytest
from contract import cases
from server import MegatronServer
from training import Driver

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("megatron"), pytest.mark.timeout(200)]


class Megatron(Driver):
    """What the driver says of itself; it is in small_net.py, which needs Megatron."""

    package = "megatron.core"
    lacks: ClassVar = dict.fromkeys(("checkpoint", "draws"), "see there")


@pytest.mark.parametrize("clause", cases(Megatron()))
def test_megatrons_adapter_keeps_the_contract(megatron: MegatronServer, tmp_path, clause):
    megatron.run("keep_contract", 1, tmp_path, clause)
