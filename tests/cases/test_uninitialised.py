"""Wrong before the first step: torch.empty parameters, half-loaded checkpoints, forgotten buffers."""

import json

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, SnapshotSaver, TrainingAborted


class Head(nn.Module):
    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, dtype=dtype)
        self.head = nn.ParameterDict({"scale": nn.Parameter(torch.full((4,), torch.nan, dtype=dtype))})

    def forward(self, x):
        return self.body(x) * self.head["scale"]


def incidents_of(run_dir):
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("incidents/*/incident.json"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_uninitialised_parameter_is_told_before_training(dtype, optimizer_class, watch, run_dir):
    """torch.empty keeps old memory, here NaN: the first loss is NaN and the data or the model is blamed.

    Told at once, by name, with what to do; no step is made, the optimizer is not to blame.
    """
    model = Head(dtype)
    with pytest.raises(TrainingAborted, match=r"before the first step.*'head\.scale'"):
        watch(model, optimizer_class(model.parameters(), lr=0.1), NanCallback(), Rollback(), SnapshotSaver())
    (incident,) = incidents_of(run_dir)
    assert (incident["step"], incident["kind"], incident["outcome"]) == (0, "nonfinite_parameter", "aborted")
    assert [(p["name"], p["nonfinite"], p["numel"]) for p in incident["parameters"]] == [("head.scale", 4, 4)]
    assert (incident["diagnosis"]["cause"], incident["diagnosis"]["phase"]) == ("setup", "setup")
    assert "initialise 'head.scale'" in incident["diagnosis"]["remedy"][0]


def test_several_are_counted(watch, run_dir):
    """A whole layer that was never filled: the first by name, the others counted, all in the record."""
    model = nn.Sequential(nn.Linear(2, 2), nn.utils.skip_init(nn.Linear, 2, 2))
    for parameter in model[1].parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(TrainingAborted, match=r"'1\.weight'.* and 1 more"):
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [p["name"] for p in incidents_of(run_dir)[0]["parameters"]] == ["1.weight", "1.bias"]


def test_a_single_infinity_in_a_weight(watch):
    """A trainable parameter has no business holding Inf, be it one element."""
    model = nn.Linear(2, 2)
    model.weight.data[1, 0] = torch.inf
    with pytest.raises(TrainingAborted, match="'weight' holds 1 non-finite of 4 values"):
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_moments_of_a_poisoned_checkpoint(watch, run_dir):
    """DeepSpeed PR 8035: clean weights, but the optimizer state that came with them is poisoned."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = torch.inf
    with pytest.raises(TrainingAborted, match="optimizer state 'weight:exp_avg_sq'"):
        watch(model, optimizer)
    assert incidents_of(run_dir)[0]["kind"] == "nonfinite_state"


def test_frozen_parameter_full_of_nan(watch, drive, told, named):
    """A frozen backbone that was never loaded: told by name; whether it is used, only the user knows."""
    model = Head()
    model.head["scale"].requires_grad_(requires_grad=False)
    model.body.weight.requires_grad_(requires_grad=True)
    sentinel = watch(model, torch.optim.SGD(model.body.parameters(), lr=0.1))
    assert told(sentinel) == [(0, "nonfinite_state", "reported")]
    assert named(sentinel.incidents[0]) == {"head.scale"}
    assert "'head.scale'" in sentinel.incidents[0].message
    assert drive(sentinel, [torch.randn(2, 4)], lambda x: model.body(x).pow(2).mean()) == ["continue"]


def test_frozen_parameter_of_minus_infinity(watch, drive, nonfinite):
    """A frozen logit bias of -inf forbids a class; it is meant, with Rollback's checks too."""
    model = nn.Linear(4, 3)
    model.forbidden = nn.Parameter(torch.tensor([0.0, -torch.inf, 0.0]), requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())
    rollback = Rollback(every=1, confirm_after=0)
    sentinel = watch(model, optimizer, NanCallback(), rollback)
    labels = torch.tensor([0, 2])
    actions = drive(
        sentinel,
        [torch.randn(2, 4) for _ in range(3)],
        lambda x: nn.functional.cross_entropy(model(x) + model.forbidden, labels),
    )
    assert actions == ["continue"] * 3
    assert sentinel.incidents == ()
    assert rollback.known_good_steps == (1, 2, 3)
    assert nonfinite(model, optimizer) == ["0:forbidden"]


def test_checkpoint_loaded_between_construction_and_training(watch):
    """The state is taken when the run begins: what was loaded in between is what a rollback restores."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(after=1))
    loaded = {"weight": torch.full((1, 4), 2.0), "bias": torch.zeros(1)}
    model.load_state_dict(loaded)
    sentinel.backward(model(torch.ones(2, 4)).pow(2).mean())
    sentinel.step()
    sentinel.backward(model(torch.ones(2, 4)).pow(2).mean() * torch.nan)
    sentinel.step()
    assert str(sentinel.incidents[0].outcome) == "rolled_back"
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
