"""Failures thought up after the rules were written: cause, phase, operator, place, samples."""

import pytest
from verdicts import FAILURES, run_failure, wrong_in


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile's own
@pytest.mark.filterwarnings("ignore:(std|var).*degrees of freedom")
@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case.name)
def test_failure(case, run_dir):
    assert wrong_in(case, run_failure(case, run_dir)) == []


def test_every_failure_is_another_one():
    names = [case.name for case in FAILURES]
    assert len(set(names)) == len(names)
