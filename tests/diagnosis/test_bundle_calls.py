"""One operator call, put aside: every kind of argument comes back, and large ones are cut to what matters."""

import json

import pytest
import torch
from bundles import failure, header_of, ran, saved
from safetensors.torch import load_file
from torch import nn

from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis.operator import CannotRun, OperatorCall, find, run, shows
from gradsentinel.diagnosis.repro import write_program
from gradsentinel.diagnosis.stored_call import OPERATOR_KIND, call_from_tree, call_to_tree
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident
from gradsentinel.state.archive import read_archive, write_archive

CPU, INF = torch.device("cpu"), float("inf")

X = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
CALLS = {
    "transposed": ("aten::log.default", (X.t(),), {}),
    "channels last": (
        "aten::log.default",
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),),
        {},
    ),
    "expanded": ("aten::div.Tensor", (X[:1].expand(4, 3), torch.zeros(()).expand(4, 3)), {}),
    "a slice": ("aten::log.default", (X[:, ::2],), {}),
    "complex": ("aten::reciprocal.default", (torch.zeros(2, dtype=torch.complex64),), {}),
    "conjugate": ("aten::reciprocal.default", (torch.zeros(2, dtype=torch.complex64).conj(),), {}),
    "float16": ("aten::mul.Tensor", (torch.full((2,), 6e4, dtype=torch.float16), 2.0), {}),
    "dtype": ("aten::_to_copy.default", (X * 1e5,), {"dtype": torch.float16}),
    "device": (
        "aten::full.default",
        ([2], INF),
        {"device": CPU, "layout": torch.strided, "pin_memory": False},
    ),
    "memory format": (
        "aten::clone.default",
        (torch.full((1, 1, 2, 2), INF),),
        {"memory_format": torch.channels_last},
    ),
    "a list of tensors": ("aten::cat.default", ([X, X / 0],), {}),
    "bool and integer": ("aten::masked_fill.Scalar", (X, X > 2, float("nan")), {}),
    "in place": ("aten::div_.Tensor", (torch.ones(2), torch.zeros(2)), {}),
    "a list in place": ("aten::_foreach_div_.Scalar", ([torch.ones(2), torch.ones(1)], 0.0), {}),
    "sparse": ("aten::mul.Tensor", (torch.eye(2).to_sparse(), torch.tensor(INF)), {}),
    "softmax": ("aten::_softmax.default", (torch.full((2, 3), -INF), 1, False), {}),
    "none": ("aten::clamp.default", (torch.tensor([INF]), 0.0, None), {}),
    "float8": ("aten::_to_copy.default", (torch.tensor([1.0, INF]),), {"dtype": torch.float8_e5m2}),
    "a scalar tensor": ("aten::log.default", (torch.tensor(0.0),), {}),
    "double": ("aten::exp.default", (torch.tensor([1e3], dtype=torch.float64),), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_comes_back_as_it_was(name, tmp_path):
    operator, args, kwargs = CALLS[name]
    call = OperatorCall(name=operator, args=args, kwargs=kwargs, device="cpu")
    state, meta = call_to_tree(call)
    write_archive(tmp_path / "operator", {"operator": state, "function": None}, meta, kind=OPERATOR_KIND)
    read, facts = read_archive(tmp_path / "operator", kind=OPERATOR_KIND)
    again = call_from_tree(read["operator"], facts, device=CPU)
    function = find(call.name)
    first, second = run(function, call.args, call.kwargs), run(function, again.args, again.kwargs)
    assert shows(call, first)
    assert shows(again, second)
    for one, two in zip(first, second, strict=True):
        assert (one.dtype, one.shape, one.layout) == (two.dtype, two.shape, two.layout)
        assert one.is_sparse or one.stride() == two.stride()
        dense = [t.to_dense() if t.is_sparse else t for t in (one, two)]
        wide = [t.float() if t.dtype.itemsize == 1 else t for t in dense]
        assert torch.equal(torch.nan_to_num(wide[0]), torch.nan_to_num(wide[1]))


@pytest.mark.parametrize("name", CALLS)
def test_a_program_rebuilds_every_kind_of_argument(name, tmp_path):
    operator, args, kwargs = CALLS[name]
    call = OperatorCall(name=operator, args=args, kwargs=kwargs, device="cpu")
    state, meta = call_to_tree(call)
    write_archive(tmp_path / "operator", {"operator": state, "function": None}, meta, kind=OPERATOR_KIND)
    incident = Incident(id="i", step=0, kind=Kind.NONFINITE_LOSS, action=Action.SKIP, message="m")
    program = tmp_path / "repro.py"
    diagnosis = Diagnosis(cause="math", confidence=1.0)
    program.write_text(write_program(incident, diagnosis, call, state, folder="operator"))
    code, text = ran(program)
    assert code == 0, text


@pytest.mark.parametrize(
    "name",
    ["aten::from_file.default", "aten::save.default", "os::system.default", "aten::nope.x", "x", "a.b::c.d"],
)
def test_only_computations_on_tensors_are_run(name):
    with pytest.raises(CannotRun):
        find(name)


# -- large inputs --------------------------------------------------------------------------------------


def test_large_inputs_are_cut_down_to_the_bad_rows(tmp_path):
    batch = torch.rand(3000, 64) + 0.5
    batch[1234, 7] = 0.0
    case = failure(lambda m, x: m(x.log()).mean(), batch, lambda: nn.Linear(64, 1))
    incident, directory = saved(tmp_path / "run", case, max_bytes=1 << 20)
    assert incident.diagnosis.op == "aten.log.default"
    stored = load_file(directory / "operator" / "state.safetensors")
    assert [tuple(tensor.shape) for tensor in stored.values()] == [(1, 64)]
    text = header_of(directory / "repro.py")
    assert "[1234] of 3000 along dimension 0" in text
    code, output = ran(directory / "repro.py")
    assert code == 0
    assert "output 0[0, 7]: Inf then" in output


def test_a_matrix_product_is_cut_in_rows_and_columns(tmp_path):
    def build():
        model = nn.Linear(128, 512, bias=True).half()
        with torch.no_grad():
            model.weight.zero_()
            model.weight[77] = 30.0
        return model

    batch = torch.zeros(512, 128).half()
    batch[300] = 60.0
    case = failure(lambda m, x: m(x).float().mean(), batch, build)
    incident, directory = saved(tmp_path / "run", case, max_bytes=1 << 16)
    assert incident.diagnosis.op == "aten.addmm.default"
    text = header_of(directory / "repro.py")
    assert "[300] of 512 along dimension 0" in text
    assert sum(t.nbytes for t in load_file(directory / "operator" / "state.safetensors").values()) <= 1 << 16
    code, output = ran(directory / "repro.py")
    assert code == 0, output


def test_what_cannot_be_cut_is_left_out_and_said(tmp_path):
    huge = failure(lambda m, x: (m(x) * 0 + 3e38).sum(), torch.ones(9000, 4))
    incident, directory = saved(tmp_path / "run", huge, max_bytes=1 << 16)
    assert incident.diagnosis.op == "aten.sum.default"
    assert not (directory / "repro.py").exists()
    left_out = json.loads((directory / "bundle.json").read_text())["left_out"]
    assert any("aten.sum.default" in text for text in left_out)


def test_inputs_that_are_overwritten_later_are_those_of_the_moment(tmp_path):
    def forward(model, x):
        z = model(x) * 1000
        y = z.exp()
        z.zero_()  # exp keeps its result, so autograd does not mind
        return y.mean()

    incident, directory = saved(tmp_path / "run", failure(forward, torch.ones(2, 4)))
    assert (incident.diagnosis.cause, incident.diagnosis.op) == ("math", "aten.exp.default")
    code, text = ran(directory / "repro.py")
    assert code == 0, text
