"""A snapshot that is malformed, or of something else, changes nothing at all."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradsentinel import SnapshotMismatch
from gradsentinel.host import TorchHost
from gradsentinel.state.buffers import BufferShadow
from gradsentinel.state.snapshot import Snapshot, capture, restore
from gradsentinel.state.stateful import load_stateful
from loops import build, fingerprint, generators, make_batches, train_by_hand

SETTINGS = {"random": True, "scheduler": "cosine", "ema": True, "optimizer": "adamw"}


def host_of(run):
    return TorchHost(run.model, run.optimizers, scheduler=run.schedulers, extra={"ema": run.ema})


def trained(steps):
    run = build(**SETTINGS)
    train_by_hand(run, make_batches(steps))
    host = host_of(run)
    return run, host, BufferShadow(host.modules())


def tree_of(steps=2):
    _, host, buffers = trained(steps)
    return capture(host, buffers, step=steps, data={"epoch": 0, "batch": steps, "batches": steps}).to_tree()


def everything(run):
    return fingerprint({**run.state(), "generators": generators()})


JUNK = [
    None,
    True,
    -1,
    3.5,
    "junk",
    b"junk",
    [],
    {},
    [1, 2],
    {"junk": 1},
    torch.zeros(3),
    torch.zeros(()),
    torch.zeros(16, 6, dtype=torch.float64),
    torch.zeros(4, dtype=torch.uint8),
    torch.empty(0),
]


def places(value, path=()):
    """Every place in a nest, by path."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield from places(entry, (*path, key))


TREE = tree_of()
PLACES = list(places(TREE))


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.sampled_from(PLACES),
    st.sampled_from(["drop", "replace", "add"]),
    st.sampled_from(range(len(JUNK))),
)
def test_one_wrong_place_leaves_everything_or_nothing_restored(path, how, junk):
    """Any place, dropped, replaced by junk, or with something strange beside it."""
    tree = copy.deepcopy(TREE)
    owner = tree
    for key in path[:-1]:
        owner = owner[key]
    if how == "drop":
        del owner[path[-1]]
    elif how == "replace":
        owner[path[-1]] = copy.deepcopy(JUNK[junk])
    elif isinstance(owner, dict):
        owner["strange"] = copy.deepcopy(JUNK[junk])
    else:
        owner.append(copy.deepcopy(JUNK[junk]))
    run, host, buffers = trained(5)
    before = everything(run)
    try:
        restore(Snapshot.from_tree(tree), host, buffers)
    except SnapshotMismatch:
        assert everything(run) == before
    else:
        held = tree["parameters"]
        here = {name: p.detach() for name, p in run.model.named_parameters() if name in held}
        assert fingerprint(here) == fingerprint(held)
        assert not any(p.grad is not None for p in run.model.parameters())


@pytest.mark.parametrize("tree", [None, 3, "x", [], {}, {"step": 1}])
def test_what_is_no_snapshot_at_all(tree):
    with pytest.raises(SnapshotMismatch, match="malformed snapshot"):
        Snapshot.from_tree(tree)


WRONG = {
    "another dtype": lambda tree: tree["parameters"].update(
        {"head.weight": tree["parameters"]["head.weight"].double()}
    ),
    "moments of a stranger": lambda tree: tree["optimizers"][0]["state"].update({"stranger": {}}),
    "a moment that is no tensor": lambda tree: tree["optimizers"][0]["state"]["head.weight"].update(
        {"exp_avg": 3.0}
    ),
    "a moment of another shape": lambda tree: tree["optimizers"][0]["state"]["head.weight"].update(
        {"exp_avg": torch.zeros(3)}
    ),
    "a step counter with three numbers": lambda tree: tree["optimizers"][0]["state"]["head.weight"].update(
        {"step": torch.zeros(3)}
    ),
    "a word for a learning rate": lambda tree: tree["optimizers"][0]["groups"][0].update({"lr": "high"}),
    "another number of betas": lambda tree: tree["optimizers"][0]["groups"][0].update({"betas": [0.9]}),
    "one more group": lambda tree: tree["optimizers"][0]["groups"].append({}),
    "a step that is no number": lambda tree: tree.update(step="7"),
    "random states that are none": lambda tree: tree["rng"].update({"torch_cpu": torch.zeros(3)}),
    "an average of another model": lambda tree: tree["stateful"]["extra.ema"].update(
        {"module.head.weight": torch.zeros(2, 2)}
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_it_is_told_before_anything_is_written(wrong):
    tree = copy.deepcopy(TREE)
    WRONG[wrong](tree)
    run, host, buffers = trained(5)
    before = everything(run)
    with pytest.raises(SnapshotMismatch):
        restore(Snapshot.from_tree(tree), host, buffers)
    assert everything(run) == before


class Counter:
    def __init__(self, *, refuses=False):
        self.count, self.refuses = 1, refuses

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        if self.refuses and self.count == 7:
            raise ValueError("not seven")


def test_either_all_objects_take_their_states_or_none():
    first, second = Counter(), Counter(refuses=True)
    with pytest.raises(SnapshotMismatch, match=r"b \(Counter\) does not take its saved state: not seven"):
        load_stateful({"a": {"count": 5}, "b": {"count": 7}}, {"a": first, "b": second})
    assert (first.count, second.count) == (1, 1)
    load_stateful({"a": {"count": 5}, "b": {"count": 6}, "gone": {}}, {"a": first, "b": second})
    assert (first.count, second.count) == (5, 6)


# -- a host that keeps its optimizer state elsewhere -----------------------------------------------


class MasterWeights(TorchHost):
    """The optimizer steps fp32 copies that no module knows, as Megatron's distributed optimizer does."""

    def __init__(self, model):
        self.model = model
        self.masters = {name: p.detach().float() for name, p in model.named_parameters()}
        self.inner = torch.optim.AdamW([nn.Parameter(master) for master in self.masters.values()], lr=1e-4)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def step(self):
        for (_, parameter), master in zip(
            self.model.named_parameters(), self.inner.param_groups[0]["params"], strict=True
        ):
            master.grad = parameter.grad.float()
        self.inner.step()
        for (name, parameter), master in zip(
            self.model.named_parameters(), self.inner.param_groups[0]["params"], strict=True
        ):
            parameter.data.copy_(master)
            parameter.grad = None
            self.masters[name] = master.detach()

    def capture_optimizers(self, keep):
        state = [
            {key: keep(value) for key, value in self.inner.state[master].items()}
            for master in self.inner.param_groups[0]["params"]
        ]
        return [{"masters": {name: keep(master) for name, master in self.masters.items()}, "moments": state}]

    def prepare_optimizers(self, saved):
        if saved[0]["masters"].keys() != self.masters.keys():
            raise SnapshotMismatch("other master weights")

        def write():
            for master, moments in zip(
                self.inner.param_groups[0]["params"], saved[0]["moments"], strict=True
            ):
                self.inner.state[master] = {key: value.clone() for key, value in moments.items()}
            for name, master in zip(self.masters, self.inner.param_groups[0]["params"], strict=True):
                master.data.copy_(saved[0]["masters"][name])

        return write


def test_a_host_says_itself_what_its_optimizers_state_is():
    """Steps too small for bfloat16 are in the master weights only: they must come back, too."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).bfloat16()
    host = MasterWeights(model)
    buffers = BufferShadow(host.modules())

    def step():
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
        host.step()

    step()
    snapshot = capture(host, buffers, step=1, data={})
    assert snapshot.nbytes() > 20 * 4 * 3
    step()
    expected = fingerprint(host.masters)
    step()
    restore(Snapshot.from_tree(snapshot.to_tree()), host, buffers)
    step()
    assert fingerprint(host.masters) == expected
    snapshot.optimizers[0]["masters"]["weight"][0, 0] = float("nan")
    assert snapshot.flaws()
