"""Are the ranks alike? Their settings at the start, and what must be bit-identical from time to time."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsentinel.bus import Bus
from gradsentinel.callback import Callback, Comparer, Detector, Findings
from gradsentinel.errors import ConfigurationError
from gradsentinel.judge import Filed
from gradsentinel.ranks.consensus import Consensus
from gradsentinel.ranks.replicas import ReplicaGroup, absent, combine
from gradsentinel.ranks.topology import VARIABLE, Rank, fold_ranks
from gradsentinel.run import Run

_ADDRESS = re.compile(r"( at )?\b0x[0-9a-fA-F]{6,}")
_DEVICE = re.compile(r"\b(cuda|npu|xpu|hpu|mps):\d+")
_LONGEST_LINE = 1000
"""Characters of one callback's settings that travel to say what differs."""


def take_places(
    consensus: Consensus, path: str, locate: Callable[[], Rank], *, stated: str | None = None
) -> tuple[Rank, str]:
    """Return this rank's place in the job, and the run directory that rank 0 wants; called on every rank.

    Args:
        consensus: how the ranks agree.
        path: the run directory that this rank wants.
        locate: tells this rank's place, or raises ConfigurationError.
        stated: what the environment says of the job, if it is asked; the same on every rank.

    Raises:
        ConfigurationError: on every rank, if one has no place, or if the ranks were told of different jobs.
    """
    found: Rank | None = None
    problem = ""
    try:
        found = locate()
    except ConfigurationError as error:
        problem = str(error)
    everyone = consensus.gather((path, problem, stated))
    without = [(rank, problem) for rank, (_, problem, _) in enumerate(everyone) if problem]
    if found is None or without:
        raise ConfigurationError(problem if consensus.world_size == 1 else _without_place(without))
    texts = [text for _, _, text in everyone]
    odd = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if odd:
        raise ConfigurationError(
            f"{VARIABLE} is not the same on all ranks: {texts[0]!r} on rank 0, {texts[odd[0]]!r} on "
            f"{fold_ranks(rank for rank in odd if texts[rank] == texts[odd[0]])}"
        )
    return found, everyone[0][0]


def _without_place(without: Sequence[tuple[int, str]]) -> str:
    """Say who has no place, and why, the same reason once."""
    by_reason: dict[str, list[int]] = {}
    for rank, problem in without:
        by_reason.setdefault(problem, []).append(rank)
    told = [f"{fold_ranks(ranks)}: {reason}" for reason, ranks in by_reason.items()]
    more = f"; and {len(told) - 3} more reasons" if len(told) > 3 else ""
    return "; ".join(told[:3]) + more


def compare_settings(run: Run, bus: Bus) -> None:
    """Compare the callbacks, their settings and the guard over the ranks; called on every rank, at the start.

    Only a hash travels unless there is a difference.

    Raises:
        ConfigurationError: on every rank, if the ranks watch for different things; says which differ.
    """
    if run.consensus.world_size == 1:
        return
    mine = [
        (bus.ask(callback, partial(_words, callback), run.step, "__repr__") or type(callback).__name__)
        + _interval(callback)
        for callback in bus.callbacks
    ]
    mine.append(f"guard='device', lag={run.lag}" if run.decides_late else "guard='host'")
    digest = _digest("\n".join(mine))
    digests = run.consensus.gather(digest)
    if len(set(digests)) == 1:
        _compare_members(run)
        return
    everyone = run.consensus.gather([line if len(line) <= _LONGEST_LINE else _cut(line) for line in mine])
    odd = next(found for found in digests if found != digests[0])
    ranks = [rank for rank, found in enumerate(digests) if found == odd]
    others = len([found for found in digests if found not in {digests[0], odd}])
    here, there = _unmatched(everyone[0], everyone[ranks[0]])
    raise ConfigurationError(
        f"the ranks have different callbacks or settings: rank 0 has {here}, "
        f"{fold_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {there}"
        + (f", and {others} more differ from both" if others else "")
        + "; give every rank the same list, in the same order (a plain function, registered with "
        "sentinel.on, may be on one rank alone)"
    )


def _compare_members(run: Run) -> None:
    """Compare the names of the parameters within each group of replicas; other groups may have others."""
    odd: list[str] = []
    for group in run.replicas:
        names = torch.tensor([int(_digest("\n".join(group.members))[:15], 16)])
        if bool(run.consensus.differ(names, group.group)):
            odd.append(f"{group.name} ({len(group.members)} parameters here)")
    everyone = run.consensus.gather(odd) if not run.consensus.all_of(not odd) else []
    found = next((f"on rank {rank}: {', '.join(odd)}" for rank, odd in enumerate(everyone) if odd), "")
    if found:
        raise ConfigurationError(f"ranks that should be replicas have different parameters: {found}")


def compare_replicas(run: Run, bus: Bus, step: int, comparers: Sequence[Comparer]) -> list[Filed]:
    """Compare what must be alike, for those callbacks whose time it is; called on every rank.

    A rank whose callback raised takes its place in the collectives with nothing to compare.
    """
    filed: list[Filed] = []
    if run.consensus.world_size == 1:
        return filed
    for comparer in comparers:
        found = [_compare_group(run, bus, comparer, group, step) for group in run.replicas]
        filed += itertools.chain.from_iterable(entries for entries in found if entries is not None)
        if all(entries is None for entries in found):
            bus.ask(comparer, partial(comparer.alike, run.step), step, "alike")
        filed += _compare_standing(run, bus, comparer, step)
    return filed


def _compare_group(
    run: Run, bus: Bus, comparer: Comparer, group: ReplicaGroup, step: int
) -> list[Filed] | None:
    """Return what is said of a difference in the group, None if there is none.

    One number per rank is compared first, and the parameters one by one only if those differ.
    """
    sums = bus.ask(comparer, lambda: _fingerprints(comparer, group), step, "fingerprints")
    device = run.host.device
    total = absent(1, device) if sums is None else combine(sums)
    if not bool(run.consensus.differ(total, group.group)):
        return None
    # The number of parameters, not the comparer's word, is the same on every rank, also where it raised.
    each = absent(comparer.width(group), device) if sums is None else sums
    places = run.consensus.differ(each, group.group).nonzero().flatten().tolist()
    own = int(total)
    found = bus.ask(
        comparer,
        lambda: bus.file(comparer, comparer.differing(step, group, places, own), step),
        step,
        "differing",
    )
    return found or []


def _fingerprints(comparer: Comparer, group: ReplicaGroup) -> Tensor:
    """Return what a comparer gives, if it can be compared: nobody may wait for a number that is missing."""
    sums, width = comparer.fingerprints(group), comparer.width(group)
    if sums.dtype is not torch.int64 or sums.shape != (width,):
        raise TypeError(f"fingerprints are {sums.dtype} {tuple(sums.shape)}; they must be int64 ({width},)")
    return sums


def _compare_standing(run: Run, bus: Bus, comparer: Comparer, step: int) -> list[Filed]:
    """Tell a rank how the others stand: of each number count, sum and sum of squares are all that travels."""
    own = bus.ask(comparer, lambda: _standing(comparer), step, "standing") or [math.nan] * comparer.standings
    counted = [math.isfinite(number) for number in own]
    mine = torch.tensor(
        [[1.0, n, n * n] if counts else [0.0, 0.0, 0.0] for n, counts in zip(own, counted, strict=True)]
    )
    others = (run.consensus.total(mine.flatten()) - mine.flatten()).reshape(-1, 3).tolist()
    filed: list[Filed] = []
    for place, (count, total, squares) in enumerate(others):
        if not counted[place] or count < 1:
            continue
        mean = total / count
        told = (own[place], (mean, math.sqrt(max(squares / count - mean * mean, 0.0))))
        look = partial(comparer.compared_at, place, step, *told)
        filed += bus.ask(comparer, partial(_file, bus, comparer, step, look), step, "compared") or []
    return filed


def _file(bus: Bus, comparer: Comparer, step: int, look: Callable[[], Findings]) -> list[Filed]:
    return bus.file(comparer, look(), step)


def _standing(comparer: Comparer) -> list[float] | None:
    standing = comparer.standing()
    if standing is None:
        return None
    if standing.numel() != comparer.standings:
        raise TypeError(f"standing has {standing.numel()} numbers; standings says {comparer.standings}")
    return [float(number) for number in standing.flatten().tolist()]


def _unmatched(here: Sequence[str], there: Sequence[str]) -> tuple[str, str]:
    """Say what each side has that the other has not; if only the order differs, the order."""
    mine, theirs = Counter(here), Counter(there)
    if mine == theirs:
        return f"the order {_listed(here)}", f"the order {_listed(there)}"
    return (
        _listed(list((mine - theirs).elements())),
        _listed(list((theirs - mine).elements())),
    )


def _interval(callback: Callback) -> str:
    """Say how often a detector looks, if not in every step."""
    if not isinstance(callback, Detector) or callback.check_interval == 1:
        return ""
    return (
        f" in every {callback.check_interval} steps, and {callback.attention_steps} steps after an incident"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def _cut(line: str) -> str:
    return f"{line[:_LONGEST_LINE]}... (sha256 {_digest(line)[:16]})"


def _listed(lines: Sequence[str]) -> str:
    return f"[{', '.join(lines)}]" if lines else "nothing more"


def _words(value: Any) -> str:
    """Return an object with its settings, in the same words in every process that has the same ones.

    Fields that a dataclass leaves out of its repr are no settings. Memory addresses and device numbers
    differ between ranks that are alike, and so does the order in which a set is printed.
    """
    if dataclasses.is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__"):  # not one's own repr
        parts = [f"{f.name}={_words(getattr(value, f.name))}" for f in dataclasses.fields(value) if f.repr]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, AbstractSet):
        return f"{{{', '.join(sorted(map(_words, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_words(key)}: {_words(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_words, value))}]"
    if isinstance(value, torch.device):
        return value.type
    return _DEVICE.sub(r"\1", _ADDRESS.sub("", repr(value)))
