"""Megatron's own rerun machine and GradSentinel, both on."""

import pytest
from layouts import LAYOUTS, Fault, replace
from outcomes import Expected, check_cured, check_incidents, check_untouched, differences
from results import outcome, release

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.xdist_group("megatron"),
    pytest.mark.timeout(200),
    pytest.mark.skipif(release() < (0, 11), reason="the machine of 0.10 ends this loop, watched or not"),
]

CALLBACKS = "NanCallback, Retry, Rollback(every=2, confirm_after=1)"
MODES = ["validate_results", pytest.param("report_determinism_stats", marks=pytest.mark.slow)]
FAULT = Fault(rank=1, parameter="layers.1.mlp.linear_fc1.weight", step=3)


@pytest.mark.parametrize("name", ["pp2", pytest.param("tp2dp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_both_run_a_healthy_training_as_it_is(megatron, alone, tmp_path, name, mode):
    layout = LAYOUTS[name]
    settings = {"machine": mode, "suspicious": (2,), "steps": 5}
    watched = megatron.run("train", layout.world, layout, tmp_path, callbacks=CALLBACKS, **settings)
    plain = alone(layout, **settings)
    check_untouched(outcome(plain), outcome(watched))
    twice = {"validate_results": 6, "report_determinism_stats": 10}[mode]
    assert {result["reruns"] for result in (*plain, *watched)} == {twice}
    for result in watched:
        closed = [event[1] for event in result["events"] if event[0] == "AfterStep"]
        assert closed == list(range(5))


@pytest.mark.parametrize("mode", MODES)
def test_a_transient_fault_is_retried_while_the_machine_is_on(megatron, alone, tmp_path, mode):
    layout = LAYOUTS["pp2"]
    settings = {"machine": mode, "suspicious": (2,), "steps": 5}
    fault = replace(FAULT, persistent=mode != "validate_results")  # that mode runs each step twice anyway
    watched = megatron.run("train", 2, layout, tmp_path, callbacks=CALLBACKS, faults=(fault,), **settings)
    if fault.persistent:
        check_incidents(outcome(watched), [Expected(step=3, outcome="skipped", rank=1)])
        without = outcome(alone(layout, left_out=(3,), **settings), told=False)
        assert differences(without, outcome(watched, told=False)) == []
        return
    check_cured(
        outcome(alone(layout, **settings)), outcome(watched), [Expected(step=3, outcome="retried", rank=1)]
    )


def test_a_fault_in_a_step_that_the_machine_runs_again_is_gone_with_it(megatron, alone, tmp_path):
    layout, settings = LAYOUTS["pp2"], {"machine": "validate_results", "suspicious": (3,), "steps": 5}
    watched = megatron.run("train", 2, layout, tmp_path, callbacks=CALLBACKS, faults=(FAULT,), **settings)
    check_untouched(outcome(alone(layout, **settings)), outcome(watched))
    assert [result["struck"] for result in watched] == [0, 1]
