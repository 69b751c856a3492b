"""What else than a failing device may explain a forward pass that is damaged once and fine when run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis.graph import difference, graph_of
from gradsentinel.diagnosis.loop_code import LoopCode
from gradsentinel.diagnosis.passed import Passed
from gradsentinel.diagnosis.replay import Computed, Replay
from gradsentinel.diagnosis.surroundings import Surroundings
from gradsentinel.diagnosis.swap import batch_size
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import parts_of, readable
from gradsentinel.run import Run
from gradsentinel.state.tree import map_tensors, tensors_in

_MOST_RUNS = 256
_SELECTS = ("Embedding", "Gather", "Index", "MaskedSelect", "Sparse", "Take")

_Bad: TypeAlias = dict[str, Tensor]
"""Which elements of each gradient are not finite."""


def explained_otherwise(
    replay: Replay,
    microbatches: Sequence[MicroBatch],
    computed: Mapping[int, Computed],
    found: Mapping[str, Tensor],
    around: Surroundings,
    passed: Passed,
    time_left: Callable[[], bool],
) -> tuple[str, ...]:
    """Return what explains a damaged forward pass as well as a failing device does; empty if nothing does.

    The loop may have run other operators than `forward=`, or have given it other records; and `forward=` may
    depend on something that the replay could not put back. May run the step many times; call it inside
    `replay.sheltered()`.

    Args:
        replay: of the step.
        microbatches: that were run again.
        computed: what they came to, by number.
        found: the gradients of the run itself.
        around: as it was before the first replay.
        passed: what the model was given and returned, in the loop and in the replay.
        time_left: says whether there is time for one more.
    """
    made = passed.made
    found_otherwise = (
        _other_operators(replay.run, computed)
        or _other_surroundings(around)
        or _other_code(around, replay.run, weights=made is None or not made.confined or _selects(computed))
        or passed.explained_otherwise()
    )
    if found_otherwise:
        return (found_otherwise,)
    if made is not None and made.confined:
        return ()  # what it was given is the same, and its other records show that it was the same model
    other = _other_records(replay, microbatches, found, time_left, in_loss=passed.same)
    if made is None or not other:
        not_known = f"what the loop gave to the model is not known: {passed.unknown}"
        return (other, *([not_known] if passed.unknown else [])) if other else ()
    fact = (
        "the model was given the same, bit for bit, and returned something else for every record: weights "
        "that the loop changes for one forward pass, and puts back, explain it, too"
    )
    return (fact,)


def _other_operators(run: Run, computed: Mapping[int, Computed]) -> str:
    if str(getattr(run.forward, "__module__", "")).startswith("gradsentinel."):
        return ""  # an adapter's: it runs the very step that the framework ran
    if run.scene.graph is None:
        return "the loop did not show its loss (sentinel.backward(loss)): it may compute more than forward="
    number, node = run.scene.graph
    if number not in computed:
        return ""
    what = difference(graph_of(node), computed[number].graph)
    return f"the loop ran other operators than forward= ({what}): they explain it, too" if what else ""


def _other_surroundings(around: Surroundings) -> str:
    if around.clocks:
        return f"the forward pass reads the clock ({fold(around.clocks)}): a replay reads another time"
    moved = list(dict.fromkeys((*around.changed(), *around.written())))
    if not moved:
        return ""
    return (
        f"the forward pass changes {fold(moved)}, which a replay cannot put back: it began with what the "
        "loop left there"
    )


def _selects(computed: Mapping[int, Computed]) -> bool:
    """Return True if some records may be computed with other weights than the others: a table of words."""
    names = {name for one in computed.values() for name, _ in one.graph}
    return any(name.startswith(_SELECTS) for name in names)


def _other_code(around: Surroundings, run: Run, *, weights: bool) -> str:
    code = LoopCode(around.functions)
    moved = sorted(name.lstrip(".") for name in code.assigned() & (around.read() | around.settings()))
    if moved:
        return f"the loop changes {fold(moved)}, which the forward pass reads: a replay reads what it is now"
    replaced = code.replaced()
    if replaced:
        return (
            f"the loop puts something in the place of a function of torch or of a module ({fold(replaced)}), "
            "which a replay may leave out"
        )
    names = {name.rpartition(".")[2] for name, _ in run.host.named_parameters()} if weights else set()
    written = code.weights_written(names) if weights else []
    if written:
        return (
            f"the loop writes to weights beside the optimizer ({fold(written)}): a replay computes with "
            "those of now"
        )
    if run.host.device.type != "cpu" and code.streams():
        return "the loop has streams of the device of its own: work may have begun before its input was there"
    places = code.hidden_writes()
    if not places:
        return ""
    return (
        f"the loop writes to tensors beside autograd ({fold(places)}): that explains it, too, and leaves no "
        "trace in the graph"
    )


# -- other records -----------------------------------------------------------------------------------


def _other_records(
    replay: Replay,
    microbatches: Sequence[MicroBatch],
    found: Mapping[str, Tensor],
    time_left: Callable[[], bool],
    *,
    in_loss: bool,
) -> str:
    """Try whether bad values in some records, which the loop alone gave to the model, damage the same."""
    wanted = _bad_in(found)
    losses = {done.microbatch: done.loss for done in replay.run.scene.passes}
    runs = iter(range(_MOST_RUNS))
    for microbatch in microbatches:
        loss, size = losses.get(microbatch.index), batch_size(microbatch.batch)
        if size is None or (loss is not None and math.isfinite(float(loss))):
            continue
        for path, tensor in tensors_in(microbatch.batch):
            if not _is_records(tensor, size):
                continue
            for value in (math.nan, math.inf):
                spoil = _Spoilt(replay, microbatch, tensor, value)
                same = _together(spoil, wanted, size, lambda: time_left() and next(runs, None) is not None)
                if same is None:
                    return "there was no time to try whether bad records, given by the loop alone, explain it"
                if same:
                    field = path or "the batch"
                    if in_loss:
                        return (
                            f"bad values in {field} that the loop alone gave to the loss damage the same "
                            "elements"
                        )
                    return (
                        f"bad values in {field} that the loop alone gave to the model (augmentation, say) "
                        "damage the same elements"
                    )
    return ""


class _Spoilt:
    """The micro-batch with bad values in some records of one field."""

    def __init__(self, replay: Replay, microbatch: MicroBatch, tensor: Tensor, value: float) -> None:
        self._replay = replay
        self._microbatch = microbatch
        self._tensor = tensor
        self._value = value

    def damage(self, rows: range) -> _Bad:
        """Return what is not finite then."""

        def replaced(tensor: Tensor) -> Tensor:
            copy = tensor.detach().clone()
            if tensor is self._tensor:
                part = copy[rows.start : rows.stop]
                part.copy_(torch.where(part < 0, -self._value, self._value))
            return copy.requires_grad_(tensor.requires_grad)

        batch = map_tensors(replaced, self._microbatch.batch)
        return _bad_in(self._replay.compute(self._microbatch, batch=batch).gradients)


def _together(spoil: _Spoilt, wanted: _Bad, size: int, may_go_on: Callable[[], bool]) -> bool | None:
    """Return whether some records spoil just what is wanted; None if there was no time to tell.

    More bad records spoil more. So if any of them spoil just that, then those do together which, each for
    itself, spoil nothing else.
    """
    waiting, reached = [range(size)], {name: torch.zeros_like(mask) for name, mask in wanted.items()}
    while waiting:
        rows = waiting.pop()
        if not may_go_on():
            return None
        bad = spoil.damage(rows)
        if all(not bool((bad[name] & ~mask).any()) for name, mask in wanted.items() if name in bad):
            reached = {name: mask | bad[name] if name in bad else mask for name, mask in reached.items()}
            if all(torch.equal(reached[name], mask) for name, mask in wanted.items()):
                return True
        elif len(rows) > 1:
            half = rows.start + len(rows) // 2
            waiting += [range(half, rows.stop), range(rows.start, half)]
    return False


def _bad_in(gradients: Mapping[str, Tensor]) -> _Bad:
    return {
        name: ~torch.isfinite(parts_of(gradient.detach()))
        for name, gradient in gradients.items()
        if readable(gradient) is None and gradient.layout is torch.strided
    }


def _is_records(tensor: Tensor, size: int) -> bool:
    plain = readable(tensor) is None and tensor.layout is torch.strided and tensor.is_floating_point()
    return plain and tensor.dim() > 0 and tensor.shape[0] == size
