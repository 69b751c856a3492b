"""Which part of the whole a rank's tensors are, and which parameters an optimizer has in which group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gradsentinel.host import Host


def layout_of(host: Host, buffers: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return what a snapshot's tensors do not say themselves, as plain data; nothing is communicated.

    `shards` holds, for each parameter and buffer of which a rank has a part (a DTensor), the shape of the
    whole and where in it the part begins. `groups` holds the names of the parameters of each group of each
    optimizer.
    """
    named = list(host.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    shards = {}
    for name, tensor in [*named, *buffers]:
        chunks_of = getattr(tensor, "__create_chunk_list__", None)  # what torch's own checkpoints ask
        chunks: list[Any] = [] if chunks_of is None else chunks_of()
        if len(chunks) == 1:
            shards[name] = {"shape": list(tensor.shape), "offsets": list(chunks[0].offsets)}
    groups = [
        [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in host.optimizers
    ]
    return {"shards": shards, "groups": groups}
