"""Every reported failure has tests that run, and that hold the verdict to what it really was."""

import ast
from functools import cache
from pathlib import Path

import pytest
import torch
from reported import REPORTED
from torch import nn

from gradsentinel import NanCallback

TESTS = Path(__file__).parents[1]
NUMBERS = (1, 2, 3, 5, 6, 7, 8, 10, 14, 15, 16, 20, 23, 24, 28, 29, 30, 32, 33, 35, 36)


@cache
def definitions(file: str) -> dict[str, ast.stmt]:
    """What a test file defines at its top, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update((target.id, node) for target in node.targets if isinstance(target, ast.Name))
    return found


def texts(file: str, name: str) -> set[str]:
    """The texts in a definition and in those of the same file that it needs, docstrings left out."""
    known, waiting, found = definitions(file), [name], set()
    seen = set()
    while waiting:
        current = waiting.pop()
        if current in seen or current not in known:
            continue
        seen.add(current)
        documented = [n for n in ast.walk(known[current]) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        docs = {id(n.body[0].value) for n in documented if isinstance(n.body[0], ast.Expr)}
        for node in ast.walk(known[current]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                found.add(node.value)
            elif isinstance(node, ast.Name):
                waiting.append(node.id)
    return found


def test_no_report_is_left_out():
    assert tuple(REPORTED) == NUMBERS


@pytest.mark.parametrize("number", REPORTED)
def test_its_tests_exist_and_are_never_left_out(number):
    for test in REPORTED[number].tests:
        file, _, name = test.partition("::")
        node = definitions(file).get(name)
        assert isinstance(node, ast.FunctionDef), f"{test} is not there"
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        assert "skip" not in decorators
        assert "xfail" not in decorators
        assert any(isinstance(n, ast.Assert) for n in ast.walk(node)), f"{test} asserts nothing"


@pytest.mark.parametrize("number", [number for number, case in REPORTED.items() if case.found])
def test_its_tests_hold_the_verdict_to_what_it_was(number):
    case = REPORTED[number]
    held = set().union(*(texts(*test.split("::")) for test in case.tests))
    missing = [word for word in case.found if not any(word in text for text in held)]
    assert missing == [], f"no test of {case.title} says so"


def test_running_statistics_beside_a_bad_record(watch, nonfinite):
    """pytorch#88474: the batch is to blame, and it spoils the buffers: the one is said, the other undone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [{"x": torch.randn(8, 4), "id": torch.arange(8) + 8 * step} for step in range(4)]
    batches[1]["x"][3, 2] = torch.inf
    seen = []

    def forward(model, batch):
        return model(batch["x"]).pow(2).mean()

    sentinel = watch(model, optimizer, NanCallback(), forward=forward)
    for batch in sentinel.steps(batches):
        loss = forward(model, batch)
        seen.append(nonfinite(model[1]))
        sentinel.backward(loss)
        sentinel.step()
        assert nonfinite(model, optimizer) == []
    (incident,) = sentinel.incidents
    assert seen[1] == ["0:running_mean", "0:running_var"]
    found = incident.diagnosis
    assert (incident.step, found.cause, found.phase, found.module) == (1, "data", "input", None)
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(3, 11, "x")]
    assert "id 11" in found.remedy[0]
    assert found.remedy[0].endswith("look at x")
