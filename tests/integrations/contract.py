"""The contract of all adapters: what each of them promises, clause by clause.

A clause takes a driver, which trains a task through one adapter, and an empty directory. `cases(driver)`
gives those that hold for it; what an adapter lacks, it says itself.
"""

import contextlib
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import Expected, Outcome, check_cured, check_incidents, check_untouched, differences
from training import Driver, Recorder, Trouble

from gradsentinel import (
    Action,
    BatchCallback,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Retry,
    Rollback,
    Skip,
    TrainingAborted,
    testing,
)
from gradsentinel import Outcome as Became
from gradsentinel._version import __version__
from gradsentinel.errors import ConfigurationError

__all__ = [
    "CLAUSES",
    "Case",
    "Expected",
    "Outcome",
    "cases",
    "check_cured",
    "check_incidents",
    "check_untouched",
    "differences",
    "hold",
]

NAN, INF = float("nan"), float("inf")


def same(one: Any, other: Any) -> None:
    """Two results, or parts of one, are the same bit for bit."""
    ours, theirs = (Outcome(states=[part_by_part(each)]) for each in (one, other))
    assert differences(ours, theirs) == []


def part_by_part(result: Any) -> dict[str, Any]:
    from loops import fingerprint  # noqa: PLC0415 - found by the path that conftest.py sets

    state = result.state() if hasattr(result, "state") else {"": result}
    return {part: fingerprint(value) for part, value in state.items()}


def a_healthy_run_is_untouched(
    driver: Driver, folder: Path, *, accumulate: int, max_norm: float | None
) -> None:
    def task() -> Any:
        return driver.task(count=7, accumulate=accumulate, max_norm=max_norm, random=True)

    alone = driver.train(task(), folder / "alone", None)
    draws = torch.rand(3)
    callbacks = [Recorder(), NanCallback(), Rollback(every=2, confirm_after=1)]
    callbacks += [] if "retry" in driver.lacks else [Retry()]
    watched = driver.train(task(), folder / "watched", callbacks)
    check_untouched(alone.outcome(), watched.outcome())
    assert watched.warned <= alone.warned
    assert torch.equal(draws, torch.rand(3))
    assert watched.scheduler.last_epoch == math.ceil(7 / accumulate)


def events_come_once_a_step_before_clipping_and_in_order(
    driver: Driver, folder: Path, *, accumulate: int
) -> None:
    record = Recorder()
    trouble = Trouble(loss=dict.fromkeys(range(6), 1e3))  # so that clipping changes every norm
    driver.train(
        driver.task(accumulate=accumulate, trouble=trouble, max_norm=0.5), folder, [record, NanCallback()]
    )
    step = ["step_start", *driver.window(accumulate), "before_clip", "after_step"]
    assert record.told == ["run_start", *step * (6 // accumulate), "run_end"]
    if driver.name != "attached":  # its clipping is over when it is asked
        assert all(norm > 1 for norm in record.norms)


def a_dropped_step_changes_nothing(driver: Driver, folder: Path, *, where: str, value: float) -> None:
    record = Recorder()
    spoilt = driver.task(trouble=Trouble(**{where: {2: value}}, transient=False))
    result = driver.train(spoilt, folder / "spoilt", [record, NanCallback()])
    without = driver.train(driver.task(without=(2,)), folder / "without", None)
    assert record.applied == [True, True, False, True, True, True]
    assert record.states[2] == record.states[1]
    same(result, without)
    (incident,) = result.incidents
    assert (incident.step, incident.outcome) == (2, Became.SKIPPED)
    if where == "gradient":  # before clipping spreads it
        assert [tensor.name.removeprefix("net.") for tensor in incident.tensors] == ["head.weight"]
        assert incident.kind is Kind.NONFINITE_GRADIENT


def a_window_is_dropped_as_a_whole(driver: Driver, folder: Path) -> None:
    spoilt = driver.task(count=8, accumulate=2, trouble=Trouble(loss={5: NAN}, transient=False))
    result = driver.train(spoilt, folder / "spoilt", [Recorder(), NanCallback()])
    without = driver.train(driver.task(count=8, accumulate=2, without=(4, 5)), folder / "without", None)
    same(result, without)
    (incident,) = result.incidents
    assert (incident.step, incident.microbatch) == (2, 1)


def a_spike_is_dropped(driver: Driver, folder: Path) -> None:
    spoilt = driver.task(trouble=Trouble(loss={3: 1e4}, transient=False))
    callbacks = [Recorder(), MagnitudeCallback(max_global_norm=500.0, action=Action.SKIP)]
    spoilt.max_norm = None if driver.name == "attached" else spoilt.max_norm
    result = driver.train(spoilt, folder / "spoilt", callbacks)
    reference = driver.task(without=(3,), max_norm=spoilt.max_norm)
    same(result, driver.train(reference, folder / "without", None))
    (incident,) = result.incidents
    assert incident.kind is Kind.MAGNITUDE
    assert incident.grad_norm > 500  # as it was before clipping


def a_bad_sample_is_dropped_and_named(driver: Driver, folder: Path) -> None:
    result = driver.train(driver.task(bad=(1,)), folder / "spoilt", [Recorder(), NanCallback()])
    same(result, driver.train(driver.task(without=(1,)), folder / "without", None))
    (incident,) = result.incidents
    if "batches" in driver.lacks:
        return
    assert incident.kind is Kind.NONFINITE_INPUT
    assert [(sample.position, sample.field) for sample in incident.samples] == [(3, "x")]


def a_label_that_is_no_class_drops_its_step_and_is_named(driver: Driver, folder: Path, *, at: int) -> None:
    result = driver.train(driver.task(no_class=(at,)), folder / "spoilt", [Recorder(), BatchCallback()])
    same(result, driver.train(driver.task(without=(at,)), folder / "without", None))
    (incident,) = result.incidents
    assert incident.kind is Kind.NONFINITE_INPUT
    assert "y[5] is 4, outside 0 to 3 (the 4 classes that the loss is given)" in incident.message
    assert [(sample.position, sample.field) for sample in incident.samples] == [(5, "y")]


def a_transient_fault_leaves_no_trace_after_a_retry(driver: Driver, folder: Path, *, accumulate: int) -> None:
    alone = driver.train(driver.task(random=True, accumulate=accumulate), folder / "alone", None)
    spoilt = driver.task(random=True, accumulate=accumulate, trouble=Trouble(loss={3: NAN}))
    result = driver.train(spoilt, folder / "spoilt", [Recorder(), NanCallback(), Retry()])
    expected = Expected(step=3 // accumulate, outcome="retried", rank=0, kinds={"nonfinite_loss"})
    check_cured(alone.outcome(), result.outcome(), [expected])


def a_rollback_restores_everything_and_the_run_goes_on(driver: Driver, folder: Path) -> None:
    record = Recorder()
    spoilt = driver.task(trouble=Trouble(loss={4: NAN}, transient=False))
    callbacks = [record, NanCallback(action=Action.ROLLBACK), Rollback(every=2, confirm_after=1)]
    result = driver.train(spoilt, folder, callbacks)
    assert [incident.outcome for incident in result.incidents] == [Became.ROLLED_BACK]
    assert record.states[4] == record.states[1]  # the snapshot of step 2
    assert record.applied == [True, True, True, True, False, True]
    if result.holds_schedule:
        assert result.scheduler.last_epoch == 3  # two steps kept, one made after it
    assert all(torch.isfinite(value).all() for value in result.net.state_dict().values())


def a_rollback_can_draw_the_batches_since_then_once_more(driver: Driver, folder: Path) -> None:
    spoilt = driver.task(trouble=Trouble(loss={4: NAN}, transient=False))
    rollback = Rollback(every=2, confirm_after=1, data="replay")
    result = driver.train(
        spoilt, folder / "spoilt", [Recorder(), NanCallback(action=Action.ROLLBACK), rollback]
    )
    assert [incident.outcome for incident in result.incidents] == [Became.ROLLED_BACK]
    same(result, driver.train(driver.task(without=(4,)), folder / "without", None))


class Ruin(Recorder):
    """Has an update whose gradients are fine and whose outcome is not."""

    def on_before_clip(self, event: Any) -> None:
        super().on_before_clip(event)
        if len(self.applied) == 3:
            self.run.host.optimizers[0].param_groups[0]["lr"] = INF


def a_step_that_ruins_the_state_is_undone(driver: Driver, folder: Path) -> None:
    result = driver.train(driver.task(), folder, [Ruin(), NanCallback(), Rollback(every=2, confirm_after=0)])
    assert [(one.step, one.outcome) for one in result.incidents] == [(3, Became.ROLLED_BACK)]
    assert all(torch.isfinite(value).all() for value in result.net.state_dict().values())
    if result.holds_schedule:
        assert result.scheduler.last_epoch == 4
    assert math.isfinite(result.scheduler.get_last_lr()[0])


def an_abort_leaves_a_good_state(driver: Driver, folder: Path) -> None:
    spoilt = driver.task(trouble=Trouble(loss={3: NAN}, transient=False))
    with pytest.raises(TrainingAborted) as caught:
        driver.train(spoilt, folder / "run", [Recorder(), NanCallback(), Skip(max_skips=0)])
    assert caught.value.incident.outcome is Became.ABORTED
    assert Path(caught.value.snapshot).is_dir()
    if "checkpoint" in driver.lacks:
        return
    kept = driver.train(driver.task(without=(3, 4, 5)), folder / "short", None).net.state_dict()
    found = driver.saved(Path(str(caught.value).rpartition("good state is ")[2]))
    short = {name.removeprefix("net."): value for name, value in found.items()}
    same({name: short[name] for name in kept}, dict(kept))


def the_users_own_exception_passes_unchanged(
    driver: Driver, folder: Path, *, error: type[BaseException]
) -> None:
    mine, record = error("mine"), Recorder()

    def come_out(folder: Path, callbacks: Any) -> BaseException:
        with pytest.raises((error, SystemExit)) as caught:
            driver.train(driver.task(trouble=Trouble(raises={2: mine})), folder, callbacks)
        return caught.value

    alone, watched = come_out(folder / "untold", None), come_out(folder, [record, NanCallback()])
    if alone is mine:
        assert watched is mine
    else:  # Lightning makes an exit of an interrupt
        assert (type(watched), watched.args) == (type(alone), alone.args)
    assert record.told[-1] == "run_end"
    healthy = driver.train(driver.task(), folder, [Recorder(), NanCallback()])  # the directory is free again
    same(healthy, driver.train(driver.task(), folder / "alone", None))


def nothing_is_left_behind(driver: Driver, folder: Path) -> None:
    alone = driver.train(driver.task(), folder / "alone", None)
    watched = driver.train(driver.task(), folder / "watched", [Recorder(), NanCallback()])
    for mine, theirs in zip(driver.parts(watched), driver.parts(alone), strict=True):
        assert own_methods(mine) == own_methods(theirs)
        assert kinds_in(mine) == kinds_in(theirs)
    for result in (alone, watched):
        inner = getattr(result.optimizer, "optimizer", result.optimizer)
        assert [len(inner._optimizer_step_pre_hooks), len(inner._optimizer_step_post_hooks)] == [0, 0]
    assert hooks_on(watched.net) == hooks_on(alone.net)


def kinds_in(one: Any) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in vars(one).items()}


def own_methods(one: Any) -> set[str]:
    return {name for name, value in vars(one).items() if callable(value)}


def hooks_on(net: torch.nn.Module) -> Any:
    parameters = Counter(len(p._backward_hooks or ()) for p in net.parameters())
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return parameters, [[len(getattr(module, kind)) for kind in kinds] for module in net.modules()]


def two_at_once_do_not_see_each_other(driver: Driver, folder: Path) -> None:
    """One trains from beginning to end while the other is in the midst of a step."""
    records, inner = [Recorder(), Recorder()], []

    def meanwhile() -> None:
        task = driver.task(trouble=Trouble(loss={4: NAN}, transient=False), nested=True)
        inner.append(driver.train(task, folder / "inner", [records[1], NanCallback()]))

    trouble = Trouble(loss={2: NAN}, transient=False, meanwhile={3: meanwhile})
    outer = driver.train(driver.task(trouble=trouble), folder / "outer", [records[0], NanCallback()])
    assert [[one.step for one in result.incidents] for result in (outer, *inner)] == [[2], [4]]
    assert records[0].run is not records[1].run
    assert Counter(records[0].told) == Counter(records[1].told)
    same(outer, driver.train(driver.task(without=(2,)), folder / "two", None))
    same(inner[0], driver.train(driver.task(without=(4,)), folder / "four", None))


def the_same_objects_can_be_trained_twice(driver: Driver, folder: Path) -> None:
    alone = driver.train(driver.task(runs=2, random=True), folder / "alone", None)
    healthy = driver.train(
        driver.task(runs=2, random=True), folder / "healthy", [Recorder(), NanCallback(), Rollback(every=2)]
    )
    check_untouched(alone.outcome(), healthy.outcome())
    spoilt = driver.task(runs=2, trouble=Trouble(loss={2: NAN}, transient=False))
    result = driver.train(spoilt, folder / "spoilt", [Recorder(), NanCallback()])
    same(result, driver.train(driver.task(runs=2, without=(2,)), folder / "without", None))
    assert {one.outcome for one in result.incidents} == {Became.SKIPPED}


def a_missing_or_old_framework_is_named_with_both_versions(driver: Driver, folder: Path) -> None:
    assert driver.package is not None
    with without(driver), pytest.raises(ConfigurationError) as caught:
        driver.begin()
    assert all(part in str(caught.value) for part in (driver.package, driver.oldest, "nstall"))
    owner = importlib.import_module(driver.package)
    with at_version(owner, "0.1.2"), anew(driver), pytest.raises(ConfigurationError) as caught:
        driver.begin()
    assert f"{driver.named or driver.package} 0.1.2 is too old" in str(caught.value)
    assert driver.oldest in str(caught.value)
    assert driver.named or f"gradsentinel {__version__}" in str(caught.value)


@contextlib.contextmanager
def without(driver: Driver) -> Iterator[None]:
    """As where the framework is not installed."""
    kept = {name: sys.modules.get(name) for name in driver.hidden}
    with anew(driver):
        sys.modules.update(dict.fromkeys(driver.hidden))  # type: ignore[arg-type] # None: it cannot be imported
        try:
            yield
        finally:
            for name, module in kept.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module


@contextlib.contextmanager
def at_version(owner: Any, version: str) -> Iterator[None]:
    before, owner.__version__ = owner.__version__, version
    try:
        yield
    finally:
        owner.__version__ = before


@contextlib.contextmanager
def anew(driver: Driver) -> Iterator[None]:
    """Have our modules for this framework imported again, and those of before put back."""
    kept = {name: module for name, module in sys.modules.items() if name.startswith(driver.module)}
    others = {name: sys.modules[name] for name in driver.rivals if name in sys.modules}
    for name in (*kept, *others):
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(driver.module)]:
            del sys.modules[name]
        sys.modules.update(kept | others)


@dataclass(frozen=True)
class Case:
    """A clause with its settings, and what an adapter must not lack for it."""

    clause: Callable[..., None]
    needs: frozenset[str] = frozenset()


def _cases() -> Iterator[tuple[str, Case]]:
    def case(clause: Callable[..., None], needs: str = "", **settings: Any) -> tuple[str, Case]:
        told = ", ".join(f"{name} {getattr(value, '__name__', value)}" for name, value in settings.items())
        name = clause.__name__.replace("_", " ")
        return f"{name} ({told})" if told else name, Case(
            partial(clause, **settings), frozenset(needs.split())
        )

    yield case(a_healthy_run_is_untouched, accumulate=1, max_norm=None)
    yield case(a_healthy_run_is_untouched, "accumulate", accumulate=2, max_norm=0.5)
    yield case(events_come_once_a_step_before_clipping_and_in_order, accumulate=1)
    yield case(events_come_once_a_step_before_clipping_and_in_order, "accumulate", accumulate=3)
    for where, value in (("loss", NAN), ("gradient", INF), ("gradient", NAN)):
        yield case(a_dropped_step_changes_nothing, where=where, value=value)
    yield case(a_window_is_dropped_as_a_whole, "accumulate")
    yield case(a_spike_is_dropped)
    yield case(a_bad_sample_is_dropped_and_named)
    for at in (0, 5):
        yield case(a_label_that_is_no_class_drops_its_step_and_is_named, "batches", at=at)
    for accumulate in (1, 2):
        yield case(a_transient_fault_leaves_no_trace_after_a_retry, "retry accumulate", accumulate=accumulate)
    yield case(a_rollback_restores_everything_and_the_run_goes_on)
    yield case(a_rollback_can_draw_the_batches_since_then_once_more, "draws")
    yield case(a_step_that_ruins_the_state_is_undone)
    yield case(an_abort_leaves_a_good_state)
    for error in (KeyError, KeyboardInterrupt):
        yield case(the_users_own_exception_passes_unchanged, error=error)
    yield case(nothing_is_left_behind)
    yield case(two_at_once_do_not_see_each_other)
    yield case(the_same_objects_can_be_trained_twice)
    yield case(a_missing_or_old_framework_is_named_with_both_versions, "framework")


CLAUSES = dict(_cases())
"""By what they say."""


def cases(driver: Driver) -> list[str]:
    """Return the names of the clauses that hold for a driver's adapter."""
    lacks = {*driver.lacks, *(["framework"] if driver.package is None else [])}
    return [name for name, case in CLAUSES.items() if not case.needs & lacks]


def hold(name: str, driver: Driver, folder: Path) -> None:
    """Hold an adapter to one clause; nothing may have been swallowed on the way."""
    testing.clear_swallowed()
    CLAUSES[name].clause(driver, folder)
    assert list(testing.swallowed()) == []
