"""Failures thought up after the rules were written: cause, phase, operator, place, samples."""

import pytest
from failures import FAILURES


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case.name)
def test_failure(case, diagnosed, line):
    model = case.model()
    if case.prepare is not None:
        case.prepare(model)
    batches = case.batch()
    batches = batches if case.accumulate > 1 else [batches]
    incident = diagnosed(
        model,
        batches,
        case.forward,
        after_backward=case.after_backward,
        accumulate=case.accumulate,
        optimizer=case.optimizer(model),
        max_norm=None,
    )
    assert incident is not None
    found = incident.diagnosis
    causes = (case.cause,) if isinstance(case.cause, str) else case.cause
    got = (found.cause, found.phase, found.op, found.node, found.source)
    assert found.cause in causes, got
    assert case.phase is None or found.phase == case.phase, got
    assert case.op is None or found.op == case.op, got
    assert case.node is None or found.node == case.node, got
    assert case.line is None or found.source == line(case.forward, case.line), got
    assert case.module is None or found.module == case.module, got
    assert case.microbatch is None or incident.microbatch == case.microbatch
    assert tuple(s.position for s in incident.samples) == case.samples
    assert found.remedy
    assert found.evidence
