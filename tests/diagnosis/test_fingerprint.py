"""What is different about a batch, in one sentence."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradsentinel.diagnosis.fingerprint import what_is_different


def healthy(**fields):
    """A batch of numbers, whole numbers, a mask and labels; some fields replaced."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        "x": torch.randn(8, 4, generator=generator),
        "tokens": torch.arange(32).reshape(8, 4) + 5,
        "mask": torch.ones(8, 4).bool() & (torch.arange(4) < 3),
        "label": torch.arange(8) % 3,
        "weight": torch.ones(8) + torch.arange(8) / 8,
    }
    return {**batch, **fields}


STRANGE = {
    "nothing": (healthy(x=torch.empty(0, 4)), "has nothing in x"),
    "larger": (healthy(x=healthy()["x"] * 1e6), "in x (usually up to"),
    "below zero": (healthy(weight=healthy()["weight"] * torch.tensor([-1.0] + [1.0] * 7)), "never below 0"),
    "constant": (healthy(label=torch.full((8,), -100)), "holds -100 everywhere in label"),
    "all masked": (
        healthy(mask=torch.zeros(8, 4).bool()),
        "holds False everywhere in mask (usually 75% True)",
    ),
    "half masked": (
        healthy(mask=torch.ones(8, 4).bool() & (torch.arange(4) < 1)),
        "is 25% True in mask (usually 75%)",
    ),
    "a zero": (
        healthy(weight=torch.tensor([0.0] + [1.5] * 7)),
        "holds zeros in weight (12.5%, usually none)",
    ),
    "padding": (
        healthy(tokens=healthy()["tokens"] * (torch.arange(4) < 1)),
        "holds zeros in tokens (75.0%, usually none)",
    ),
    "another type": (healthy(x=healthy()["x"].half()), "holds x as float16 instead of float32"),
    "another shape": (healthy(x=torch.zeros(8, 9) + healthy()["x"][:, :1]), "has [9] in x for each record"),
    "not finite": (healthy(x=healthy()["x"].log()), "non-finite value(s) in x"),
    "a field less": ({k: v for k, v in healthy().items() if k != "mask"}, "has no mask"),
    "shifted": (healthy(tokens=healthy()["tokens"] + 100), "has a mean of"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_different_is_said(kind):
    strange, words = STRANGE[kind]
    said = what_is_different(strange, [healthy(), healthy()])
    assert words in said
    assert said.startswith("unlike the batches of the last healthy step, this one ")


def test_nothing_is_said_of_a_batch_like_the_others():
    other = healthy(x=torch.randn(8, 4, generator=torch.Generator().manual_seed(7)))
    assert what_is_different(other, [healthy()]) == ""
    assert what_is_different(other, []) == ""


def test_lengths_that_always_vary_are_no_news():
    batches = [
        torch.randn(4, length, generator=torch.Generator().manual_seed(length)) for length in (9, 7, 8)
    ]
    assert "for each record" not in what_is_different(batches[2], batches[:2])


def test_at_most_two_differences_are_told():
    strange = healthy(
        x=torch.zeros(8, 4), label=torch.zeros(8).long(), weight=torch.zeros(8), tokens=torch.zeros(8, 4)
    )
    assert what_is_different(strange, [healthy()]).count(", and ") == 1


ODD = {
    "nothing": lambda: None,
    "text": lambda: "text",
    "empty": list,
    "meta": lambda: {"x": torch.empty(3, device="meta")},
    "sparse": lambda: {"x": torch.eye(3).to_sparse()},
    "rows": lambda: {"x": torch.eye(4).to_sparse_csr()},
    "nested": lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    "complex": lambda: {"x": torch.ones(2, dtype=torch.complex64)},
    "float8": lambda: {"x": torch.ones(2).to(torch.float8_e5m2)},
    "quantised": lambda: {"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
    "one number": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_odd_batches_do_no_harm(odd):
    batch = ODD[odd]()
    assert isinstance(what_is_different(batch, [batch]), str)
    assert isinstance(what_is_different(batch, [healthy()]), str)


def test_a_verdict_of_bad_data_says_what_is_different(sentinel_for):
    def forward(model, batch):
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    model = nn.Linear(4, 3)
    sentinel = sentinel_for(model, forward)
    good = {"x": torch.randn(6, 4), "y": torch.tensor([0, 1, 2, 0, 1, 2])}
    bad = {"x": torch.randn(6, 4), "y": torch.full((6,), -100)}
    for batch in sentinel.steps([good, bad]):
        sentinel.backward(forward(model, batch))
        sentinel.step()
    found = sentinel.incidents[0].diagnosis
    assert found.cause == "data"
    assert "holds -100 everywhere in y (usually from 0 to 2)" in found.evidence[-1]
    assert any(
        "with the same weights the batch of the last healthy step is finite" in e for e in found.evidence
    )


def test_so_does_one_of_a_value_that_is_not_finite(sentinel_for):
    model = nn.Linear(4, 3)
    sentinel = sentinel_for(model, lambda model, x: model(x).pow(2).mean())
    batches = [torch.ones(6, 4), torch.ones(6, 4).log().reciprocal()]
    for batch in sentinel.steps(batches):
        sentinel.backward(model(batch).pow(2).mean())
        sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.diagnosis.phase == "input"
    assert "holds 24 non-finite value(s)" in incident.diagnosis.evidence[-1]


def test_ids_are_no_difference():
    """They go up from batch to batch, whatever they are called."""
    batches = [
        {"uid": torch.arange(8) + 100 * n, "meta": {"id": torch.arange(8) + n * 900}} for n in range(2)
    ]
    assert what_is_different(batches[1], batches[:1]) == ""
