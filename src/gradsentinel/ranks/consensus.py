"""The one place with collectives on the hot path: every rank hears the same decision."""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradsentinel.devices import device_of
from gradsentinel.errors import ConsensusError
from gradsentinel.ranks.topology import fold_ranks

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds without a further rank that signs in, after which a roll call is closed."""
_LONGEST_ROLL_CALL = 6
"""A roll call is closed after so many times the patience, whatever happens."""
_starts = itertools.count()
"""Numbers the agreements that this process has begun; the ranks begin the same ones."""
_MOST_NAMED = 64
"""So many absent ranks are looked for one by one; the others are counted."""


class Consensus(Protocol):
    """How the ranks of a job agree; every method is called on every rank, in the same order."""

    rank: int
    world_size: int

    def agree(self, levels: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks of a 1-dim int32 tensor; no wait for the device."""

    def differ(self, values: Tensor, group: Any) -> Tensor:
        """Return, per element of a 1-dim int64 tensor, whether the ranks of a group hold different ones.

        A rank that has nothing to compare gives `ABSENT` in every element. `group` None is the whole job.
        """

    def total(self, values: Tensor) -> Tensor:
        """Return the element-wise sum over all ranks of a 1-dim float32 tensor; no wait for the device."""

    def copy_from(self, source: int, tensors: Sequence[Tensor], group: Any) -> None:
        """Overwrite tensors with those of one rank of a group; called on every rank of the group."""

    def all_of(self, fine: bool) -> bool:  # noqa: FBT001 - the question is the argument
        """Return True if every rank says True; waits."""

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank; incident path only."""

    def close(self) -> None:
        """Give the group back when the run has ended well on every rank; a second call does nothing."""


_LET_GO = 0.05
"""Seconds."""
ABSENT = -(2**62)
"""The neutral element of `differ`: below every checksum."""


class LocalConsensus:
    """A job of one process agrees with itself."""

    rank = 0
    world_size = 1

    def agree(self, levels: Tensor) -> Tensor:
        """Return the levels as they are."""
        return levels

    def differ(self, values: Tensor, group: Any) -> Tensor:
        """Return False for each element."""
        del group
        return torch.zeros_like(values, dtype=torch.bool)

    def total(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        return values

    def copy_from(self, source: int, tensors: Sequence[Tensor], group: Any) -> None:
        """Do nothing: there is no other rank."""

    def all_of(self, fine: bool) -> bool:  # noqa: FBT001 - see Consensus
        """Return the answer as it is."""
        return fine

    def gather(self, value: T) -> list[T]:
        """Return the one value."""
        return [value]

    def close(self) -> None:
        """Do nothing: there is no group."""


class DistributedConsensus:
    """Agreement over all ranks of a job: one small int32 all_reduce(MAX) a step, in a group of its own.

    A group of its own, because the framework's collectives may be in flight at the same time, and
    because its timeout is ours. When a collective fails, the ranks that noticed hang up, so that those
    who wait for them notice too, and sign in at the job's key-value store; the others are the ones
    that did not answer. After that every call fails at once. Made on: every rank.

    Args:
        device: where the hot path's tensors live.
        timeout: seconds that a rank may keep the others waiting. NCCL and HCCL report a timeout
            through their watchdog, which ends the process; gloo raises, which becomes a ConsensusError.
    """

    def __init__(self, *, device: torch.device, timeout: float = 600.0) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = device
        self._timeout = timeout
        self._group: Any = None
        self._failure = ""
        """Why the ranks cannot agree any more."""
        self._name = f"gradsentinel/start/{next(_starts)}"
        with self._answered("; was the watch started on every rank?"):
            self._group = dist.new_group(timeout=timedelta(seconds=timeout))
        self._name = f"gradsentinel/{self._group.group_name}"
        # A store that outlives a restart still holds the names that dead processes left.
        drawn = torch.tensor([secrets.randbits(62)], device=device)
        with self._answered():
            dist.all_reduce(drawn, op=dist.ReduceOp.MAX, group=self._group)
        self._name += f"/{int(drawn)}"

    def agree(self, levels: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks; raises ConsensusError."""
        agreed = levels.to(self._device, copy=True)
        with self._answered():
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._group)
        return agreed.to(levels.device)

    def differ(self, values: Tensor, group: Any) -> Tensor:
        """Return which elements the ranks of the group hold different values of; raises ConsensusError.

        The largest x and the largest -x give away a difference in one all_reduce(MAX), whatever the
        number of ranks.
        """
        present = values > ABSENT
        both = torch.cat([values, torch.where(present, -values, ABSENT)]).to(self._device)
        with self._answered():
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group if group is not None else self._group)
        largest, negated = both.to(values.device).chunk(2)
        return (largest > ABSENT) & (largest != -negated)

    def total(self, values: Tensor) -> Tensor:
        """Return the element-wise sum over all ranks; raises ConsensusError."""
        wide = device_of(self._device).wide  # HCCL adds up no float64
        summed = values.to(self._device, wide if values.dtype is torch.float64 else None, copy=True)
        with self._answered():
            dist.all_reduce(summed, group=self._group)
        return summed.to(values)

    def copy_from(self, source: int, tensors: Sequence[Tensor], group: Any) -> None:
        """Overwrite tensors with those of one rank of a group; raises ConsensusError."""
        with self._answered(), torch.no_grad():
            for tensor in tensors:
                travelling = tensor.to(self._device).contiguous()
                dist.broadcast(travelling, src=source, group=group)
                tensor.copy_(travelling)

    def all_of(self, fine: bool) -> bool:  # noqa: FBT001 - see Consensus
        """Return True if every rank says True; raises ConsensusError."""
        return not int(self.agree(torch.tensor([0 if fine else 1], dtype=torch.int32)).item())

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank; raises ConsensusError."""
        gathered: list[Any] = [None] * self.world_size
        with self._answered():
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def close(self) -> None:
        """Give the group back: if gloo still works for it when the interpreter ends, the process aborts."""
        group, self._group, self._failure = self._group, None, self._failure or "the run is closed"
        if group is not None:
            give_back(group)

    @contextmanager
    def _answered(self, hint: str = "") -> Iterator[None]:
        """Turn a failed collective into an error that names who did not answer."""
        if self._failure:
            raise ConsensusError(self._failure)
        try:
            yield
        except RuntimeError as error:
            self._hang_up(error)
            self._failure = self._who_is_missing(error) + hint
            raise ConsensusError(self._failure) from error

    def _hang_up(self, error: RuntimeError) -> None:
        """Close our connections: who waits for this rank hears of it now and not at its own timeout."""
        if self._device.type != "cpu":
            return  # with NCCL and HCCL the watchdog ends the process, and the connections with it
        traceback.clear_frames(error.__traceback__)  # they hold the group, which closes when nobody does
        group, self._group = self._group, None
        if group is None:  # there was none yet; torch would take the whole job's instead
            return
        give_back(group)

    def _who_is_missing(self, error: RuntimeError) -> str:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        patience = min(_PATIENCE, self._timeout)
        verdict = _ask(
            lambda: _roll_call(_store(), self._name, self.rank, self.world_size, patience), patience
        )
        if verdict is None:
            return (
                "the ranks could not agree, and nobody can say who is missing: the job's store does not "
                f"answer, so rank 0, or the machine that holds the store, is gone too: {reason}"
            )
        count, named = verdict
        if not count:
            return f"the ranks could not agree although all of them noticed: {reason}"
        if self.rank in named:
            return f"this rank came too late, the others had given up on it: {reason}"
        more = f" and {count - len(named)} more" if count > len(named) else ""
        return f"no answer from {fold_ranks(named)}{more}: {reason}"


Verdict = tuple[int, list[int]]
"""How many ranks are missing, and which, as far as they were looked for."""


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def give_back(group: Any) -> None:
    """Destroy a group, as soon as the caller lets go of it, too."""
    # A gloo of torch 2.6 waits for its threads while it holds the interpreter, which they need to let go of
    # the last collective's tensors: they are given the time.
    time.sleep(_LET_GO)
    with suppress(RuntimeError, ValueError):  # it is gone already, or another rank has closed it
        dist.destroy_process_group(group)


def _ask(question: Callable[[], Verdict], patience: float) -> Verdict | None:
    """Return the answer; None if there is none in time: a store without power neither answers nor refuses."""
    answers: list[Verdict] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):  # ValueError: the store is closed already
            answers.append(question())

    thread = threading.Thread(target=ask, name="gradsentinel-roll-call", daemon=True)
    thread.start()
    thread.join((_LONGEST_ROLL_CALL + 2) * patience)
    return answers[0] if answers else None


def _roll_call(store: Any, key: str, rank: int, world_size: int, patience: float) -> Verdict:
    """Sign in and return who did not; who comes first counts, the others wait for what it found.

    Whatever the number of ranks, a rank goes to the store four times; the one that counts goes once
    more per poll, and at the end a few times per absentee.
    """
    store.set(f"{key}/{rank}", "here")
    present = store.add(f"{key}/present", 1)
    if present > 1:
        store.wait([f"{key}/verdict"], timedelta(seconds=(_LONGEST_ROLL_CALL + 1) * patience))
        count, named = json.loads(store.get(f"{key}/verdict"))
        return count, named
    start = latest = time.monotonic()
    while present < world_size and time.monotonic() < min(
        latest + patience, start + _LONGEST_ROLL_CALL * patience
    ):
        time.sleep(0.05)
        before, present = present, store.add(f"{key}/present", 0)
        if present > before:
            latest = time.monotonic()
    named = _absent(store, key, range(world_size), _MOST_NAMED) if present < world_size else []
    verdict = (max(world_size - present, len(named)), named)
    store.set(f"{key}/verdict", json.dumps(verdict))
    return verdict


def _absent(store: Any, key: str, ranks: range, most: int) -> list[int]:
    """Return who did not sign in, at most so many: by halves, so that few absentees need few questions."""
    if store.check([f"{key}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [ranks[0]]
    middle = len(ranks) // 2
    found = _absent(store, key, ranks[:middle], most)
    return found if len(found) >= most else found + _absent(store, key, ranks[middle:], most - len(found))


def default_consensus(device: torch.device, *, timeout: float = 600.0) -> Consensus:
    """Return the consensus of this process: over all ranks if torch.distributed runs, else local."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return LocalConsensus()
    return DistributedConsensus(device=_collective_device(device), timeout=timeout)


def _collective_device(device: torch.device) -> torch.device:
    """The device that the default group's backend can reduce on: the training device, else the CPU."""
    world = dist.group.WORLD
    types = {supported.type for supported in world._device_types} if world is not None else set()
    return device if device.type in types else torch.device("cpu")
