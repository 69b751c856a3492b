"""Real parameter lists: frozen, empty, quantised, meta, complex, sparse, tied, lazy: no reason to trip."""

import pytest
import torch
from torch import nn

from gradsentinel import MagnitudeCallback, NanCallback, Rollback

FLOAT8 = [name for name in dir(torch) if name.startswith(("float8", "float4")) and hasattr(torch, name)]

ANIMALS = {
    "float32": lambda: torch.randn(3),
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(3).bfloat16(),
    "float16": lambda: torch.randn(3).half(),
    "empty": lambda: torch.empty(0),
    "empty matrix": lambda: torch.empty(0, 4),
    "scalar": lambda: torch.tensor(1.0),
    "int8": lambda: torch.ones(3, dtype=torch.int8),
    "uint8": lambda: torch.ones(3, dtype=torch.uint8),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "int64": lambda: torch.ones(3, dtype=torch.int64),
    "bool": lambda: torch.ones(2, dtype=torch.bool),
    "complex64": lambda: torch.randn(3, dtype=torch.complex64),
    "complex128": lambda: torch.randn(3, dtype=torch.complex128),
    "conjugate view": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "not contiguous": lambda: torch.randn(3, 3).t()[:, ::2],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    "huge": lambda: torch.full((8,), 3e38),
    "subnormal": lambda: torch.full((8,), 1e-42),
    "minus zero": lambda: torch.full((8,), -0.0),
    **{
        name: lambda name=name: torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
        for name in FLOAT8
    },
}


def squared(model):
    return lambda x: model(x).pow(2).mean()


def healthy(watch, drive, model, optimizer, loss_of, batches, **settings):
    """Nothing is wrong: any alarm, and any exception (the conftest sees to that), is a failure."""
    sentinel = watch(
        model,
        optimizer,
        NanCallback(),
        MagnitudeCallback(max_value=3.39e38, max_parameter_norm=1e30, max_global_norm=1e30),
        Rollback(every=1, confirm_after=0),
        **settings,
    )
    drive(sentinel, batches, loss_of, max_norm=1.0)
    assert sentinel.incidents == ()
    return sentinel


@pytest.mark.parametrize("where", ["parameter", "buffer"])
@pytest.mark.parametrize("animal", ANIMALS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_anything_may_lie_frozen_in_a_model(animal, where, watch, drive, nonfinite):
    """Megatron-LM#5529, torchrec#3809, trl#4901: the detector itself raises, and kills the run.

    No anomaly at all; a rollback restores the animal as well, and a bad batch beside it is still caught.
    """
    model = nn.Linear(4, 1)
    tensor = ANIMALS[animal]()
    if where == "parameter":
        model.register_parameter("animal", nn.Parameter(tensor, requires_grad=False))
    else:
        model.register_buffer("animal", tensor)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    sentinel = healthy(watch, drive, model, optimizer, squared(model), [torch.randn(8, 4) for _ in range(3)])
    bad = [torch.randn(8, 4) for _ in range(4)]
    actions = []
    for index, batch in enumerate(sentinel.steps(bad)):
        loss = squared(model)(batch)
        sentinel.backward(loss * torch.nan if index in (0, 1, 2) else loss)
        sentinel.step()
        actions.append(sentinel.last_action.label)
    assert actions == ["skip", "skip", "rollback", "continue"]
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize(
    "animal", ["float64", "bfloat16", "float16", "scalar", "complex64", "complex128", "empty", "meta"]
)
def test_animals_in_the_optimizer(animal, watch, drive, nonfinite):
    """Trainable, in the optimizer, and ahead of all others; those without a gradient are left alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.animal = nn.Parameter(ANIMALS[animal]())
            self.lin = nn.Linear(4, 1)

        def forward(self, x):
            out = self.lin(x)
            if animal in ("meta", "empty"):
                return out
            part = self.animal.abs() if self.animal.is_complex() else self.animal
            return out + part.float().pow(2).sum()

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    healthy(watch, drive, model, optimizer, squared(model), [torch.randn(8, 4) for _ in range(3)])
    assert nonfinite(model, optimizer) == []


def test_nan_among_mixed_dtypes_is_named(watch, drive, told, named, nonfinite):
    """fp16, bf16, fp32, fp64 and complex in one model; exactly one gradient is bad."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("float16", "bfloat16", "float32", "float64", "complex64"):
                self.register_parameter(f"w_{name}", nn.Parameter(ANIMALS[name]()))

        def loss(self, bad):
            total = sum(p.abs().double().pow(2).sum() for p in self.parameters())
            return total + (getattr(self, f"w_{bad}").abs() * 0).pow(2).sum().sqrt() if bad else total

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(after=10))
    kinds = ["float16", "bfloat16", "float32", "float64", "complex64"]
    drive(sentinel, [bad for kind in kinds for bad in (kind, "")], model.loss, max_norm=1.0)
    assert told(sentinel) == [(2 * i, "nonfinite_gradient", "skipped") for i in range(5)]
    assert [named(incident) for incident in sentinel.incidents] == [{f"w_{kind}"} for kind in kinds]
    assert nonfinite(model, optimizer) == []


def test_all_frozen_but_one(watch, drive, told, named, nonfinite):
    """Fine-tuning of a single bias."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=parameter is model[2].bias)
    optimizer = torch.optim.Adam(model.parameters())
    sentinel = watch(model, optimizer)
    batches = [torch.randn(8, 4) for _ in range(3)]
    batches[1][0, 0] = torch.nan
    assert drive(sentinel, batches, squared(model)) == ["continue", "skip", "continue"]
    assert named(sentinel.incidents[0]) == {"2.bias"}
    assert nonfinite(model, optimizer) == []


def test_no_gradient_at_all(watch, drive):
    """A step in which no parameter of the optimizer took part (an unused branch): nothing to judge."""
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "other": nn.Linear(4, 1)})
    optimizer = torch.optim.Adam(model["other"].parameters())
    sentinel = watch(model, optimizer)
    for step in range(4):
        which = model["used"] if step % 2 else model["other"]
        sentinel.backward(which(torch.randn(8, 4)).pow(2).mean())
        sentinel.step(max_norm=1.0)
    assert sentinel.incidents == ()


def test_parameter_that_is_unused_in_some_steps(watch, drive, told, nonfinite):
    """Its gradient is None in every other step; its NaN in the others is found."""
    model = nn.ModuleDict({"always": nn.Linear(4, 1), "sometimes": nn.Linear(4, 1)})
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer)

    def loss_of(step):
        x = torch.randn(8, 4)
        loss = model["always"](x).pow(2).mean()
        if step % 2:
            loss = loss + model["sometimes"](x).pow(2).mean()
        if step == 3:
            loss = loss + (model["sometimes"].bias * 0).sqrt().sum()
        return loss

    drive(sentinel, range(6), loss_of)
    assert told(sentinel) == [(3, "nonfinite_gradient", "skipped")]
    assert [t.name for t in sentinel.incidents[0].tensors] == ["sometimes.bias"]
    assert nonfinite(model, optimizer) == []


def test_tied_weights(watch, drive, told, nonfinite):
    """Input and output embedding are one tensor: checked, named and restored once."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer, NanCallback(), Rollback())
    factors = [1.0, torch.nan, 1.0]
    drive(sentinel, factors, lambda f: model(torch.tensor([1, 2])).pow(2).mean() * f)
    assert told(sentinel) == [(1, "nonfinite_loss", "skipped")]
    assert [t.name for t in sentinel.incidents[0].tensors] == ["embed.weight"]
    assert model.head.weight is model.embed.weight
    assert nonfinite(model, optimizer) == []


def test_complex_valued_network(watch, drive, told, nonfinite):
    """Complex layers train, and a NaN batch is dropped."""
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 1, dtype=torch.complex64))
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    batches = [torch.randn(8, 4, dtype=torch.complex64) for _ in range(4)]
    batches[2][0, 0] = complex(0, torch.nan)
    actions = drive(sentinel, batches, lambda x: model(x).abs().pow(2).mean(), max_norm=1.0)
    assert actions == ["continue", "continue", "skip", "continue"]
    assert told(sentinel) == [(2, "nonfinite_input", "skipped")]
    assert nonfinite(model, optimizer) == []


def test_parameter_added_later(watch, drive, told, named, nonfinite):
    """A LoRA adapter joins in the middle of the run: named as it is in the model, caught like the others."""
    model = nn.ModuleDict({"base": nn.Linear(4, 1)})
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer, NanCallback(), Rollback())
    drive(sentinel, [torch.randn(8, 4)], lambda x: model["base"](x).pow(2).mean())
    model["adapter"] = nn.Linear(4, 1)
    optimizer.add_param_group({"params": model["adapter"].parameters()})

    def loss_of(batch):
        x, bad = batch
        out = (model["base"](x) + model["adapter"](x)).pow(2).mean()
        return out + (model["adapter"].weight * 0).pow(2).sum().sqrt() if bad else out

    drive(sentinel, [(torch.randn(8, 4), bad) for bad in (False, True, False)], loss_of)
    assert told(sentinel) == [(2, "nonfinite_gradient", "skipped")]
    assert named(sentinel.incidents[0]) == {"adapter.weight"}
    assert nonfinite(model, optimizer) == []
