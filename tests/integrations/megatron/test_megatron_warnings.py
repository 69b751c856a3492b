"""What is refused or said at the attach or in the first step, before it is too late."""

import sys
from types import SimpleNamespace

import pytest
import torch
from layouts import LAYOUTS, Fault, replace

from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron import compat

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(200)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", [False, True])
def test_who_computes_again_says_in_the_first_step_that_it_cannot(megatron, tmp_path, schedule):
    [told] = megatron.run("warned", 1, LAYOUTS["one"], tmp_path, "NanCallback, Retry", schedule=schedule)
    missing = [words for words in told if words.startswith("Retry can do nothing: ")]
    assert len(missing) == (0 if schedule else 1)
    assert all("sentinel.schedule(get_forward_backward_func())" in words for words in missing)


@pytest.mark.multiprocess
def test_who_computes_nothing_again_is_not_bothered(megatron, tmp_path):
    [told] = megatron.run("warned", 1, LAYOUTS["one"], tmp_path, "NanCallback", schedule=False)
    assert told == []


@pytest.mark.multiprocess
def test_on_a_device_that_saturates_the_largest_number_is_looked_for(megatron, tmp_path):
    layout = replace(LAYOUTS["one"], precision="fp32")
    largest = torch.finfo(torch.float32).max
    fault = Fault(rank=0, parameter="linear_fc1.weight", value=largest, persistent=True)
    [(told, found)] = megatron.run("saturating", 1, layout, tmp_path, faults=(fault,), steps=4)
    assert any("saturates" in words for words in told)
    assert [(i["step"], i["kind"], i["outcome"]) for i in found["incidents"]] == [
        (2, "saturation", "skipped")
    ]
    assert found["swallowed"] == []


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.10.0", ""),
        ("0.16.1+local.3", ""),
        ("0.20.0rc0", ""),
        ("0.21.0", "is newer than 0.20"),
        ("1.0", "is newer than 0.20"),
        ("dev", "nobody knows how old megatron-core dev is"),
        (None, "nobody knows how old megatron-core of unknown version is"),
    ],
)
def test_versions_that_may_work_are_let_in(monkeypatch, caplog, version, says):
    module = SimpleNamespace() if version is None else SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "megatron.core", module)
    compat.check_version()
    assert (says in caplog.text) if says else caplog.text == ""


@pytest.mark.parametrize("version", ["0.9.0", "0.9", "0.2.0+cu12"])
def test_a_version_that_is_too_old_is_refused(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__=version))
    with pytest.raises(ConfigurationError, match="is too old"):
        compat.check_version()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("bare model", "wrap the model in megatron.core.distributed.DistributedDataParallel"),
        ("torch optimizer", "give what get_megatron_optimizer returned"),
        ("rescue pp2", "pipeline stages exchange values of one type"),
        ("rescue with fusion", "--no-gradient-accumulation-fusion"),
        ("resync", "Resync cannot work here: what Megatron's optimizers hold"),
        ("plain iterator", "wrap it in megatron.core.rerun_state_machine.RerunDataIterator"),
        ("twice", "is being watched already"),
        ("old version", "megatron-core 0.9.0 is too old"),
        ("step overlap", "overlap_param_gather_with_optimizer_step is not supported"),
        ("nan check", "--no-check-for-nan-in-loss-and-grad"),
        ("half the model pp2vpp2", "that the model does not have"),
        ("another model's optimizer", "give the whole list of model chunks"),
        ("scheduler", "scheduler is a int, whose state cannot be taken"),
        ("extra", "extra 'a' (int) needs state_dict and load_state_dict"),
        ("extra list", "extra is a list: give a dict"),
        ("timeout text", "timeout='x' must be a number of seconds"),
        ("timeout below 0", "timeout=-1 must be above 0 seconds"),
        ("timeout for ever", "timeout=inf must be above 0 seconds, and at most"),
        ("budget", "diagnosis_budget=-1 must be 0 seconds or more"),
    ],
)
def test_what_cannot_work_is_refused_at_once(megatron, tmp_path, what, says):
    named = what.rpartition(" ")[2]
    layout = LAYOUTS[named if named in LAYOUTS else "one"]
    layout = replace(layout, check_for_nan=what == "nan check")
    for message, [before, after] in megatron.run("refused", layout.world, layout, tmp_path, what):
        assert says in message
        if what != "twice":
            assert before == after
