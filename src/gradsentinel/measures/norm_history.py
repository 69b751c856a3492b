"""The norms of every gradient over the last steps, by reference: read only when something has gone wrong."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsentinel.gradients import GradientView
from gradsentinel.incident import jsonable
from gradsentinel.measures.bounds import MOST_LAG, Bounds, bounds
from gradsentinel.measures.inspection import local

Kept = Sequence[tuple[Sequence[int] | None, Tensor]]


class NormHistory:
    """Holds on to the norms that a step computes for its total norm anyway.

    On a healthy step one tuple of references is appended: nothing is launched, copied or read. What stays in
    memory is one number on the device and one pointer on the host for each gradient tensor and step, about
    3 MiB for 64 steps of 4,096 tensors and never more. Norms are those before clipping, unscaled; a sharded
    gradient counts with this rank's part.

    Args:
        kept: `steps` and `norms` bound what is kept; None: what the environment says. Of an incident that is
            handled late so many steps before it are still there.
    """

    def __init__(self, kept: Bounds | None = None) -> None:
        kept = bounds() if kept is None else kept
        self._ring: deque[tuple[int, int, Sequence[str], Kept]] = deque(maxlen=kept.steps + MOST_LAG)
        self._steps = kept.steps
        self._most = kept.norms

    def __len__(self) -> int:
        return len(self._ring)

    def remember(self, step: int, iteration: int, view: GradientView) -> None:
        """Keep the norms of a view whose total norm was asked for; no wait."""
        names, kept = view.measured
        if not kept:
            return
        ring = self._ring
        ring.append((step, iteration, names, kept))
        while len(ring) > 1 and len(ring) * len(names) > self._most:
            ring.popleft()

    @torch.no_grad()
    def until(self, iteration: int) -> dict[str, Any] | None:
        """Return the norms of the attempted steps up to this one, as JSON; None if there are none. Waits.

        A parameter without a gradient has null in that step. `local` says that they are those of this rank's
        shards.
        """
        chosen = [entry for entry in self._ring if entry[1] <= iteration][-self._steps :]
        if not chosen:
            return None
        place: dict[str, int] = {}
        for _, _, names, _ in chosen:
            for name in names:
                place.setdefault(name, len(place))
        numbers = iter(_read([norms for *_, kept in chosen for _, norms in kept]))
        rows: list[list[float | None]] = []
        for _, _, names, kept in chosen:
            row: list[float | None] = [None] * len(place)
            for positions, norms in kept:
                members = names if positions is None else [names[position] for position in positions]
                values = itertools.islice(numbers, norms.numel())
                for name, value in zip(members, values, strict=True):
                    row[place[name]] = float(f"{value:.6g}")
            rows.append(row)
        return {
            "names": list(place),
            "steps": [step for step, *_ in chosen],
            "iterations": [number for _, number, *_ in chosen],
            "values": jsonable(rows),
            "local": any(local(norms) is not norms for *_, kept in chosen for _, norms in kept),
        }


def _read(parts: Sequence[Tensor]) -> list[float]:
    """Return all numbers of some 1-dim tensors, with one transfer for each device that they are on."""
    flat = [local(part).reshape(-1).to(torch.float32) for part in parts]
    by_device: dict[torch.device, list[int]] = {}
    for index, part in enumerate(flat):
        by_device.setdefault(part.device, []).append(index)
    read: list[Tensor] = list(flat)
    for indices in by_device.values():
        sizes = [flat[index].numel() for index in indices]
        on_host = torch.cat([flat[index] for index in indices]).cpu()
        for index, part in zip(indices, torch.split(on_host, sizes), strict=True):
            read[index] = part
    numbers: list[float] = torch.cat(read).tolist() if read else []
    return numbers
