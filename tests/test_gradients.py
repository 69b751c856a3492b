"""The gradient view: the numbers of `clip_grad_norm_` for every kind of gradient, in one shared pass."""

import math
import weakref
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import AfterBackward, BeforeClip, Kind, MagnitudeCallback, NanCallback, Rollback, Sentinel
from gradsentinel.gradients import GradientView
from gradsentinel.measures.factor import factor_on_host
from loops import build, differences, finish, make_batches, train_watched

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators")  # torch 2.6 says it of a CPU mesh

NAN, INF = float("nan"), float("inf")
SHAPES = [(7, 5), (5,), (), (3, 2, 4), (0, 3), (1,)]


def make_parameters(dtypes, shapes=SHAPES, *, factor=1.0):
    """One parameter with a gradient per shape, the dtypes in turn."""
    parameters = []
    for index, shape in enumerate(shapes):
        dtype = dtypes[index % len(dtypes)]
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = (factor * torch.randn(shape, dtype=dtype)).to(dtype)
        parameters.append(parameter)
    return parameters


def view_of(parameters, **settings):
    return GradientView(
        ((f"p{index}", p.grad) for index, p in enumerate(parameters) if p.grad is not None), **settings
    )


def clone_of(parameters):
    copies = []
    for parameter in parameters:
        copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        copy.grad = None if parameter.grad is None else parameter.grad.detach().clone()
        copies.append(copy)
    return copies


def check_against_torch(parameters, max_norm=1.0, norm_type=2.0):
    """Hold norm and clip against torch's own, bit for bit; return the norm."""
    reference = clone_of(parameters)
    expected = nn.utils.clip_grad_norm_(reference, max_norm, norm_type=norm_type)
    view = view_of(parameters, norm_type=norm_type)
    norm = view.total_norm
    view.clip_(max_norm)
    assert differences(norm, expected) == []
    assert differences([p.grad for p in parameters], [p.grad for p in reference]) == []
    return norm


DTYPES = {
    "float32": [torch.float32],
    "float64": [torch.float64],
    "bfloat16": [torch.bfloat16],
    "float16": [torch.float16],
    "complex64": [torch.complex64],
    "float32 and bfloat16": [torch.float32, torch.bfloat16],
    "float64 and float32": [torch.float64, torch.float32],
    "float16, bfloat16 and float32": [torch.float16, torch.bfloat16, torch.float32],
    "complex64 and float32": [torch.complex64, torch.float32],
}


@pytest.mark.parametrize("max_norm", [0.5, 1e9, INF])
@pytest.mark.parametrize("norm_type", [1, 2, 3, INF])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
def test_norm_and_clip_are_those_of_torch(dtypes, norm_type, max_norm):
    # torch itself has no largest value of an empty tensor
    shapes = [shape for shape in SHAPES if 0 not in shape] if norm_type == INF else SHAPES
    norm = check_against_torch(make_parameters(dtypes, shapes), max_norm, norm_type)
    assert 0 < norm < INF


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_nonfinite_gradient_gives_what_torch_gives(value):
    parameters = make_parameters([torch.float32])
    parameters[1].grad[2] = value
    norm = check_against_torch(parameters)
    assert not torch.isfinite(norm)


def test_the_order_in_which_dtypes_appear_is_torchs_own():
    """Summing in another order would round differently."""
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.float32]
    for seed in range(20):
        torch.manual_seed(seed)
        check_against_torch(make_parameters(dtypes, [(9,)] * 11))


def test_no_gradients_at_all():
    view = GradientView(iter(()))
    assert float(view.total_norm) == 0.0
    assert float(view.max_norm) == float(view.max_magnitude) == 0.0
    assert view.safe_norm() == 0.0
    assert view.norms.tolist() == view.magnitudes.tolist() == []
    assert (len(view), view.names, view.evidence()) == (0, (), ())
    view.clip_(1.0)
    view.clip_(1.0, total_norm=2.0)


def test_numbers_per_parameter():
    view = GradientView([("a", torch.tensor([3.0, -4.0])), ("b", torch.tensor([[-6.0, 0.0], [0.0, 8.0]]))])
    assert view.names == ("a", "b")
    assert view.norms.tolist() == [5.0, 10.0]
    assert view.magnitudes.tolist() == [4.0, 8.0]
    assert (float(view.max_norm), float(view.max_magnitude)) == (10.0, 8.0)
    assert float(view.total_norm) == pytest.approx(math.sqrt(125))
    assert view.safe_norm() == pytest.approx(math.sqrt(125))
    assert float(view.norm_of("b")) == 10.0
    with pytest.raises(KeyError, match="'c' has no gradient"):
        view.norm_of("c")


def test_evidence_names_counts_and_places():
    bad = torch.ones(4, 3)
    bad[2, 1], bad[3, 0] = NAN, -INF
    view = GradientView([("fine", torch.ones(2)), ("bad", bad), ("inf", torch.tensor(INF))])
    found = {entry.name: entry for entry in view.evidence()}
    assert set(found) == {"bad", "inf"}
    assert (found["bad"].nonfinite, found["bad"].numel, found["bad"].first_index) == (2, 12, (2, 1))
    assert (found["inf"].nonfinite, found["inf"].first_index) == (1, ())


# -- the zoo ---------------------------------------------------------------------------------------


class Zoo:
    """Gradients that are not plain, each beside the dense one it stands for."""

    @staticmethod
    def uncoalesced():
        indices = torch.tensor([[1, 3, 1, 0]])
        values = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0], [0.5, 0.25]])
        return torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True)

    @staticmethod
    def coalesced():
        return Zoo.uncoalesced().coalesce()

    @staticmethod
    def complex_numbers():
        return torch.tensor([1 + 2j, -3j, 4 - 0.5j])

    @staticmethod
    def conjugated():
        return Zoo.complex_numbers().conj()

    @staticmethod
    def float8_e4m3fn():
        return torch.tensor([[1.5, -448.0], [0.0, 3.25]]).to(torch.float8_e4m3fn)

    @staticmethod
    def float8_e5m2():
        return torch.tensor([1.5, -57344.0, 0.0, 3.0]).to(torch.float8_e5m2)

    @staticmethod
    def scalar():
        return torch.tensor(-3.0)

    @staticmethod
    def transposed():
        return torch.arange(12.0).reshape(3, 4).t()

    @staticmethod
    def strided():
        return torch.arange(24.0).reshape(4, 6)[::2, 1::2]

    @staticmethod
    def empty():
        return torch.zeros(0, 4)

    @staticmethod
    def channels_last():
        return torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)


ZOO = [name for name in vars(Zoo) if not name.startswith("_")]


def dense(tensor):
    """The values as the arithmetic should see them."""
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor.detach().clone()


@pytest.mark.parametrize("order", [1, 2, INF])
@pytest.mark.parametrize("kind", ZOO)
def test_the_zoo_counts_like_its_dense_values(kind, order):
    gradient, other = getattr(Zoo, kind)(), torch.tensor([2.0, -1.0])
    values = dense(gradient)
    view = GradientView([("odd", gradient), ("plain", other)], norm_type=order)
    assert view.unchecked == {}
    norms = [torch.linalg.vector_norm(v, order) if v.numel() else torch.tensor(0.0) for v in (values, other)]
    torch.testing.assert_close(view.norms, torch.stack(norms))
    torch.testing.assert_close(view.total_norm, torch.linalg.vector_norm(torch.stack(norms), order))
    peak = values.abs().max() if values.numel() else torch.tensor(0.0)
    torch.testing.assert_close(view.magnitudes, torch.stack([peak, torch.tensor(2.0)]))
    assert view.evidence() == ()


@pytest.mark.parametrize("safely", [False, True], ids=["by the view's norm", "by the safe norm"])
@pytest.mark.parametrize("kind", ZOO)
def test_the_zoo_is_clipped_like_its_dense_values(kind, safely):
    gradient, other = getattr(Zoo, kind)(), torch.tensor([2.0, -1.0])
    values, layout = (
        dense(gradient),
        (gradient.layout, gradient.stride() if gradient.layout is torch.strided else ()),
    )
    view = GradientView([("odd", gradient), ("plain", other)])
    norm = view.safe_norm()
    assert norm == pytest.approx(float(view.total_norm), rel=1e-6)
    view.clip_(1.0, total_norm=norm if safely else None)
    scale = 1.0 / (norm + 1e-6)
    # a float8 value is rounded to three or two bits once more
    rough = {"rtol": 0.0725, "atol": 2e-3} if gradient.dtype.itemsize == 1 else {}
    torch.testing.assert_close(dense(gradient), values * scale, **rough)
    torch.testing.assert_close(other, torch.tensor([2.0, -1.0]) * scale)
    assert layout == (gradient.layout, gradient.stride() if gradient.layout is torch.strided else ())


def test_an_expanded_gradient_counts_every_element():
    """What `loss.sum().backward()` leaves in a bias: one number, seen many times."""
    gradient = torch.tensor([2.0]).expand(9)
    view = GradientView([("bias", gradient)])
    assert float(view.total_norm) == 6.0
    assert view.safe_norm() == 6.0
    (evidence,) = GradientView([("bias", torch.tensor([NAN]).expand(3, 3))]).evidence()
    assert (evidence.nonfinite, evidence.first_index) == (9, (0, 0))


@pytest.mark.parametrize(
    ("gradient", "reason"),
    [
        (torch.ones(3, dtype=torch.int64), "int64 is always finite"),
        (torch.ones(3, dtype=torch.bool), "bool is always finite"),
        (torch.ones(3, device="meta"), "meta tensor"),
    ],
    ids=["integer", "bool", "meta"],
)
def test_what_cannot_be_judged_is_listed_and_left_alone(gradient, reason):
    view = GradientView([("odd", gradient), ("plain", torch.tensor([3.0, 4.0]))])
    assert view.unchecked == {"odd": reason}
    assert view.names == ("plain",)
    assert float(view.total_norm) == 5.0
    view.clip_(1.0)
    if gradient.device.type != "meta":
        assert bool((gradient == 1).all())


@pytest.mark.parametrize(
    "kind", ["uncoalesced", "complex_numbers", "float8_e4m3fn", "float8_e5m2", "strided"]
)
def test_nan_is_found_in_the_zoo(kind):
    gradient = getattr(Zoo, kind)()
    if kind == "uncoalesced":
        gradient._values()[2, 1] = NAN  # row 1, which occurs twice
        place = (1, 1)
    elif kind == "complex_numbers":
        gradient = torch.complex(gradient.real, torch.tensor([1.0, NAN, 1.0]))  # only the imaginary part
        place = (1,)
    elif kind == "strided":
        gradient[1, 0] = NAN
        place = (1, 0)
    else:
        flat = gradient.to(torch.float32)
        flat.view(-1)[2] = NAN
        gradient = flat.to(gradient.dtype)
        place = (1, 0) if kind == "float8_e4m3fn" else (2,)
    view = GradientView([("plain", torch.ones(2)), ("odd", gradient)])
    assert not torch.isfinite(view.total_norm)
    assert not torch.isfinite(view.max_magnitude)
    assert not math.isfinite(view.safe_norm())
    (evidence,) = view.evidence()
    assert (evidence.name, evidence.nonfinite, evidence.first_index) == ("odd", 1, place)


def test_sparse_values_that_overflow_only_together_are_found():
    """Each entry is finite; the row they add up to is not."""
    big = torch.finfo(torch.float32).max
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[2, 2]]), torch.tensor([big, big]), (4,), check_invariants=True
    )
    (evidence,) = GradientView([("embedding", gradient)]).evidence()
    assert evidence.first_index == (2,)


# -- models with such gradients --------------------------------------------------------------------


class Odd(nn.Module):
    """Frozen, unused and tied parameters, an empty one, a 0-dim one and a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.phase = nn.Parameter(torch.tensor([1 + 1j, 1 - 1j, 0.5j, 1 + 0j]))

    def forward(self, tokens):
        x = self.frozen(self.embedding(tokens))
        x = self.decoder(self.encoder(x)) * self.scale
        return (x * self.phase).abs().sum() + self.empty.sum()


@pytest.mark.parametrize("where", ["embedding.weight", "encoder.weight", "scale", "phase", None])
def test_a_model_with_odd_parameters(where, run_dir):
    torch.manual_seed(0)
    model, tokens = Odd(), torch.tensor([1, 7, 1, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names = {}
    with Sentinel(
        model, optimizer, callbacks=[NanCallback(), Rollback(every=2)], run_dir=run_dir
    ) as sentinel:
        sentinel.on(BeforeClip, lambda event: names.update({event.step: event.gradients.names}))
        before = None
        for step, batch in enumerate(sentinel.steps([tokens] * 4)):
            if step == 2 and where is not None:
                before = [p.detach().clone() for p in model.parameters()]
                handle = model.get_parameter(where).register_hook(lambda g: g * NAN)
            sentinel.backward(model(batch))
            sentinel.step(max_norm=1.0)
            if step == 2 and where is not None:
                handle.remove()
                assert differences([p.detach() for p in model.parameters()], before) == []
    # once each, tied or not; the frozen and unused ones have no gradient
    expected = {
        "embedding.weight",
        "encoder.weight",
        "encoder.bias",
        "decoder.bias",
        "empty",
        "scale",
        "phase",
    }
    assert set(names[0]) == expected
    assert len(names[0]) == len(expected)
    if where is None:
        assert sentinel.incidents == ()
    else:
        (incident,) = sentinel.incidents
        assert (incident.step, incident.kind) == (2, Kind.NONFINITE_GRADIENT)
        assert [tensor.name for tensor in incident.tensors] == [where]


def test_main_grad_is_watched_and_dropped(run_dir):
    """Some frameworks accumulate into an attribute of their own and leave `.grad` empty."""
    weight = nn.Parameter(torch.ones(3))
    weight.main_grad = torch.tensor([3.0, 0.0, 4.0])
    model = nn.Module()
    model.weight = weight
    sentinel = Sentinel(model, torch.optim.SGD([weight], lr=0.1), callbacks=[NanCallback()], run_dir=run_dir)
    assert float(sentinel.step(max_norm=1.0)) == 5.0
    torch.testing.assert_close(weight.main_grad, torch.tensor([0.6, 0.0, 0.8]))
    weight.main_grad = torch.tensor([3.0, NAN, 4.0])
    sentinel.step(max_norm=1.0)
    sentinel.close()
    (incident,) = sentinel.incidents
    assert [tensor.name for tensor in incident.tensors] == ["weight"]
    assert weight.main_grad.tolist() == [0.0, 0.0, 0.0]


# -- distributed tensors ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh, tensor, placement=None):
    return distribute_tensor(tensor, mesh, [placement or Shard(0)])


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["shard", "replica"])
@pytest.mark.parametrize("norm_type", [1, 2, INF])
def test_distributed_gradients_are_those_of_torch(mesh, norm_type, placement):
    values = [torch.randn(6, 4), torch.randn(8), torch.randn(3, 3)]
    reference = [nn.Parameter(sharded(mesh, torch.zeros_like(v), placement)) for v in values]
    for parameter, value in zip(reference, values, strict=True):
        parameter.grad = sharded(mesh, value.clone(), placement)
    expected = nn.utils.clip_grad_norm_(reference, 0.5, norm_type=norm_type).full_tensor()
    gradients = [sharded(mesh, value.clone(), placement) for value in values]
    view = GradientView(zip("abc", gradients, strict=True), norm_type=norm_type)
    assert not isinstance(view.total_norm, DTensor)
    assert differences(view.total_norm, expected) == []
    view.clip_(0.5)
    assert all(isinstance(gradient, DTensor) for gradient in view.gradients)
    assert (
        differences([g.full_tensor() for g in view.gradients], [p.grad.full_tensor() for p in reference])
        == []
    )


def test_the_total_of_distributed_gradients_is_left_to_be_reduced(mesh):
    """With one rank the numbers would be right even if nobody added up the shards: so look at the type."""
    view = GradientView([("a", sharded(mesh, torch.ones(4, 2)))])
    assert all(isinstance(norm, DTensor) and norm.placements[0].is_partial() for norm in view._norms)
    assert not isinstance(view.total_norm, DTensor)
    assert not isinstance(view.norms, DTensor)
    assert not isinstance(view.magnitudes, DTensor)


def test_distributed_and_plain_gradients_together(mesh):
    values = [torch.randn(6, 4), torch.randn(8), torch.randn(3, 3)]
    plain = [value.clone() for value in values]
    expected = torch.linalg.vector_norm(torch.cat([value.flatten() for value in values]))
    gradients = [sharded(mesh, plain[0]), plain[1], sharded(mesh, plain[2])]
    view = GradientView(zip("abc", gradients, strict=True))
    torch.testing.assert_close(view.total_norm, expected)
    torch.testing.assert_close(view.norms, torch.stack([torch.linalg.vector_norm(v) for v in values]))
    torch.testing.assert_close(view.max_magnitude, torch.stack([v.abs().max() for v in values]).max())
    assert view.safe_norm() == pytest.approx(float(expected))
    view.clip_(0.5)
    for gradient, value in zip(view.gradients, values, strict=True):
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, value * (0.5 / (expected + 1e-6)))


def test_nan_in_a_shard(mesh):
    value = torch.ones(4, 2)
    value[3, 1] = NAN
    view = GradientView([("fine", torch.ones(2)), ("shard", sharded(mesh, value))])
    assert not torch.isfinite(view.total_norm)
    (evidence,) = view.evidence()
    assert (evidence.name, evidence.nonfinite, evidence.first_index) == ("shard", 1, (3, 1))


def test_a_model_of_distributed_and_plain_parameters(mesh, run_dir):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(sharded(mesh, model[0].weight.detach()))
    model[0].bias = nn.Parameter(sharded(mesh, model[0].bias.detach()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def loss_of(x):
        hidden = model[0](sharded(mesh, x, Replicate())).full_tensor()
        return model[1](hidden).pow(2).mean()

    with Sentinel(
        model, optimizer, callbacks=[NanCallback(), Rollback(every=2)], run_dir=run_dir
    ) as sentinel:
        for step, x in enumerate(sentinel.steps([torch.randn(3, 4) for _ in range(4)])):
            before = [p.detach().clone() for p in model.parameters()]
            sentinel.backward(loss_of(x) * (NAN if step == 2 else 1))
            sentinel.step(max_norm=1.0)
            unchanged = all(
                torch.equal(a, p.detach()) for a, p in zip(before, model.parameters(), strict=True)
            )
            assert unchanged == (step == 2)
    assert [incident.step for incident in sentinel.incidents] == [2]


# -- norms that overflow on finite gradients -------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 3e38), (torch.float32, 1e25), (torch.float16, 6e4), (torch.bfloat16, 3e38)],
)
def test_a_norm_that_overflows_is_no_alarm_and_clips_truly(dtype, size, norm_type, run_dir):
    """Finite gradients; the usual formula says inf, and clipping by it would zero them all."""
    direction = torch.tensor([1.0, -0.5, 0.25, 0.75] * 4)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(16, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for _ in sentinel.steps([0]):
            model.weight.grad = (direction * size).to(dtype)
            true = torch.linalg.vector_norm(model.weight.grad.double(), norm_type)
            returned = sentinel.step(max_norm=1.0, norm_type=norm_type)
    assert sentinel.incidents == ()
    assert sentinel.applied
    overflows = not torch.isfinite(returned)
    assert overflows or norm_type == 1 or dtype is not torch.float32
    update = -model.weight.detach().double()
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)  # the factor may be as small as a subnormal number
    assert float(torch.linalg.vector_norm(update, norm_type)) == pytest.approx(1.0, rel=tolerance)
    torch.testing.assert_close(update, direction.double() * size / true, rtol=tolerance, atol=0.0)


def test_a_norm_that_overflows_without_clipping_changes_nothing(run_dir):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-25)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        model.weight.grad = torch.full((4,), 1e25)
        returned = sentinel.step()
    assert returned == INF
    assert sentinel.incidents == ()
    torch.testing.assert_close(model.weight.detach(), torch.full((4,), -1.0))


@pytest.mark.parametrize("bound", ["max_global_norm", "max_parameter_norm", "max_value"])
def test_a_huge_finite_gradient_is_called_large_and_not_nonfinite(bound, run_dir):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    callbacks = [NanCallback(), MagnitudeCallback(**{bound: 1e3}, action="skip")]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        model.weight.grad = torch.full((4,), 1e25)
        sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.kind is Kind.MAGNITUDE
    value = "1e+25" if bound == "max_value" else "2e+25"
    assert value in incident.message
    assert incident.tensors[0].norm == pytest.approx(2e25)


# -- what it costs ---------------------------------------------------------------------------------


class CountOps(TorchDispatchMode):
    """Counts what reaches the dispatcher: on an accelerator, about one launch each."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


class CountReads(TorchFunctionMode):
    """Counts the calls that bring a value to the host: on an accelerator each waits for it."""

    READS = frozenset(
        getattr(torch.Tensor, name)
        for name in [
            "tolist",
            "item",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "__complex__",
            "cpu",
            "numpy",
            "nonzero",
        ]
    ) | {torch.equal, torch.Tensor.equal, torch.allclose, torch.nonzero}

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            self.reads[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def healthy_step(callbacks, run_dir, counter):
    """Count over one `Sentinel.step` in the middle of a healthy run."""
    run = build(optimizer="sgd")
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(16))):
            sentinel.backward(run.loss(batch))
            if number == 14:  # the callbacks' own regular checks of the state come earlier and later
                with counter:
                    sentinel.step(max_norm=1.0)
            else:
                sentinel.step(max_norm=1.0)
        assert sentinel.incidents == ()
    return counter


def bounds(count, *names):
    return [MagnitudeCallback(**dict.fromkeys(names, 1e6 + index)) for index in range(count)]


def plain_step():
    run = build(optimizer="sgd")
    batches = make_batches(2)
    for batch in batches:
        run.loss(batch).backward()
        if batch is batches[-1]:
            break
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
    with CountOps() as counter:
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
    return counter.ops


ALL_BOUNDS = ("max_global_norm", "max_parameter_norm", "max_value")


def test_launches_do_not_grow_with_the_number_of_detectors(run_dir):
    one = healthy_step([NanCallback()], run_dir, CountOps()).ops
    eight = healthy_step([NanCallback(), *bounds(7, "max_global_norm")], run_dir, CountOps()).ops
    assert eight == one
    two = healthy_step([NanCallback(), *bounds(1, *ALL_BOUNDS)], run_dir, CountOps()).ops
    eight = healthy_step([NanCallback(), *bounds(7, *ALL_BOUNDS)], run_dir, CountOps()).ops
    assert eight == two


def test_launches_beyond_those_of_clipping_are_few(run_dir):
    one = healthy_step([NanCallback()], run_dir, CountOps()).ops
    extra = one - plain_step()
    assert extra["aten._foreach_norm.Scalar"] == 0, "the pass of clipping is the only one over the gradients"
    # stacking, comparing, reducing and joining a handful of numbers, and one copy of the small buffers
    assert sum(extra.values()) <= 24, extra
    bounded = healthy_step([NanCallback(), *bounds(1, *ALL_BOUNDS)], run_dir, CountOps()).ops
    largest = bounded["aten.aminmax.default"]  # the infinity norm, once per parameter on a CPU
    assert largest == len(list(build().model.parameters()))
    assert (bounded - plain_step())["aten._foreach_norm.Scalar"] == 0
    assert sum((bounded - one).values()) <= 12 + 4 * largest, bounded - one


@pytest.mark.parametrize("count", [0, 7])
def test_a_healthy_step_reads_once(count, run_dir):
    callbacks = [NanCallback(), *bounds(count, *ALL_BOUNDS)]
    assert healthy_step(callbacks, run_dir, CountReads()).reads == {"tolist": 1}


def test_a_healthy_step_reads_nothing_else_behind_the_function_layer(run_dir):
    ops = healthy_step([NanCallback()], run_dir, CountOps()).ops
    assert not [
        name for name in ops if "_local_scalar_dense" in name or "is_nonzero" in name or "equal" in name
    ]


def test_a_micro_batch_costs_one_norm_and_no_read(run_dir):
    run = build(optimizer="sgd", accumulate=4)
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(12), accumulate=4)):
            loss = run.loss(batch)
            ops, reads = CountOps(), CountReads()
            with ops, reads:
                sentinel.backward(loss)
                looks = ops.ops["aten.aminmax.default"]
                if number % 4 != 3:
                    assert sentinel.step() is None
            if number >= 4:
                # the last one's norm is computed by the step anyway
                assert looks == (0 if number % 4 == 3 else len(list(run.model.parameters())))
                assert reads.reads == {}
            if number % 4 == 3:
                sentinel.step()


def test_a_view_that_nobody_asks_is_not_built(run_dir):
    pulled = []

    def source():
        pulled.append(True)
        yield "weight", torch.ones(2)

    view = GradientView(source())
    assert pulled == []
    assert len(view) == 1
    assert float(view.total_norm) == pytest.approx(math.sqrt(2))
    assert pulled == [True]

    seen = []
    run = build(optimizer="sgd")
    with run.sentinel([NanCallback(check_microbatches=False)], run_dir=run_dir) as sentinel:
        sentinel.on(AfterBackward, lambda event: seen.append(event.gradients))
        finish(train_watched(run, sentinel, make_batches(3)))
    assert len(seen) == 3
    assert not any("_sorted_out" in vars(view) for view in seen)


def test_every_number_is_computed_once():
    with CountOps() as counter:
        view = GradientView([("a", torch.ones(3)), ("b", torch.ones(2))])
        for _ in range(3):
            assert view.total_norm is view.total_norm
            assert view.norms is view.norms
            assert view.max_norm is view.max_norm
            assert view.max_magnitude is view.max_magnitude
        view.clip_(10.0)
    assert counter.ops["aten._foreach_norm.Scalar"] == 1
    assert counter.ops["aten.aminmax.default"] == 2  # the largest value of each


def test_an_alarm_makes_the_norm_infinite_and_can_be_taken_back(mesh):
    values = torch.randn(4, 2)
    plain, alarmed = (GradientView([("a", sharded(mesh, values))]) for _ in range(2))
    alarmed.alarm = torch.tensor(True)
    seen = alarmed.total_norm
    assert seen == float("inf")
    alarmed.calm()
    assert torch.equal(seen, plain.total_norm)
    quiet = GradientView([("a", sharded(mesh, values))])
    quiet.alarm = torch.tensor(False)
    assert torch.equal(quiet.total_norm, plain.total_norm)


def test_the_norm_of_one_is_that_of_the_total_also_when_the_gradients_are_gone():
    gradients = [torch.randn(3), torch.randn(4, 2)]
    view = GradientView(zip("ab", gradients, strict=True))
    expected = torch._foreach_norm(gradients, 2.0)
    total = view.total_norm
    assert torch.equal(total, torch.linalg.vector_norm(torch.stack(expected)))
    view.retire()
    assert [float(view.norm_of(name)) for name in "ab"] == [float(norm) for norm in expected]
    assert view.total_norm is total


def test_a_retired_view_keeps_what_was_measured_and_lets_go_of_the_gradients():
    good, bad = torch.randn(3), torch.tensor([1.0, float("nan")])
    view = GradientView([("good", good), ("bad", bad), ("whole", torch.ones(2, dtype=torch.int64))])
    before = view.norms.clone()
    gone = weakref.ref(bad)
    view.retire()
    del bad
    assert gone() is None
    assert view.retired
    assert view.gradients == ()
    assert torch.equal(view.norms.nan_to_num(-1), before.nan_to_num(-1))
    assert view.norm_of("good") == before[0]
    assert view.names == ("good", "bad")
    assert set(view.unchecked) == {"whole"}
    (evidence,) = view.evidence()
    assert (evidence.name, evidence.nonfinite, evidence.numel) == ("bad", 1, 2)
    assert not evidence.counted
    assert math.isnan(evidence.norm)
    with pytest.raises(RuntimeError, match="gone"):
        _ = view.magnitudes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "share", [0.0, 1e-9, 0.5, 0.97, 0.979, 0.98, 0.981, 0.99, 0.999999, 1.0, 1.000001, 1.02, 5.0, 1e9]
)
def test_a_norm_that_the_host_knows_changes_nothing_of_the_clip(dtype, share):
    """Near the bound the device decides, as torch does."""
    torch.manual_seed(1)
    gradients = [torch.randn(9, 5).to(dtype), torch.randn(3).to(dtype)]
    view = GradientView([(str(n), g.clone()) for n, g in enumerate(gradients)])
    max_norm = float(view.total_norm) / share if share else INF
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    view.clip_(max_norm, known_norm=float(view.total_norm))
    for parameter, gradient in zip(parameters, view.gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_clip_that_would_multiply_by_one_launches_nothing(dtype):
    gradient = torch.full((4,), 0.25, dtype=dtype)
    view = GradientView([("w", gradient)])
    norm = float(view.total_norm)
    before = gradient._version
    view.clip_(1.0, known_norm=norm)
    assert gradient._version == before
    view.clip_(0.505, known_norm=norm)  # too near to be sure without computing the factor
    assert (gradient._version > before) is (dtype is torch.float64)
    view.clip_(1.0, total_norm=2.0, known_norm=norm)  # the norm of the view had overflowed
    assert torch.equal(gradient, torch.full((4,), 0.25, dtype=dtype) / (2.0 + 1e-6))


class OpNames(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_what_the_host_multiplies_by_is_written_and_multiplied_with():
    """The norm is read before the step is made: no sum, quotient and bound is left to the device."""
    view = GradientView([("a", torch.randn(5)), ("b", torch.randn(3))])
    norm = float(view.total_norm)
    view.clip_(0.1, known_norm=norm)  # the first one tries whether torch computes alike
    with OpNames() as seen:
        view.clip_(0.1, known_norm=norm)
    assert seen.names == ["full_like", "_foreach_mul_"]


@pytest.mark.parametrize("known", [False, True], ids=["unread", "read"])
def test_gradients_that_are_part_of_a_graph_are_measured_and_clipped_outside_of_it(known):
    """As a loop makes them that calls backward(create_graph=True)."""
    weight = torch.randn(4, requires_grad=True)
    gradient = weight * 3.0
    view, expected = GradientView([("w", gradient)]), nn.Parameter(torch.zeros(4))
    expected.grad = gradient.detach().clone()
    torch.nn.utils.clip_grad_norm_([expected], 0.1)
    norm = view.total_norm
    assert not norm.requires_grad
    assert not view.norms.requires_grad
    view.clip_(0.1, known_norm=float(norm) if known else None)
    assert torch.equal(gradient, expected.grad)


numbers = st.floats(0.0, 3.4028234663852886e38, width=32)


@given(norm=numbers, max_norm=st.one_of(st.floats(1e-6, 1e6), st.floats(1e-45, 1e45)))
@example(norm=3.4028234663852886e38, max_norm=1e-7)
@example(norm=1e-45, max_norm=1.0)
@example(norm=1.0, max_norm=1e-30)
def test_a_factor_on_the_host_is_that_of_torch_bit_for_bit(norm, max_norm):
    expected = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0).item()
    found = factor_on_host(max_norm, norm)
    assert found == expected or (found is None and (norm > 8e37 or expected < 1e-30))


def test_a_factor_is_left_to_torch_where_it_is_not_certain():
    assert factor_on_host(1.0, NAN) is None
    assert factor_on_host(1.0, INF) is None
    assert factor_on_host(torch.tensor(1.0), 2.0) is None
    assert factor_on_host(1.0, 3e38) is None  # whose reciprocal has fewer bits, or none
