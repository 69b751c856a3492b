"""What a step costs does not depend on the number of ranks, and what an incident costs is bounded."""

import gc
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradsentinel import (
    Action,
    CrossRankCallback,
    Detector,
    Diagnosis,
    Evidence,
    Finding,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Rollback,
    Sentinel,
)
from gradsentinel.evidence import Sample, TensorEvidence
from gradsentinel.ranks.replicas import ReplicaGroup
from gradsentinel.ranks.testimony import Statement, bounded

SMALL, LARGE = 2, 16384
NAN = float("nan")


@dataclass(frozen=True)
class Collective:
    """One call of torch.distributed, whoever made it."""

    name: str
    dtype: torch.dtype
    bytes: int


class Collectives(TorchDispatchMode):
    """Writes down every collective and how many bytes this rank sends in it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            own = tensors[-1] if "gather" in func.__name__ else tensors[0]  # what is received comes first
            name = func.__name__.split(".")[0]
            self.calls.append(Collective(name, own.dtype, own.numel() * own.element_size()))
        return func(*args, **(kwargs or {}))

    def take(self) -> list[Collective]:
        taken, self.calls = self.calls, []
        return taken


@pytest.fixture
def job() -> Iterator[Callable[[int], None]]:
    """Make this process rank 0 of a job of so many ranks, in which every other rank says what rank 0 says."""

    def start(world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def already_reduced(state, bucket):
    """Stand in for the reduction of DDP, which the fake process group has none of."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def make(run_dir: Path) -> tuple[nn.Module, Sentinel]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
    model.register_comm_hook(None, already_reduced)
    callbacks = [
        NanCallback(state_warmup=0, state_every=0),
        MagnitudeCallback(max_global_norm=1e3, max_value=1e3),
        CrossRankCallback(every=4),
        Rollback(every=100),
    ]
    return model, Sentinel(
        model, torch.optim.AdamW(model.parameters(), 1e-3), callbacks=callbacks, run_dir=run_dir
    )


def collectives_of_steps(run_dir: Path, steps: int) -> list[list[Collective]]:
    model, sentinel = make(run_dir)
    found = []
    with Collectives() as collectives:
        for batch in sentinel.steps([torch.ones(3, 4)] * steps):
            sentinel.backward(model(batch).square().mean())
            collectives.take()  # DDP's own
            sentinel.step(max_norm=1.0)
            found.append(collectives.take())
    return found


SLOTS = 7  # functions, the four callbacks of `make`, Skip and EventLog
DUE = 3  # did a loss scaler overflow; is there something to settle after this step, and to compare


@pytest.mark.slow
def test_a_healthy_step_makes_one_collective_of_a_few_bytes_whatever_the_number_of_ranks(job, tmp_path):
    found = {}
    for world_size in (SMALL, LARGE):
        job(world_size)
        found[world_size] = collectives_of_steps(tmp_path / str(world_size), 3)
    one = Collective("allreduce_", torch.int32, 4 * (SLOTS + DUE))
    assert found == {SMALL: [[one]] * 3, LARGE: [[one]] * 3}


@pytest.mark.slow
def test_a_comparison_of_replicas_takes_few_bytes_whatever_the_number_of_ranks(job, tmp_path):
    found = {}
    for world_size in (SMALL, LARGE):
        job(world_size)
        *_, found[world_size] = collectives_of_steps(tmp_path / str(world_size), 4)
    assert found[SMALL] == found[LARGE]
    assert found[LARGE] == [
        Collective("allreduce_", torch.int32, 4 * (SLOTS + DUE)),  # the agreement of every step
        Collective("allreduce_", torch.int64, 8 * 2),  # one checksum of all parameters, as (x, -x)
        Collective("allreduce_", torch.float32, 4 * 6),  # of norms and losses: count, sum, sum of squares
        Collective("allreduce_", torch.int32, 4 * SLOTS),  # settling what was found
    ]


def footprint(root: object) -> int:
    """Bytes of the Python objects that are reachable from here; not those of torch itself."""
    foreign = (
        type,
        types.ModuleType,
        types.FunctionType,
        torch.Tensor,
        dist.ProcessGroup,
        nn.Module,
        torch.dtype,
    )
    seen: dict[int, object] = {}
    pending = [root]
    while pending:
        entry = pending.pop()
        if id(entry) in seen or isinstance(entry, foreign) or type(entry).__module__.startswith("torch"):
            continue
        seen[id(entry)] = entry
        pending.extend(gc.get_referents(entry))
    return sum(sys.getsizeof(entry) for entry in seen.values())


@pytest.mark.slow
def test_the_memory_of_a_rank_does_not_grow_with_the_number_of_ranks(job, tmp_path):
    sizes = {}
    for world_size in (SMALL, LARGE):
        job(world_size)
        model, sentinel = make(tmp_path / f"run-of-{world_size:05d}-ranks")
        for batch in sentinel.steps([torch.ones(3, 4)] * 8):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(max_norm=1.0)
        sizes[world_size] = footprint(sentinel._watch.run) + footprint(sentinel._watch.agreement.judge)
        sizes[world_size] += sum(footprint(callback) for callback in sentinel._watch.bus.callbacks)
    assert sizes[SMALL] > 1000
    assert abs(sizes[LARGE] - sizes[SMALL]) < 1000


# -- the incident path ---------------------------------------------------------------------------------


MANY = 10_000


class ManyBad(Detector):
    """Finds something wrong with ten thousand tensors in step 1."""

    def on_before_clip(self, event: Any) -> Finding:
        tensors = tuple(
            TensorEvidence(
                name=f"model.layers.{index}.self_attn.qkv_proj.weight",
                nonfinite=index,
                numel=150_994_944,
                norm=NAN,
                first_index=(index, 1),
            )
            for index in range(MANY)
        )
        return Finding(
            kind=Kind.NONFINITE_GRADIENT,
            value=torch.tensor(event.step == 1),
            confirm=lambda: Evidence(
                kind=Kind.NONFINITE_GRADIENT,
                action=Action.SKIP,
                message=f"non-finite gradient in {MANY} parameters",
                tensors=tensors,
                samples=tuple(Sample(position=index, id=f"record {index}") for index in range(MANY)),
            ),
        )


@pytest.mark.slow
def test_an_incident_with_ten_thousand_bad_tensors_sends_a_few_kilobytes_a_rank(job, tmp_path):
    job(LARGE)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sentinel = Sentinel(model, optimizer, callbacks=[ManyBad()], run_dir=tmp_path / "run")
    with Collectives() as collectives:
        for batch in sentinel.steps([torch.ones(3, 4)] * 2):
            sentinel.backward(model(batch).square().mean())
            collectives.take()
            sentinel.step()
    sent = [call.bytes for call in collectives.take()]
    (incident,) = sentinel.incidents
    assert max(sent) < 4096  # and every rank receives this from each other one
    assert len(incident.tensors) == 16
    assert incident.tensors[-1].nonfinite == MANY - 1  # the worst are among them
    assert incident.details["tensor_count"] == MANY
    assert incident.where.endswith(f"and {MANY - 3} more") or incident.where.startswith("sample")
    assert f"{MANY} tensors are affected; the worst are listed" in incident.notes
    assert incident.message == f"non-finite gradient in {MANY} parameters"
    assert len(incident.samples) == 16


class ManyFindings(Detector):
    """Finds something wrong with each of many micro-batches of step 0."""

    looked = 0

    def on_after_backward(self, event: Any) -> Finding:
        return Finding(
            kind=Kind.CUSTOM, value=torch.tensor(event.step == 0), action=Action.SKIP, confirm=self.look
        )

    def look(self) -> Evidence:
        self.looked += 1
        return Evidence(kind=Kind.CUSTOM, action=Action.SKIP, message=f"finding {self.looked}")


def test_of_many_findings_of_one_kind_a_few_are_looked_into(run_dir):
    model, detector = nn.Linear(4, 1), ManyFindings()
    sentinel = Sentinel(
        model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[detector], run_dir=run_dir
    )
    for batch in sentinel.steps([torch.ones(3, 4)] * 200, accumulate=100):
        sentinel.backward(model(batch).square().mean())
        sentinel.step()
    (incident,) = sentinel.incidents
    assert detector.looked == 8
    assert (incident.message, incident.notes) == ("finding 1", tuple(f"finding {n}" for n in range(2, 9)))


words = st.sampled_from(["", "a few words", "long " * 1000, "\N{SNOWMAN}" * 1000])
tensors = st.builds(
    TensorEvidence,
    name=st.just("a.module.of.some.depth.weight"),
    nonfinite=st.integers(0, 2**40),
    numel=st.integers(0, 2**40),
    norm=st.floats(),
    first_index=st.none() | st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)),
)
evidence = st.builds(
    Evidence,
    kind=st.sampled_from(Kind),
    action=st.sampled_from(Action),
    message=words,
    tensors=st.lists(tensors, max_size=60).map(tuple),
    samples=st.lists(st.builds(Sample, position=st.integers(), id=st.just("record")), max_size=60).map(tuple),
    diagnosis=st.builds(
        Diagnosis,
        cause=st.just("unknown"),
        confidence=st.just(0.0),
        evidence=st.lists(words, max_size=40).map(tuple),
        remedy=st.lists(words, max_size=40).map(tuple),
    ),
    details=st.dictionaries(st.sampled_from("abcdef"), words),
)


@given(evidence)
def test_evidence_that_travels_has_a_largest_size(found):
    sent = bounded(found, travels=True)
    assert len(pickle.dumps(Statement("SomeDetector", 12, sent))) < 48 * 1024  # of 4-byte letters
    assert (sent.kind, sent.action, sent.origin) == (found.kind, found.action, found.origin)
    if found.tensors:
        counts = [tensor.nonfinite for tensor in found.tensors]
        assert sent.tensors[0] is found.tensors[0]
        assert max(counts) in [tensor.nonfinite for tensor in sent.tensors]
        assert sent.details.get("tensor_count", len(sent.tensors)) == len(found.tensors)


def test_evidence_that_travels_is_plain_data():
    found = Evidence(
        kind=Kind.CUSTOM,
        action=Action.SKIP,
        message="m",
        samples=(Sample(position=0, id=lambda: None),),
        details={"socket": sys.stdout, "nan": NAN, "count": 3},
    )
    sent = pickle.loads(pickle.dumps(bounded(found, travels=True)))  # noqa: S301 - written just now
    assert (sent.details["nan"], sent.details["count"]) == ("nan", 3)
    assert isinstance(sent.samples[0].id, str)
    assert bounded(found, travels=False) == found


def test_what_no_callback_may_return_from_confirm_is_said():
    with pytest.raises(TypeError, match="it returns an Evidence or None"):
        bounded("bad", travels=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [range(LARGE), range(3, LARGE, 8)], ids=["all", "every eighth"])
def test_a_difference_of_replicas_is_told_in_few_bytes_whatever_the_size_of_the_group(ranks):
    group = ReplicaGroup(name="mesh dimension dp", group=None, ranks=ranks, members=("a.weight", "b.weight"))
    finding = CrossRankCallback().differing(7, group, [0, 1, 2], 123)
    found = finding.resolve()
    assert found is not None
    assert len(pickle.dumps(bounded(found, travels=True))) < 2048
