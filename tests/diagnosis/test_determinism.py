"""Replays under deterministic algorithms: for who asks, put back whatever happens, and told."""

import os
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradsentinel.devices import Device, device_of
from gradsentinel.devices.npu import Npu
from gradsentinel.diagnosis.determinism import VARIABLE, Conditions, deterministic, deterministically
from gradsentinel.evidence import Diagnosis
from gradsentinel.faults import FaultPlan, PoisonActivation

CPU = device_of("cpu")
DEVICES = {"cpu": CPU, "cuda": device_of("cuda"), "npu": Npu(SimpleNamespace(type="npu", index=0))}
MODES = []
"""Not in a module: what one holds is put back after a replay."""
ON = "run again with deterministic algorithms"


def switches():
    return (
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        os.environ.get("HCCL_DETERMINISTIC"),
        warnings.filters[:],
        warnings.showwarning,
    )


@contextmanager
def the_program_has(mode, fill, benchmark):
    before = switches()[:3]
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark = benchmark
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
        torch.backends.cudnn.benchmark = before[2]


def unordered():
    """An operator that has no deterministic kernel, not even on the CPU."""
    return torch.zeros(4).put_(torch.tensor([1, 2]), torch.ones(2))


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("benchmark", [True, False])
@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_every_switch_is_put_back_whatever_happens(mode, fill, benchmark, kind):
    with the_program_has(mode, fill, benchmark):
        before = switches()
        for ends in (lambda: None, unordered, lambda: 1 / 0):
            try:
                with deterministic("--deterministic", DEVICES[kind], ranks=True) as conditions:
                    assert torch.are_deterministic_algorithms_enabled()
                    ends()
            except (ZeroDivisionError, RuntimeError):
                pass
            assert switches() == before
            assert conditions.already == (mode > 0)


def test_whoever_does_not_ask_gets_nothing():
    before = switches()
    with deterministic("", DEVICES["cuda"]) as conditions:
        assert switches() == before
    assert conditions == Conditions()
    assert conditions.said() == ()


def test_an_operator_without_a_deterministic_kernel_runs_as_ever_and_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as strict as a program may be
        with deterministic("--deterministic", CPU) as conditions:
            assert unordered().tolist() == [0, 1, 1, 0]
            unordered()
    assert conditions.said() == (
        f"{ON} (--deterministic): not by the very kernels of the run",
        "computed as ever, for lack of a deterministic kernel: put_",
    )


def test_other_warnings_go_where_they_would_have_gone():
    with pytest.warns(UserWarning, match="of the user's"), deterministic("--deterministic", CPU):
        warnings.warn("of the user's", UserWarning, stacklevel=1)


def test_fresh_memory_is_not_filled_as_it_is_not_in_the_run():
    held = torch.ones(1000)
    with deterministic("--deterministic", CPU):
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert held.new_zeros(1000).isfinite().all()


def test_a_program_that_computes_so_itself_keeps_its_own_mode():
    with the_program_has(2, fill=True, benchmark=False), deterministic("x", CPU) as conditions:
        assert torch.get_deterministic_debug_mode() == 2
        assert torch.utils.deterministic.fill_uninitialized_memory
        with pytest.raises(RuntimeError, match="deterministic"):
            unordered()
    assert conditions.said() == (f"{ON} (x), as the run itself",)
    assert not conditions.switched


def test_a_block_in_another_one_changes_nothing():
    with deterministic("x", CPU) as outer, deterministic("y", CPU) as inner:
        assert torch.are_deterministic_algorithms_enabled()
        unordered()
    assert (outer.asked, inner.asked) == ("x", "")
    assert list(outer.without) == ["put_"]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("kind", "ranks", "variable"),
    [
        ("cuda", False, "CUBLAS_WORKSPACE_CONFIG"),
        ("npu", True, "HCCL_DETERMINISTIC"),
        ("npu", False, None),  # nothing was reduced
        ("cpu", True, None),
    ],
)
def test_a_variable_counts_only_before_the_device_is_used(kind, ranks, variable, monkeypatch):
    names = ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for used in (False, True):
        monkeypatch.setattr(Device, "initialised", property(lambda _, used=used: used))
        with deterministic("x", DEVICES[kind], ranks=ranks) as conditions:
            assert [name for name in names if name in os.environ] == (
                [variable] if variable and not used else []
            )
        assert not any(name in os.environ for name in names)
        late = f"{variable} is not set, and counts from the start of the process only"
        assert list(conditions.said()[1:]) == ([late] if variable and used else [])


# -- in a run --------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Notes in which mode each of its forward passes ran."""

    def __init__(self, *, fault=False):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.fault = fault
        MODES.clear()

    def forward(self, x):
        MODES.append(torch.get_deterministic_debug_mode())
        y = self.lin(x) + unordered().sum()
        return torch.log(y * 0) if self.fault else y


def loss_of(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize(("value", "replayed"), [("1", 1), ("0", 0), ("", 0)])
def test_a_diagnosis_computes_so_on_request(value, replayed, monkeypatch, diagnosed):
    monkeypatch.setenv(VARIABLE, value)
    model = Watched(fault=True)
    before = switches()
    incident = diagnosed(model, [torch.randn(3, 4)], loss_of)
    assert switches()[:5] == before[:5]  # libraries that a diagnosis imports have filters of their own
    assert incident.diagnosis.op == "aten.log.default"
    assert MODES[0] == 0  # the loop's own
    assert set(MODES[1:]) == {replayed}
    said = [text for text in incident.diagnosis.evidence if ON in text or "kernel" in text]
    assert said == (
        [
            f"{ON} ({VARIABLE}=1): not by the very kernels of the run",
            "computed as ever, for lack of a deterministic kernel: put_",
        ]
        if replayed
        else []
    )


def test_a_healthy_run_is_untouched(monkeypatch, sentinel_for):
    ends = []
    for value in ("0", "1"):
        monkeypatch.setenv(VARIABLE, value)
        torch.manual_seed(3)
        model = Watched()
        sentinel = sentinel_for(model, loss_of)
        for batch in sentinel.steps([torch.randn(3, 4) for _ in range(4)]):
            sentinel.backward(loss_of(model, batch))
            sentinel.step(max_norm=1.0)
        sentinel.close()
        assert set(MODES) == {0}
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def entropy_of(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("asked", ["0", "1"])
@pytest.mark.parametrize("steady", [True, False])
def test_a_fixed_order_is_no_proof_against_a_device(asked, steady, monkeypatch, sentinel_for):
    """A kernel whose gradients have other last bits each time, unless it is told to keep an order."""
    plain, turns = nn.functional.linear, []

    def linear(*given):
        y = plain(*given)
        if steady or not turns or torch.are_deterministic_algorithms_enabled():
            return y
        turns.append(1)
        return y + 2.0**-21 * len(turns) * (y - y.detach())

    monkeypatch.setenv(VARIABLE, asked)
    monkeypatch.setattr(nn.functional, "linear", linear)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    plan = FaultPlan([PoisonActivation(steps=(1,), module="0", index=(1, 3))])
    sentinel = sentinel_for(model, entropy_of)
    data = [{"x": torch.randn(8, 6), "y": torch.randint(4, (8,))} for _ in range(2)]
    with plan.attach(model):
        for number, batch in enumerate(sentinel.steps(plan.batches(data))):
            sentinel.backward(entropy_of(model, batch))
            turns += [0] * number  # from here on, so that the loop itself came out like a fixed order
            sentinel.step()
    (incident,) = sentinel.incidents
    evidence = "\n".join(incident.diagnosis.evidence)
    assert incident.diagnosis.cause == ("hardware" if steady else "unknown")
    assert (ON in evidence) == (asked == "1")
    differs = "without deterministic algorithms two runs on the same inputs differ"
    assert (differs in evidence) == (asked == "1" and not steady)


def test_a_framework_s_own_diagnoser_computes_so_too(monkeypatch, sentinel_for):
    monkeypatch.setenv(VARIABLE, "1")
    model = Watched()
    run = sentinel_for(model, loss_of)._watch.run
    seen = []

    def search(incident, _):
        seen.append(torch.get_deterministic_debug_mode())
        incident.diagnosis = Diagnosis(cause="math", confidence=0.9, evidence=("found",), remedy=())

    class Incident:
        diagnosis = None

    incident = Incident()
    deterministically(search)(incident, run)
    assert seen == [1]
    assert incident.diagnosis.evidence == (
        "found",
        f"{ON} ({VARIABLE}=1): not by the very kernels of the run",
    )
    monkeypatch.setenv(VARIABLE, "0")
    deterministically(search)(incident, run)
    assert (seen[1], incident.diagnosis.evidence) == (0, ("found",))
