"""What every adapter promises, held on all of them: a healthy run untouched, no bad update, no trace."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from adapters import ADAPTERS, Adapter, Plain, Recorder, Task, Trouble
from contract import Expected, check_cured, check_untouched

from gradsentinel import (
    Action,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Outcome,
    Retry,
    Rollback,
    Skip,
    TrainingAborted,
)
from loops import differences

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN, INF = float("nan"), float("inf")


TWINS = [one for one in ADAPTERS if one.name != "pytorch_lightning"]
"""That package is Lightning again, with classes of its own."""
RETRYING = [one for one in TWINS if one.retries]


@pytest.fixture(params=TWINS, ids=lambda adapter: adapter.name)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return request.param


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (2, 0.5)])
def test_a_healthy_run_is_untouched_bit_for_bit(adapter, tmp_path, accumulate, max_norm):
    def task() -> Task:
        return Task(count=7, accumulate=accumulate, max_norm=max_norm, random=True)

    alone = adapter.train(task(), tmp_path / "alone", None)
    draws = torch.rand(3)
    watched = adapter.train(
        task(), tmp_path / "watched", [Recorder(), NanCallback(), Rollback(every=2, confirm_after=1), Retry()]
    )
    check_untouched(alone.outcome(), watched.outcome())
    assert watched.warned <= alone.warned
    assert torch.equal(draws, torch.rand(3))
    assert watched.scheduler.last_epoch == math.ceil(7 / accumulate)


def test_all_adapters_train_the_same(tmp_path):
    """The frameworks do the same arithmetic, so what is compared below is comparable."""
    ends = [one.train(Task(accumulate=2), tmp_path / one.name, None).net.state_dict() for one in ADAPTERS]
    assert [differences(ends[0], end) for end in ends[1:]] == [[]] * (len(ends) - 1)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_events_come_once_per_step_before_clipping_and_in_order(adapter, tmp_path, accumulate):
    record = Recorder()
    adapter.train(Task(count=6, accumulate=accumulate), tmp_path, [record, NanCallback()])
    microbatch = ["batch", "after_backward"]
    step = ["step_start", *microbatch * accumulate, "before_clip", "after_step"]
    assert record.told == ["run_start", *step * (6 // accumulate), "run_end"]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
@pytest.mark.parametrize(("where", "value"), [("loss", NAN), ("gradient", INF)])
def test_a_dropped_step_changes_nothing(adapter, tmp_path, where, value):
    record = Recorder()
    spoilt = Task(trouble=Trouble(**{where: {2: value}}, transient=False))
    result = adapter.train(spoilt, tmp_path / "spoilt", [record, NanCallback()])
    without = adapter.train(Task(without=(2,)), tmp_path / "without", None)
    assert record.applied == [True, True, False, True, True, True]
    assert record.states[1] == record.states[2]
    kind = "nonfinite_loss" if where == "loss" else "nonfinite_gradient"
    check_cured(without.outcome(), result.outcome(), [Expected(step=2, outcome="skipped", kinds={kind})])
    (incident,) = result.incidents
    if where == "gradient":  # seen before clipping spreads it
        assert [tensor.name.rpartition("net.")[2] for tensor in incident.tensors] == ["head.weight"]


def test_a_window_is_dropped_as_a_whole_and_its_microbatch_named(adapter, tmp_path):
    spoilt = Task(count=8, accumulate=2, trouble=Trouble(loss={5: NAN}, transient=False))
    result = adapter.train(spoilt, tmp_path / "spoilt", [Recorder(), NanCallback()])
    without = adapter.train(Task(count=8, accumulate=2, without=(4, 5)), tmp_path / "without", None)
    assert differences(result.state(), without.state()) == []
    (incident,) = result.incidents
    assert (incident.step, incident.microbatch) == (2, 1)


def test_a_spike_is_dropped_and_its_norm_is_that_before_clipping(adapter, tmp_path):
    spoilt = Task(trouble=Trouble(loss={3: 1e4}, transient=False))
    result = adapter.train(
        spoilt,
        tmp_path / "spoilt",
        [Recorder(), MagnitudeCallback(max_global_norm=500.0, action=Action.SKIP)],
    )
    without = adapter.train(Task(without=(3,)), tmp_path / "without", None)
    assert differences(result.state(), without.state()) == []
    (incident,) = result.incidents
    assert incident.kind is Kind.MAGNITUDE
    assert incident.grad_norm > 500


def test_a_bad_sample_is_dropped_and_named(adapter, tmp_path):
    result = adapter.train(Task(bad=(1,)), tmp_path / "spoilt", [Recorder(), NanCallback()])
    without = adapter.train(Task(without=(1,)), tmp_path / "without", None)
    assert differences(result.state(), without.state()) == []
    (incident,) = result.incidents
    assert incident.kind is Kind.NONFINITE_INPUT
    assert [(sample.position, sample.field) for sample in incident.samples] == [(3, "x")]


@pytest.mark.parametrize("adapter", RETRYING, ids=lambda adapter: adapter.name)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_transient_fault_leaves_no_trace_after_a_retry(adapter, tmp_path, accumulate):
    alone = adapter.train(Task(random=True, accumulate=accumulate), tmp_path / "alone", None)
    spoilt = Task(random=True, accumulate=accumulate, trouble=Trouble(loss={3: NAN}))
    result = adapter.train(spoilt, tmp_path / "spoilt", [Recorder(), NanCallback(), Retry()])
    expected = Expected(step=3 // accumulate, outcome="retried", rank=0, kinds={"nonfinite_loss"})
    check_cured(alone.outcome(), result.outcome(), [expected])


def test_manual_optimization_hands_a_retry_over_and_says_why(tmp_path, caplog):
    (manual,) = (one for one in ADAPTERS if not one.retries)
    result = manual.train(
        Task(trouble=Trouble(loss={3: NAN})), tmp_path, [Recorder(), NanCallback(), Retry()]
    )
    assert [incident.outcome for incident in result.incidents] == [Outcome.SKIPPED]
    assert "in manual optimization training_step runs the optimizers itself" in caplog.text


def test_a_rollback_restores_everything_and_the_run_goes_on(adapter, tmp_path):
    record = Recorder()
    spoilt = Task(trouble=Trouble(loss={4: NAN}, transient=False))
    result = adapter.train(
        spoilt,
        tmp_path,
        [record, NanCallback(action=Action.ROLLBACK), Rollback(every=2, confirm_after=1)],
    )
    assert [incident.outcome for incident in result.incidents] == [Outcome.ROLLED_BACK]
    assert record.states[4] == record.states[1]  # the snapshot of step 2
    assert record.applied == [True, True, True, True, False, True]
    assert result.scheduler.last_epoch == 3  # two steps kept, one made after it
    assert all(torch.isfinite(value).all() for value in result.net.state_dict().values())


def test_a_step_that_ruins_the_state_is_undone(adapter, tmp_path):
    """An update whose gradients are fine and whose outcome is not, found when a snapshot is due."""

    class Ruin(Recorder):
        def on_before_clip(self, event):
            super().on_before_clip(event)
            if len(self.applied) == 3:
                self.run.host.optimizers[0].param_groups[0]["lr"] = INF

    record = Ruin()
    result = adapter.train(Task(), tmp_path, [record, NanCallback(), Rollback(every=2, confirm_after=0)])
    assert [(one.step, one.outcome) for one in result.incidents] == [(3, Outcome.ROLLED_BACK)]
    assert all(torch.isfinite(value).all() for value in result.net.state_dict().values())
    assert result.scheduler.last_epoch == 4
    assert math.isfinite(result.scheduler.get_last_lr()[0])


def test_an_abort_leaves_with_a_checkpoint_of_a_good_state(adapter, tmp_path):
    spoilt = Task(trouble=Trouble(loss={3: NAN}, transient=False))
    with pytest.raises(TrainingAborted) as caught:
        adapter.train(spoilt, tmp_path / "run", [Recorder(), NanCallback(), Skip(max_skips=0)])
    assert caught.value.incident.outcome is Outcome.ABORTED
    assert Path(caught.value.snapshot).is_dir()
    if isinstance(adapter, Plain):
        return
    where = Path(str(caught.value).rpartition("good state is ")[2])
    assert where.exists()
    kept = adapter.train(Task(without=(3, 4, 5)), tmp_path / "short", None).net.state_dict()
    assert differences(weights_in(where), dict(kept)) == []


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The network's weights in a checkpoint of any of the frameworks."""
    from safetensors.torch import load_file

    for name in ("model.safetensors", "model_0.safetensors"):
        if (checkpoint / name).exists():
            found = load_file(checkpoint / name)
            break
    else:
        if checkpoint.is_dir():
            (file,) = checkpoint.glob("pytorch_model*.bin")
            found = torch.load(file)
        else:
            saved = torch.load(checkpoint, weights_only=False)
            found = saved["state_dict"] if "state_dict" in saved else saved["model0"]
    names = {name: name.removeprefix("net.") for name in found}
    own = {short: found[name] for name, short in names.items() if name.startswith("net.")} or dict(found)
    order = Task().net().state_dict()
    return {name: own[name] for name in order if name in own}


def test_the_users_own_exception_passes_unchanged(adapter, tmp_path):
    error = KeyError("mine")
    record = Recorder()
    with pytest.raises(KeyError) as caught:
        adapter.train(Task(trouble=Trouble(raises={2: error})), tmp_path / "one", [record, NanCallback()])
    assert caught.value is error
    assert record.told[-1] == "run_end"
    adapter.train(Task(), tmp_path / "one", [Recorder(), NanCallback()])  # the directory is free again


def test_nothing_is_left_behind(adapter, tmp_path):
    alone, watched = (
        adapter.train(Task(), tmp_path / name, callbacks)
        for name, callbacks in (("alone", None), ("watched", [Recorder(), NanCallback()]))
    )
    assert vars(watched.optimizer).keys() == vars(alone.optimizer).keys()
    assert [len(one._optimizer_step_pre_hooks) for one in (alone.optimizer, watched.optimizer)] == [0, 0]
    for mine, theirs in zip(parts_of(watched.host), parts_of(alone.host), strict=True):
        assert {k for k, v in vars(mine).items() if hasattr(v, "__wrapped__")} == {
            k for k, v in vars(theirs).items() if hasattr(v, "__wrapped__")
        }
    hooks = Counter(len(p._backward_hooks or ()) for p in watched.net.parameters())
    assert hooks == {0: 6}


def parts_of(host):
    """The framework's objects whose methods an adapter may wrap."""
    if host is None:
        return []
    names = ("strategy", "precision_plugin", "accelerator", "optimizer")
    found = [host, *(getattr(host, name) for name in names if hasattr(host, name))]
    loop = getattr(host, "fit_loop", None)
    return [*found, *([loop.epoch_loop] if loop is not None else []), *getattr(host, "_optimizers", [])]


def test_two_trainings_in_one_process_do_not_see_each_other(adapter, tmp_path):
    first, second = Recorder(), Recorder()
    spoilt = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    one = adapter.train(spoilt, tmp_path / "one", [first, NanCallback()])
    other = adapter.train(Task(), tmp_path / "two", [second, NanCallback()])
    assert (len(one.incidents), other.incidents) == (1, ())
    assert first.run is not second.run
    assert Counter(first.told) == Counter(second.told)
