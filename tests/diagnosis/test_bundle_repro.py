"""repro.py: it needs torch and safetensors only, shows the bad values, and no text becomes code."""

import ast
import io
import json
import os
import subprocess
import sys
import textwrap
import tokenize
from pathlib import Path

import pytest
import torch
from bundles import OWN, Traced, failure, header_of, ran, saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_real_failures import INF, Attention, Checkpointed, Encoder, Gate, Gated, Varlen, distance
from torch import nn

from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis.operator import CannotRun, OperatorCall
from gradsentinel.diagnosis.repro import literal, write_program
from gradsentinel.diagnosis.stored_call import call_from_tree, call_to_tree
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident

CPU = torch.device("cpu")


def bare(tmp_path, *paths, **environment):
    """An environment in which only torch and safetensors, of all that is installed here, can be imported."""
    shadow = tmp_path / "shadow"
    shadow.mkdir(exist_ok=True)
    for name in ("gradsentinel", "numpy", "rich", "typer"):
        (shadow / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is not here')")
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = os.pathsep.join(map(str, (shadow, *paths)))
    return {**kept, "PYTHONPATH": found, "OMP_NUM_THREADS": "1", **environment}


def start(program, *arguments, env, cwd=None):
    command = [sys.executable, "-W", "ignore", str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=cwd)  # noqa: S603 - ours


DRIVER = """
    import contextlib, io, json, runpy, sys, torch
    outcome = {}
    for path in json.loads(sys.stdin.read()):
        texts = []
        for again in range(2):
            sys.argv, out, code = [path], io.StringIO(), None
            with contextlib.redirect_stdout(out):
                try:
                    runpy.run_path(path, run_name="__main__")
                except SystemExit as error:
                    code = error.code
            texts.append(out.getvalue())
        outcome[path] = [code, texts[0], texts[0] == texts[1]]
    print(json.dumps(outcome))
"""


def outcomes(tmp_path, paths, *imports):
    """Run many programs twice, in one process that has nothing of ours."""
    done = subprocess.run(  # noqa: S603 - this very interpreter
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(DRIVER)],
        input=json.dumps([str(path) for path in paths]),
        capture_output=True,
        text=True,
        check=False,
        env=bare(tmp_path, *imports),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def reported():
    """Failures that people reported, as in test_real_failures.py."""
    embeddings = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}
    embeddings["b"][2] = embeddings["a"][2]
    branch = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[1] = True
    tokens = {"x": torch.randn(3, 4, 8), "padding": padding}

    def attention(model, x):
        with torch.autocast("cpu", torch.float16):
            return model(x).float().pow(2).mean()

    def loud():
        model = Attention()
        with torch.no_grad():
            model.q.weight.mul_(400)
            model.k.weight.copy_(model.q.weight)
        return model

    def gate(model, x):
        return (model.lin(x) - 1).pow(2).mean() + 0.01 * model.gate.pow(2).sum().sqrt()

    def masked(model, batch):
        losses = model(batch["x"]).pow(2).flatten() * batch["mask"]
        return losses.sum() / batch["mask"].sum()

    nothing = {"x": torch.randn(6, 4), "mask": torch.zeros(6)}
    return {
        "distance": failure(distance, embeddings, lambda: nn.Linear(4, 3)),
        "where": failure(lambda m, x: m(x).sum(), branch, lambda: Gate("sqrt")),
        "where, exp": failure(lambda m, x: m(x).sum(), branch, lambda: Gate("exp")),
        "padding": failure(lambda m, b: m(b["x"], b["padding"])[[0, 2]].pow(2).mean(), tokens, Encoder),
        "no token": failure(masked, nothing, lambda: nn.Linear(4, 1)),
        "gate": failure(gate, torch.randn(8, 4), Gated),
        "checkpoint": failure(lambda m, x: m(x), torch.randn(2, 3), lambda: Checkpointed(reentrant=False)),
        "float16": failure(attention, torch.randn(2, 5, 16), loud),
        "memory": failure(lambda m, x: Varlen.apply(m(x), 6).pow(2).mean(), torch.randn(8, 4)),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
def test_the_failures_are_reproduced_with_torch_and_safetensors_alone(tmp_path, monkeypatch):
    allocate = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t, **more: allocate(t, **more).fill_(torch.nan))
    programs, without = {}, []
    for number, case in enumerate([*reported().values(), *OWN]):
        name = getattr(case, "name", f"reported {number}")
        traced = Traced()
        incident, directory = saved(tmp_path / str(number), case, traced=traced)
        exists = (directory / "repro.py").exists()
        assert exists == traced.found, (name, (directory / "bundle.json").read_text())
        if exists:
            programs[str(directory / "repro.py")] = (name, incident)
        else:
            without.append(incident.diagnosis.op)
    assert len(programs) >= 60
    assert set(without) <= {
        None,
        "aten.mul.Tensor",  # a weight from outside the step: no operator is to blame
        "aten.add_.Tensor",  # adds up gradients of micro-batches, each of which is finite: no replay does
    }
    here = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    for path, (code, text, repeated) in outcomes(tmp_path, programs, *here).items():
        name, incident = programs[path]
        assert code == 0, (name, text)
        assert repeated, name
        assert incident.diagnosis.op in text
        assert "REPRODUCED" in text


@pytest.mark.slow
def test_the_program_alone_and_the_fixed_inputs(tmp_path):
    incident, directory = saved(tmp_path / "run", reported()["distance"])
    program = directory / "repro.py"
    done = start(program, env=bare(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "output 0[2]: Inf then, inf now, from 0.3333333432674408 and 0.0" in done.stdout
    assert ran(program) == (0, done.stdout)
    for text in ("Cause: math", "aten.div.Tensor", "SqrtBackward0", incident.id, *incident.diagnosis.remedy):
        assert text in header_of(program)
    store = directory / "operator" / "state.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(store).items()}, store)
    code, text = ran(program)
    assert code == 1
    assert "NOT REPRODUCED" in text
    store.unlink()
    assert ran(program)[0] == 2


def test_another_dtype_shows_that_it_is_one_of_precision(tmp_path):
    _, directory = saved(tmp_path / "run", reported()["float16"])
    assert ran(directory / "repro.py")[0] == 0
    code, text = ran(directory / "repro.py", "--dtype", "float32")
    assert code == 1
    assert "NOT REPRODUCED" in text


# -- what is not torch's own ---------------------------------------------------------------------------

OPERATORS = """
    import torch

    @torch.library.custom_op("gradsentinel_tests::bad", mutates_args=())
    def bad(x: torch.Tensor) -> torch.Tensor:
        return x / (x - x)

    @bad.register_fake
    def _(x):
        return torch.empty_like(x)

    bad.register_autograd(lambda ctx, g: g)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, n, scale=None):
            ctx.n = n
            return x * 2

        @staticmethod
        def backward(ctx, g):
            gx = torch.empty_like(g)
            gx[: ctx.n] = g[: ctx.n] * 2
            return gx, None, None

    class Separate(torch.autograd.Function):
        @staticmethod
        def forward(x, n):
            return x * n

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g / (x - x), None
"""


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    """A module of the user's, with operators of its own, and the directory that it is in."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "gradsentinel_test_operators.py").write_text(textwrap.dedent(OPERATORS))
    sys.path.insert(0, str(folder))
    try:
        import gradsentinel_test_operators as module  # noqa: PLC0415 - made just now
    finally:
        sys.path.remove(str(folder))
    return module, folder


@pytest.mark.slow
def test_an_operator_of_a_library_is_imported(tmp_path, operators):
    module, folder = operators
    case = failure(lambda m, x: module.bad(m(x)).mean(), torch.randn(3, 4))
    incident, directory = saved(tmp_path / "run", case)
    assert incident.diagnosis.op == "gradsentinel_tests.bad.default"
    assert incident.diagnosis.cause == "operator"
    program = directory / "repro.py"
    assert "gradsentinel_test_operators" in header_of(program)
    assert start(program, env=bare(tmp_path), cwd=folder).returncode == 0  # from the directory of the project
    alone = start(program, env=bare(tmp_path))
    assert alone.returncode == 2
    assert "needs: import gradsentinel_test_operators" in alone.stdout


@pytest.fixture
def filled():
    """Fresh memory is filled with NaN, as in many a debug build."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("name", "op"), [("Doubled", "aten.empty_like.default"), ("Separate", "aten.div.Tensor")]
)
def test_a_custom_function_is_run_whole(tmp_path, operators, name, op, monkeypatch):
    module, _ = operators
    function = getattr(module, name)
    case = failure(lambda m, x: function.apply(m(x), 2).pow(2).mean(), torch.randn(3, 4))
    incident, directory = saved(tmp_path / "run", case)
    assert (incident.diagnosis.cause, incident.diagnosis.op) == ("operator", op)
    program = directory / "repro.py"
    code, text = ran(program)
    assert code == 0, text
    assert f"{name}.apply, then its backward" in text
    monkeypatch.delitem(sys.modules, module.__name__)  # and its directory is not on the path
    code, text = ran(program)
    assert code == 0, text
    assert f"needs: from gradsentinel_test_operators import {name}" in text


def test_nothing_is_left_of_catching_a_function(tmp_path, operators):
    module, _ = operators
    before = dict(vars(module.Separate))
    case = failure(lambda m, x: module.Separate.apply(m(x), 2).mean(), torch.randn(3, 4))
    saved(tmp_path / "run", case)
    assert dict(vars(module.Separate)) == before


@pytest.mark.slow
def test_a_training_script_is_not_imported_unasked(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import sys, torch
            from gradsentinel import NanCallback, Sentinel, SnapshotSaver, TrainingAborted

            class Mine(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x / (x - x)
                @staticmethod
                def backward(ctx, g):
                    return g

            if __name__ == "__main__":
                model = torch.nn.Linear(2, 2)
                forward = lambda model, x: Mine.apply(model(x)).mean()
                with Sentinel(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=sys.argv[1],
                              callbacks=[NanCallback(), SnapshotSaver()], forward=forward) as sentinel:
                    for batch in sentinel.steps([torch.ones(2, 2)]):
                        sentinel.backward(forward(model, batch))
                        sentinel.step()
            """
        )
    )
    run_dir = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    trained = start(tmp_path / "train.py", run_dir, env=environment)
    assert trained.returncode == 0, trained.stderr
    (program,) = run_dir.glob("incidents/*/repro.py")
    monkeypatch.chdir(tmp_path)
    code, text = ran(program)
    assert code == 0
    assert "--import train" in text
    assert "train" not in sys.modules
    code, text = ran(program, "--import", "train")
    assert code == 0
    assert "Mine.apply" in text
    del sys.modules["train"]


# -- names that would like to be code ------------------------------------------------------------------

NASTY = [
    "a'b\"c",
    "x\nimport os; os.system('touch hacked')",
    "x\r\nraise SystemExit(7)",
    "'''\n\"\"\"",
    "\\",
    "{}%s#@values@#",
    "coding: utf-7 +AAo-",
    "\x00\x0c\x1b[31m\u2028\u202e\udce9",
]


def program_for(text):
    state, meta = call_to_tree(
        OperatorCall(name="aten::log.default", args=(torch.zeros(2),), kwargs={}, device="cpu")
    )
    incident = Incident(id=text, step=3, kind=Kind.NONFINITE_LOSS, action=Action.SKIP, message=text)
    diagnosis = Diagnosis(
        cause=text, confidence=0.5, module=text, node=text, source=text, evidence=(text,), remedy=(text, text)
    )
    call = call_from_tree(state, meta, device=CPU)
    return write_program(incident, diagnosis, call, state, folder="operator")


def code_of(program):
    """The program without its comments."""
    skipped = {tokenize.COMMENT, tokenize.NL}
    tokens = tokenize.generate_tokens(io.StringIO(program).readline)
    return [token.string for token in tokens if token.type not in skipped]


@pytest.mark.parametrize("text", NASTY)
def test_text_from_the_run_stays_in_comments(text):
    program = program_for(text)
    ast.parse(program.encode())  # as Python reads a file: a line may declare another encoding
    assert code_of(program) == code_of(program_for("harmless"))


@given(st.text(st.characters(exclude_categories=())))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_stays_in_comments(text):
    assert code_of(program_for(text)) == code_of(program_for("harmless"))


@pytest.mark.parametrize("name", [text for text in NASTY if "." not in text])
def test_a_parameter_may_be_called_anything(tmp_path, name):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(3)))

        def forward(self, x):
            return x * getattr(self, name)

    case = failure(
        lambda m, b: m[name](b["x"]).log().mean(),
        {"x": torch.ones(2, 3), name: name},
        lambda: nn.ModuleDict({name: Odd()}),
    )
    incident, directory = saved(tmp_path / "run", case, level="full")
    assert incident.diagnosis.module is not None
    code, text = ran(directory / "repro.py")
    assert code == 0, text
    assert list(tmp_path.rglob("hacked")) == []


@pytest.mark.parametrize(
    "value", [None, True, 0, -5, 1 << 80, 0.5, INF, -INF, 1e308, 1j, "a'\n\"", b"\x00", (), (1,), [1, [2.0]]]
)
def test_literals_are_the_values(value):
    assert eval(literal(value)) == value  # noqa: S307 - what is tested


def test_a_literal_is_a_plain_value_or_refused():
    assert eval(literal(float("nan"))) != 0  # noqa: S307 - NaN, which equals nothing
    for value in (object(), torch.ones(1), {1: 2}, int):
        with pytest.raises(CannotRun):
            literal(value)
