"""What is read off the source of the user's functions: what they write to that a replay cannot put back."""

import inspect
import linecache
import operator
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from gradsentinel.diagnosis.loop_code import LoopCode
from gradsentinel.diagnosis.own_code import assigned_in_turns, containers_written, writes_beside_autograd

CACHE, ORDER, TENSOR = {}, [], torch.zeros(3)
ARRAY, RAW = np.zeros(3), bytearray(3)


class Owner:
    table = {}  # noqa: RUF012 - it is shared on purpose

    def fills(self, x):
        self.seen[len(x)] = x

    def empties(self, x):
        self.seen.clear()
        return x

    def sets(self, x):
        setattr(self, "phase", x)  # noqa: B010 - the very thing

    def by_alias(self, x):
        table = Owner.table
        table[len(x)] = x

    def deletes(self, x):
        del CACHE[len(x)]


def takes(x):
    CACHE.setdefault(len(x), []).append(x)


def alias_of_an_element(x):
    found = CACHE.get("x")
    found.append(x)


def writes_to_bytes(x):
    memoryview(RAW)[0] = x


def keeps_for_itself(x):
    found, rows = {}, []
    found["x"] = x
    rows.append(x)
    for row in rows:
        row[0] = 1
    x[2] = 0
    x.grad[1] = 0
    return sorted(rows, key=len)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (Owner.fills, {"seen"}),
        (Owner.empties, {"seen"}),
        (Owner.sets, {"phase"}),
        (Owner.by_alias, {"table"}),
        (Owner.deletes, {"CACHE"}),
        (takes, {"CACHE"}),
        (alias_of_an_element, {"found"}),
        (keeps_for_itself, set()),
        (lambda x: ARRAY.fill(x), {"ARRAY"}),  # noqa: PLW0108 - as below
        (lambda x: np.copyto(ARRAY[1:], x), {"ARRAY"}),
        (lambda x: np.add(x, 1, out=ARRAY), {"ARRAY"}),
        (lambda x: TENSOR.data.fill_(x + 1), {"TENSOR"}),
        (lambda x: TENSOR[1:].numpy().fill(x), {"TENSOR"}),
        (writes_to_bytes, {"RAW"}),
        (lambda x: torch.add(x, np.sort(x)), set()),
        (lambda x: ORDER.append(x), {"ORDER"}),  # noqa: PLW0108 - a lambda is what is read
    ],
)
def test_containers_that_outlive_the_call(function, names):
    assert containers_written(function.__code__) == names


def by_data(h):
    h.data[0] = 1


def by_alias(h):
    alias = h.detach()
    alias[0] = 1


def in_place_on_data(h):
    h.data.mul_(2)


def in_numpy(h):
    h.detach().cpu().numpy()[0] = 1


def shared_with_numpy(h):
    alias = np.asarray(h.detach())
    alias[0] = 1


def copied_to(h):
    np.copyto(h.detach().numpy(), 1)


def out_of_sight(h):
    torch.add(h, 1, out=h.data)


def without_graph(h):
    with torch.no_grad():
        h[0] = 1


def by_another_storage(h):
    h.data = torch.where(h > 0, h, 0)


def by_the_name_of_an_attribute(h):
    setattr(h, "data", torch.where(h > 0, h, 0))  # noqa: B010 - the very thing


def by_the_method_of_the_class(h):
    torch.Tensor.fill_(h.detach()[0], 1)


def by_the_method_behind_an_operator(h):
    h.detach().__setitem__(0, 1)


def by_a_function_for_an_operator(h):
    operator.setitem(h.detach(), 0, 1)


def many_at_once(h):
    torch._foreach_mul_([h.detach()[0]], 2)


@torch.no_grad()
def decorated(h):
    h.mul_(2)


@pytest.mark.parametrize(
    "function",
    [
        by_data,
        by_alias,
        in_place_on_data,
        in_numpy,
        shared_with_numpy,
        copied_to,
        out_of_sight,
        without_graph,
        by_another_storage,
        by_the_name_of_an_attribute,
        by_the_method_of_the_class,
        by_the_method_behind_an_operator,
        by_a_function_for_an_operator,
        many_at_once,
        decorated,
    ],
)
def test_a_write_that_autograd_does_not_see(function):
    (place,) = writes_beside_autograd(inspect.unwrap(function).__code__)
    assert place.startswith("test_own_code.py:")


def averages(model, average):
    with torch.no_grad():
        for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
            kept.mul_(0.9).add_(parameter, alpha=0.1)
    for parameter in model.parameters():
        parameter.data.clamp_(-1, 1)


def counts(losses):
    total, hits = 0.0, [0, 0]
    with torch.no_grad():
        total += float(losses)
        hits[0] = 1
    return total


def on_a_copy(h):
    copy = h.detach().clone()
    copy[0] = 1
    other = h.detach().numpy().copy()
    other[0] = 1
    return copy


def with_graph(h):
    h[0] = 1
    return h.mul_(2)


def only_reads(h):
    return h.detach().numpy()[0], h.data.sum()


class Dataset:
    def keeps_its_data(self, rows):
        self.data = rows


@pytest.mark.parametrize(
    "function", [averages, counts, on_a_copy, with_graph, only_reads, Dataset.keeps_its_data]
)
def test_what_touches_no_activation_or_is_seen_by_autograd(function):
    assert writes_beside_autograd(function.__code__) == []


def test_what_a_name_stands_for_decides():
    code = without_graph.__code__
    assert writes_beside_autograd(code, {"h": [0, 1]}) == []
    assert writes_beside_autograd(code, {"h": nn.Parameter(torch.ones(1))}) == []
    assert writes_beside_autograd(code, {"h": torch.ones(1)}) != []
    assert writes_beside_autograd(code, {"h": np.ones(1)}) != []


def changes(owner, batches):
    owner.before = 1
    for batch in batches:
        owner.rate = batch
        CACHE["rate"] = batch
        local = batch
    return local


def test_what_a_loop_changes_from_turn_to_turn():
    assert assigned_in_turns(changes.__code__, every=False) == {".rate", "CACHE"}
    assert assigned_in_turns(changes.__code__, every=True) == {".before", ".rate", "CACHE"}


def test_code_without_a_source_is_known_by_its_names():
    scope = {}
    exec(  # noqa: S102 - what a notebook's lost cell is
        "def made(h):\n    h.data[0] = 1\n"
        "def read(h):\n    return h.data.sum()\n"
        "def other(h):\n    h[0] = 1\n",
        scope,
    )
    code = scope["made"].__code__
    assert containers_written(code) == set()
    assert assigned_in_turns(code, every=True) == set()
    assert writes_beside_autograd(code) == ["<string>:1"]
    assert writes_beside_autograd(scope["read"].__code__) == []
    assert writes_beside_autograd(scope["other"].__code__) == []


def test_generated_code_that_nests_too_deep_to_be_put_in_words_is_no_error():
    source = f"def made(h):\n    with block({' + '.join(['h'] * 950)}):\n        h.data[0] = 1\n"
    linecache.cache["<generated>"] = (len(source), None, source.splitlines(keepends=True), "<generated>")
    scope = {}
    exec(compile(source, "<generated>", "exec"), scope)  # noqa: S102 - generated
    assert writes_beside_autograd(scope["made"].__code__) == ["<generated>:3"]


def test_a_function_that_gets_an_activation_under_no_grad_writes_without_a_graph():
    def spoils(h):
        h[0] = 1

    def counts_hits(h):
        hits = 0
        hits += int((h > 0).sum())
        return hits

    def counts(h):
        plain = torch.ones(2)
        with torch.set_grad_enabled(False):
            counts_hits(h)
            spoils(plain)
        return LoopCode([])

    def by_name(h):
        with torch.no_grad():
            spoils(h)
        return LoopCode([])

    line = spoils.__code__.co_firstlineno + 1
    assert by_name(torch.ones(2, requires_grad=True) * 2).hidden_writes() == [f"test_own_code.py:{line}"]
    assert by_name(torch.ones(2)).hidden_writes() == []
    assert counts(torch.ones(2, requires_grad=True) * 2).hidden_writes() == []


class Augment:
    """Called by no name."""

    def __call__(self, h):
        h.data[1] = 1


def test_objects_that_a_loop_calls_belong_to_it():
    def loop(h, augment):
        augment(h)
        return LoopCode([])

    line = Augment.__call__.__code__.co_firstlineno + 1
    assert loop(torch.ones(2), Augment()).hidden_writes() == [f"test_own_code.py:{line}"]


def test_a_function_made_by_exec_belongs_to_the_loop():
    scope = {}
    exec("def made(h):\n    h.data[0] = 1\n", scope)  # noqa: S102 - as above
    made = scope["made"]

    def loop(h):
        made(h)
        return LoopCode([])

    assert loop(torch.ones(2)).hidden_writes() == ["<string>:1"]


def test_what_cannot_be_asked_what_it_is_is_left_alone():
    def loop():
        gone = weakref.proxy(nn.Identity())
        code = LoopCode([])
        return code, gone

    assert loop()[0].hidden_writes() == []


def test_the_loop_is_what_is_running_and_what_it_calls():
    def forward(h):
        h.data[0] = 1  # a replay does the same

    def helper(h):
        h.data[1] = 1

    def loop(h):
        forward(h)
        helper(h)
        return LoopCode([forward])

    code = loop(torch.ones(2))
    line = helper.__code__.co_firstlineno + 1
    assert code.hidden_writes() == [f"test_own_code.py:{line}"]
    assert code.assigned() == set()


def test_a_look_at_the_loop_keeps_nothing_of_it_alive():
    def loop(*, own):
        kept = locals() if own else {}
        activation = torch.ones(2)
        held = weakref.ref(activation)
        assert LoopCode([]).hidden_writes() == []
        del activation
        return held() is None, kept

    assert loop(own=False) == (True, {})
    assert loop(own=True)[1]["own"] is True  # a dictionary that the program asked for stays its own
