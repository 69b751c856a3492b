"""A watch that only some of the ranks start ends with an error that names the others."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

from gradsentinel import Sentinel
from gradsentinel.errors import ConsensusError

pytestmark = pytest.mark.multiprocess


def start(rank: int, folder: Path) -> str:
    if rank == 1:
        return "did something else"
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        Sentinel(model, optimizer, run_dir=folder / "run", timeout=1.0)
    except ConsensusError as error:
        return str(error)
    return "started"


def test_who_did_not_start_is_named(tmp_path):
    told = run_ranks(start, 2, tmp_path, tmp_path)
    assert told[0].startswith("no answer from rank 1: ")
    assert told[0].endswith("was the watch started on every rank?")
    assert told[1] == "did something else"
