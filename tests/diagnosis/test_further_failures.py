"""Failures thought up after the rules were written: cause, phase, operator, place, samples."""

import pytest
import torch
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


def test_a_batch_that_was_fine_before_shows_that_the_formula_does_not_make_the_zeros(diagnosed):
    """The same zeros, moved or not, but other records had none: it is the batch."""

    def forward(model, b):
        kept = torch.relu(b["gap"])  # 0 also where a negative number moves a little
        return (model(b["x"]).sum(1) * (1 / kept).sum(1)).mean()

    batches = [{"x": torch.randn(6, 4), "gap": torch.rand(6, 3) + 0.5} for _ in range(3)]
    batches[2]["gap"] = -batches[2]["gap"]
    found = diagnosed(torch.nn.Linear(4, 4), batches, forward).diagnosis
    assert (found.cause, found.op) == ("data", "aten.reciprocal.default")


def test_a_literal_beyond_a_narrow_type_has_its_own_remedy(run_dir):
    case = next(case for case in FAILURES if case.name.startswith("a number that float16 does not hold"))
    remedy = run_failure(case, run_dir).diagnosis.remedy[0]
    assert "instead of -1e+09: torch.finfo(x.dtype).min" in remedy


class Sparse(torch.nn.Module):
    """Holds an adjacency that nobody can flatten, beside the deviations that it divides by."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
        self.edges = torch.eye(6).to_sparse()
        self.register_buffer("links", torch.eye(6).to_sparse())
        self.deviation = torch.tensor([1.0, 0.0, 2.0, 0.5])

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.lin(x / self.deviation))


def test_sparse_tensors_beside_the_guilty_one_do_no_harm(diagnosed):
    found = diagnosed(Sparse(), [torch.randn(6, 4)], lambda model, x: model(x).pow(2).mean()).diagnosis
    assert (found.cause, found.op) == ("setup", "aten.div.Tensor")
    assert "Sparse.deviation holds 1 zero" in " ".join(found.evidence)
