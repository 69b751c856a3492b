"""All ranks watch for the same things, or none starts: a difference is told to every rank, in words."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradsentinel import (
    Action,
    BeforeClip,
    Callback,
    ConfigurationError,
    Detector,
    Finding,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Rollback,
    Sentinel,
    Skip,
    TensorBoardCallback,
)
from gradsentinel.ranks.comparison import _words
from gradsentinel.ranks.topology import VARIABLE

pytestmark = pytest.mark.multiprocess

RANKS = 3


@dataclass(kw_only=True)
class Custom(Detector):
    """A user's own callback, with what such callbacks hold."""

    names: set[str] = field(default_factory=set)
    judge: Callable[[Any], Any] | None = None
    helper: Any = None
    device: torch.device | None = None
    own: int = field(default=0, repr=False)


class Unprintable(Detector):
    def __init__(self, broken: bool) -> None:  # noqa: FBT001
        self.broken = broken

    def __repr__(self) -> str:
        if self.broken:
            raise RuntimeError("no words")
        return "Unprintable()"


class Plain(Detector):
    """Not a dataclass; what it holds is its own business."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Helper:
    """Its repr is its address."""


def bound(value: float) -> MagnitudeCallback:
    return MagnitudeCallback(max_global_norm=value)


Lists = Callable[[int], list[Callback]]

DIFFERENT: dict[str, tuple[Lists, list[str]]] = {
    "a callback on rank 0 only": (
        lambda rank: [NanCallback(), *([bound(1.0)] if rank == 0 else [])],
        ["rank 0 has [MagnitudeCallback(max_global_norm=1.0", "ranks 1-2 have nothing more"],
    ),
    "a callback missing on the last rank": (
        lambda rank: [NanCallback(), *([bound(1.0)] if rank < 2 else [])],
        ["rank 0 has [MagnitudeCallback(", "rank 2 has nothing more"],
    ),
    "another argument": (
        lambda rank: [NanCallback(), bound(2.0 if rank == 1 else 1.0)],
        [
            "rank 0 has [MagnitudeCallback(max_global_norm=1.0",
            "rank 1 has [MagnitudeCallback(max_global_norm=2.0",
        ],
    ),
    "another argument on each rank": (
        lambda rank: [bound(1.0 + rank)],
        ["max_global_norm=1.0", "rank 1 has [MagnitudeCallback(max_global_norm=2.0", "1 more differ"],
    ),
    "another action": (
        lambda rank: [NanCallback(action="skip" if rank else "abort")],
        ["NanCallback(action=<Action.ABORT: 5>", "ranks 1-2 have [NanCallback(action=<Action.SKIP: 3>"],
    ),
    "another order": (
        lambda rank: [NanCallback(), Rollback()] if rank else [Rollback(), NanCallback()],
        ["rank 0 has the order [Rollback(", "ranks 1-2 have the order [NanCallback("],
    ),
    "twice on one rank": (
        lambda rank: [Skip(), *([Skip(max_skips=10)] if rank == 2 else [])],
        ["rank 0 has nothing more", "rank 2 has [Skip("],
    ),
    "another set": (
        lambda rank: [Custom(names={"a", "b"} if rank else {"a", "c"})],
        ["names={'a', 'c'}", "names={'a', 'b'}"],
    ),
    "a long list, different at its end": (
        lambda rank: [Custom(names={"x" * 5000, "y"} if rank else {"x" * 5000, "z"})],
        ["rank 0 has [Custom(", "(sha256 "],
    ),
    "a callback that cannot be told on one rank": (
        lambda rank: [Unprintable(rank == 1)],
        ["rank 0 has [Unprintable()]", "rank 1 has [Unprintable]"],
    ),
}

ALIKE: dict[str, Lists] = {
    "objects that print their address": lambda rank: [Custom(helper=Helper(), judge=lambda x: x + rank)],
    "each rank's own device": lambda rank: [Custom(device=torch.device("cuda", rank))],
    "fields that are no settings": lambda rank: [Custom(own=rank)],
    "classes that are no dataclasses": lambda rank: [Plain(rank)],
    "a writer": lambda rank: [TensorBoardCallback(writer=Writer())],
    "a writer on rank 0 only": lambda rank: [TensorBoardCallback(writer=None if rank else Writer())],
}


class Writer:
    """Takes what a SummaryWriter takes."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def start(rank: int, folder: Path, cases: dict[str, Lists]) -> dict[str, str]:
    said: dict[str, str] = {}
    for name, callbacks in cases.items():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            sentinel = Sentinel(model, optimizer, callbacks=callbacks(rank), run_dir=folder / name)
        except ConfigurationError as error:
            said[name] = str(error)
        else:
            sentinel.close()
            said[name] = "started"
    return said


def test_settings_that_differ_stop_every_rank_and_are_named(tmp_path):
    said = run_ranks(start, RANKS, tmp_path, tmp_path, {name: case for name, (case, _) in DIFFERENT.items()})
    assert said[1:] == said[:-1]
    for name, (_, parts) in DIFFERENT.items():
        text = said[0][name]
        assert text.startswith("the ranks have different callbacks or settings"), name
        assert [part for part in parts if part not in text] == [], (name, text)


def test_what_differs_from_process_to_process_by_nature_is_no_difference(tmp_path):
    said = run_ranks(start, RANKS, tmp_path, tmp_path, ALIKE)
    assert said == [dict.fromkeys(ALIKE, "started")] * RANKS


def with_a_function_on_rank_0(rank: int, folder: Path) -> list[tuple[int, str, list[int]]]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder)

    def suspect(event: BeforeClip) -> Finding:
        return Finding(
            kind=Kind.CUSTOM, value=torch.tensor(event.step == 1), action=Action.SKIP, message="it says so"
        )

    if rank == 0:
        sentinel.on(BeforeClip, suspect)
    with sentinel:
        for batch in sentinel.steps([torch.ones(3, 2)] * 3):
            sentinel.backward(model(batch).mean())
            sentinel.step()
    return [(i.step, i.action.label, [r.rank for r in i.ranks]) for i in sentinel.incidents]


def test_a_plain_function_may_be_on_rank_0_only_and_its_findings_count(tmp_path):
    said = run_ranks(with_a_function_on_rank_0, 2, tmp_path, tmp_path / "run")
    assert said == [[(1, "skip", [0])]] * 2


def replicas_of_other_sizes(rank: int, folder: Path) -> str:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if rank == 1:  # a parameter that only this rank's model knows
        model.module.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    try:
        Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder)
    except ConfigurationError as error:
        return str(error)
    return "started"


def test_replicas_with_other_parameters_stop_every_rank(tmp_path):
    said = run_ranks(replicas_of_other_sizes, 2, tmp_path, tmp_path / "run")
    assert said[0] == said[1]
    assert "different parameters: on rank 0: data-parallel replicas (2 parameters here)" in said[0]


Places = Callable[[int, pytest.MonkeyPatch], Any]
"""Gives a rank its mesh or its environment."""


def outside_of_the_mesh(rank: int, patch: pytest.MonkeyPatch) -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1])


def another_topology(rank: int, patch: pytest.MonkeyPatch) -> None:
    if rank:
        patch.setenv(VARIABLE, "dp=3" if rank == 1 else "tp=3")


def a_wrong_topology(rank: int, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(VARIABLE, "dp=3" if rank == 1 else "dp=2")


def a_mesh_and_another_topology(rank: int, patch: pytest.MonkeyPatch) -> DeviceMesh:
    patch.setenv(VARIABLE, f"dp={rank}")  # nobody asks it
    return DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("dp",))


PLACES: dict[Places, str] = {
    outside_of_the_mesh: "rank 2: this rank is not in the device mesh that was given as mesh=",
    another_topology: f"{VARIABLE} is not the same on all ranks: None on rank 0, 'dp=3' on rank 1",
    a_wrong_topology: f"ranks 0, 2: {VARIABLE}='dp=2': that makes 2 ranks, and the job has 3",
    a_mesh_and_another_topology: "started with {'dp': %d}",
}


def take_place(rank: int, folder: Path) -> list[str]:
    said = []
    for case in PLACES:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.MonkeyPatch.context() as patch:
            mesh = case(rank, patch)
            try:
                sentinel = Sentinel(model, optimizer, run_dir=folder / case.__name__, mesh=mesh)
            except ConfigurationError as error:
                said.append(str(error))
            else:
                said.append(f"started with {sentinel._watch.run.rank.coordinates}")
                sentinel.close()
    return said


def test_a_rank_without_a_place_stops_every_rank_at_once_with_the_same_words(tmp_path):
    told = run_ranks(take_place, RANKS, tmp_path, tmp_path, timeout=30)
    for case, text in enumerate(PLACES.values()):
        said = [by_rank[case] for by_rank in told]
        if "%d" in text:
            assert said == [text % place for place in (1, 2, 0)]
        else:
            assert said[0].startswith(text)
            assert said == [said[0]] * RANKS


def test_settings_read_the_same_in_every_process():
    assert _words({"b", "a", "c"}) == "{'a', 'b', 'c'}"
    assert _words({"key": [{2, 1}, ("x", None)]}) == "{'key': [{1, 2}, ['x', None]]}"
    assert _words(Helper()) == _words(Helper())
    assert _words("cuda:3 at 0x7f0000000000") == _words("cuda:4 at 0x7f1111111111")
