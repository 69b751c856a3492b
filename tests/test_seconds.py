"""Seconds that are none are refused when a watch is made, by whatever makes it."""

import pytest
import torch
from torch import nn

from gradsentinel import Sentinel
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.settings import RunSettings

WRONG = [
    ({"timeout": "x"}, "timeout='x' must be a number of seconds"),
    ({"timeout": None}, "timeout=None must be a number of seconds"),
    ({"timeout": True}, "timeout=True must be a number of seconds"),
    ({"timeout": 0}, "timeout=0 must be above 0 seconds"),
    ({"timeout": -1}, "timeout=-1 must be above 0 seconds"),
    ({"timeout": float("nan")}, "timeout=nan must be above 0 seconds"),
    ({"timeout": float("inf")}, "timeout=inf must be above 0 seconds"),
    ({"diagnosis_budget": -1}, "diagnosis_budget=-1 must be 0 seconds or more"),
    ({"diagnosis_budget": float("nan")}, "diagnosis_budget=nan must be 0 seconds or more"),
    ({"diagnosis_budget": "30"}, "diagnosis_budget='30' must be a number of seconds"),
]


@pytest.mark.parametrize(("settings", "says"), WRONG)
def test_what_is_no_patience_is_refused(tmp_path, settings, says):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigurationError, match=says):
        Sentinel(model, optimizer, run_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigurationError, match=says):
        RunSettings(**settings)


def test_no_diagnosis_at_all_is_a_budget(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Sentinel(model, optimizer, run_dir=tmp_path / "run", timeout=1, diagnosis_budget=0) as sentinel:
        assert sentinel.incidents == ()
