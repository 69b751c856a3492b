"""What it takes to undo or replay the step in flight: its micro-batches, random states and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradsentinel.again.backward import BackwardPass
from gradsentinel.again.model_calls import ModelCalls
from gradsentinel.data.records import sample_ids
from gradsentinel.state.buffers import BufferShadow, version_of
from gradsentinel.state.rng import RngState
from gradsentinel.state.tree import tensors_in


@dataclass(slots=True)  # made in each step: to make a frozen one takes three times as long
class MicroBatch:
    """One micro-batch, by reference, and the random state just before it entered the model; never changed."""

    index: int
    batch: Any
    noted: RngState | None
    """The random state, if somebody may want it."""
    position: tuple[int, int] | None = None
    """Where it was in the data: epoch, and number of the micro-batch in it."""
    versions: tuple[tuple[Tensor, int], ...] = ()
    """Its tensors, and how often each had been written to by then."""
    indices: tuple[Any, ...] = ()
    """What its records were drawn by from the data set, if a `SkipBatches` sampler drew them."""

    @property
    def rng(self) -> RngState:
        """The random state just before it entered the model; raises RuntimeError if nobody noted it."""
        if self.noted is None:
            raise RuntimeError(
                "the random state before this micro-batch was not noted, since nobody wanted it: give the "
                "Sentinel forward=, or a callback with needs_random_states = True"
            )
        return self.noted

    @property
    def ids(self) -> dict[int, Any]:
        """The user's own ids of the records, by position; else their indices in the data set, if known."""
        return sample_ids(self.batch) or dict(enumerate(self.places))

    @property
    def places(self) -> tuple[int, ...]:
        """Where its records are in the data set, by position.

        Nothing if that is not known, or if its rows are not what was drawn: a collate function may pack
        several records into one row, or make two of one.
        """
        rows = {tensor.size(0) for _, tensor in tensors_in(self.batch) if tensor.dim()}
        known = len(self.indices) in rows and all(isinstance(index, int) for index in self.indices)
        return self.indices if known else ()

    @property
    def written(self) -> bool:
        """True if the batch is not any more what it was; as far as that was noted."""
        return any(version_of(tensor) != version for tensor, version in self.versions)


class Scene:
    """The step in flight; holds references and small copies only."""

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], *, device_types: tuple[str, ...] = ()
    ) -> None:
        self._device_types = tuple(kind for kind in device_types if kind != "cpu")  # that one is always in it
        self.buffers = BufferShadow(modules)
        self.rng: RngState | None = None
        """Random state before the step."""
        self.microbatches: list[MicroBatch] = []
        self.healthy: tuple[MicroBatch, ...] = ()
        """Micro-batches of the last step that was applied without an incident: what is normal here."""
        self.passes: list[BackwardPass] = []
        """The backward passes of the step so far, as the loop ran them."""
        self.root: tuple[int, Tensor, int] | None = None
        """The last micro-batch whose loss the loop showed, that loss, and how often it had been written to.

        It may hold what the user's own Functions have kept: it goes with the decision on the step.
        """
        self.calls: ModelCalls | None = None
        """What the loop gave to the model and got back; None where nobody takes note of it."""
        self.traced: tuple[str, Any] | None = None
        """The incident of this step and what its diagnosis found, for whoever keeps the evidence."""
        self.repeated = False
        """True for a further step on the same batches, whose random states are not those of the batches."""
        self.notes_random_states = True
        """False if nobody wants to know what the generators were before each micro-batch."""
        self.notes_writes = False
        """True if somebody wants to know whether a batch was written to: a look at each of its tensors."""
        self.listeners: list[Callable[[], None]] = []
        """Told once, when what the loop computes next is none of the micro-batch any more."""
        self.unmade = False
        """True once it is known that the step in flight is never going to be made."""

    def begin(self, *, same_batches: bool = False, rng: bool = True) -> None:
        """Forget the last step and remember the state before the next one, perhaps of the same batches.

        Without `rng` the random state is that of before the first micro-batch to come; of a further step
        on the same batches it is not known then.
        """
        if not same_batches:
            self.microbatches.clear()
        self.repeated = same_batches
        self.passes.clear()
        self.root = self.traced = None
        if self.calls is not None:
            self.calls.forget()
        self.buffers.capture()
        self.rng = RngState.capture(self._device_types) if rng and self.notes_random_states else None

    def add(self, batch: Any, position: tuple[int, int] | None = None, indices: tuple[Any, ...] = ()) -> None:
        """Remember a micro-batch that is about to enter the model, and what it is of the data."""
        self.root = None  # not while the next forward pass needs the memory
        rng = RngState.capture(self._device_types) if self.notes_random_states else None
        if not self.microbatches:
            self.rng = rng
        versions: tuple[tuple[Tensor, int], ...] = ()
        if self.notes_writes:
            versions = tuple((tensor, version_of(tensor)) for _, tensor in tensors_in(batch))
        self.microbatches.append(MicroBatch(len(self.microbatches), batch, rng, position, versions, indices))
        if self.calls is not None:
            self.calls.listen(len(self.microbatches) - 1)

    def passed(self, *, over: bool = False) -> None:
        """Hear that a micro-batch is through the model: its backward pass begins, or none comes (`over`)."""
        if self.calls is not None:
            self.calls.stop()
        if over:
            self.through()

    def through(self) -> None:
        """Hear that a micro-batch has had its backward pass, or that there is none to come."""
        listeners, self.listeners = self.listeners, []
        for tell in listeners:
            tell()

    def decided(self) -> None:
        """Let go of the loop's own tensors: not while the optimizer needs the memory."""
        self.root = None
        if self.calls is not None:
            self.calls.forget()

    @property
    def graph(self) -> tuple[int, Any] | None:
        """The number of `root`, and the node behind its loss; None if the loop has written to that since."""
        if self.root is None:
            return None
        number, loss, version = self.root
        return (number, loss.grad_fn) if loss._version == version and loss.grad_fn is not None else None

    def as_mapping(self) -> Mapping[str, Any]:
        """Return the scene as the incident event carries it."""
        return {"microbatches": tuple(self.microbatches), "rng": self.rng}
