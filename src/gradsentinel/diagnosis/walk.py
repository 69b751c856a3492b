"""From a bad loss or gradient back along the bad values to where they began."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.record import Call, Edge, Event
from gradsentinel.diagnosis.replay import Computed
from gradsentinel.diagnosis.trace import Trace

_REDUCTIONS = frozenset({"amax", "amin", "aminmax", "logsumexp", "max", "min"})


@dataclass(slots=True, kw_only=True)
class Path:
    """Where the bad values of a step began, and how they got to where they were found."""

    origins: tuple[Event, ...] = ()
    """Operators that made something non-finite of inputs that do not explain it, the first one first."""
    leaves: tuple[Edge, ...] = ()
    """Bad tensors that no operator made."""
    reader: Event | None = None
    """The operator that took the first of them in."""
    first_nan: Event | None = None
    """The first NaN that was made of infinities; the infinities are the origin's."""
    reentry: Event | None = None
    """The backward operator through which a forward value that no loss shows came back."""
    absorbers: tuple[Event, ...] = ()
    """Operators of the forward pass that hid the origin's values."""
    from_loss: bool = False
    route: tuple[Event, ...] = ()
    """From the origin to where it was found."""
    reached: tuple[str, ...] = ()
    """The names of the parameters whose gradients are bad, or of the buffers where no gradient is."""

    @property
    def origin(self) -> Event | None:
        """The first operator to blame."""
        return self.origins[0] if self.origins else None


@dataclass(slots=True)
class _Search:
    events: list[Event]
    parents: dict[int, int | None] = field(default_factory=dict)
    origins: dict[int, Event] = field(default_factory=dict)
    leaves: dict[str, Edge] = field(default_factory=dict)
    readers: dict[str, Event] = field(default_factory=dict)
    lawful: bool = False
    """True to follow also the infinities that somebody wrote on purpose."""
    nan_makers: dict[int, Event] = field(default_factory=dict)
    reentries: dict[int, Event] = field(default_factory=dict)

    def run(self, starts: Iterable[int]) -> None:
        waiting = list(dict.fromkeys(starts))
        self.parents.update(dict.fromkeys(waiting))
        for index in waiting:  # grows while it is read
            event = self.events[index]
            follow = [edge for edge in event.edges if self.lawful or not edge.lawful]
            if event.fresh and (self.lawful or not event.lawful):
                explained = event.badness.nan and bool(follow) and not any(e.badness.nan for e in follow)
                if explained:
                    self.nan_makers[index] = event
                else:
                    self.origins[index] = event
            for edge in follow:
                self._follow(event, edge, waiting)

    def _follow(self, event: Event, edge: Edge, waiting: list[int]) -> None:
        if edge.writer is None:
            self.leaves.setdefault(edge.leaf, edge)
            self.readers.setdefault(edge.leaf, event)
            return
        writer = self.events[edge.writer]
        if event.backward and not writer.backward:
            self.reentries.setdefault(edge.writer, event)
        if edge.writer not in self.parents:
            self.parents[edge.writer] = event.index
            waiting.append(edge.writer)


def walk(trace: Trace, computed: Computed) -> Path | None:
    """Return where the bad values began, or None if loss, gradients and watched buffers are finite.

    Values that no bad result depends on are never reached, so infinities that healthy code makes and
    masks do not count.
    """
    bad_loss = judge(computed.loss)
    bad = {name: g for name, g in computed.gradients.items() if judge(g)} or dict(computed.spoilt)
    if not bad_loss and not bad and not (computed.root is not None and judge(computed.root)):
        return None
    found: Mapping[str, Tensor] = {"": computed.loss} if bad_loss else bad or {"": computed.root}  # type: ignore[dict-item]
    search = _Search(trace.events)
    starts: list[int] = []
    for tensor in found.values():
        cell = trace.memory.known(tensor)
        if cell is not None and cell.writer is not None:
            starts.append(cell.writer)
        elif cell is not None:
            search.leaves.setdefault(cell.leaf, Edge(0, None, cell.leaf, False, judge(tensor), cell.origin))
    search.run(starts)
    if not search.origins and not search.leaves:  # an infinity on purpose that was not masked after all
        search = _Search(trace.events, lawful=True)
        search.run(starts)
        _prefer_survivor(trace.events, search)
    origins = tuple(search.origins[index] for index in sorted(search.origins))
    origins = _further_back(trace, search, origins) if origins else origins
    path = Path(origins=origins, from_loss=bool(bad_loss), reached=tuple(bad))
    path.leaves = tuple(search.leaves.values())
    path.reader = next(iter(search.readers.values()), None)
    if search.nan_makers:
        path.first_nan = search.nan_makers[min(search.nan_makers)]
    if path.origin is None:
        return path
    path.route = _route(trace.events, search.parents, path.origin.index)
    if not path.origin.backward and not bad_loss:
        touched = _touched(trace.events, path.origin)
        path.reentry = next((e for i, e in sorted(search.reentries.items()) if i in touched), None)
        hiding = (e for e in trace.events if not e.badness and not e.backward)
        path.absorbers = tuple(event for event in hiding if event.index in touched)
    return path


def _further_back(trace: Trace, search: _Search, origins: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return the operators to blame, the first one that which the first that was found only follows from."""
    first = origins[0]
    hidden = _forward_of(trace, first)
    if hidden is not None:
        search.parents[hidden.index] = first.index
        search.reentries[hidden.index] = first
        return (hidden, *origins)
    emptied = _emptied_row(trace.events, first)
    if emptied is None:
        return origins
    search.parents.setdefault(emptied.index, first.index)
    search.nan_makers[first.index] = first
    return (emptied, *origins[1:])


def _emptied_row(events: list[Event], origin: Event) -> Event | None:
    """Return the reduction that found nothing but a mask's infinities, if the origin made NaN of its result.

    The maximum of a set of which nothing is left is -inf; what multiplies with it is no fault of its own.
    """
    if origin.backward or not origin.edges or not all(edge.lawful for edge in origin.edges):
        return None
    waiting, seen, found = [edge.writer for edge in origin.edges], set[int](), None
    while waiting:
        index = waiting.pop()
        if index is None or index in seen:
            continue
        seen.add(index)
        event = events[index]
        name = event.function.overloadpacket.__name__
        if name in _REDUCTIONS and event.lawful and event.edges and event.results:
            found = event if found is None or event.index < found.index else found
        waiting += [edge.writer for edge in event.edges if edge.lawful]
    return found


def _prefer_survivor(events: list[Event], search: _Search) -> None:
    """Blame the first reduction that could not get rid of a mask's infinities, not the mask."""
    reached = (events[index] for index in sorted(search.parents))
    kept = next((e for e in reached if e.lawful and e.edges and e.results and not e.backward), None)
    if kept is not None:
        search.origins = {kept.index: kept}


def origins_of(trace: Trace, tensors: Iterable[Tensor]) -> tuple[Event, ...]:
    """Return the operators that began what is bad in these tensors, the first one first."""
    cells = [trace.memory.known(tensor) for tensor in tensors]
    search = _Search(trace.events)
    search.run(cell.writer for cell in cells if cell is not None and cell.writer is not None)
    return tuple(search.origins[index] for index in sorted(search.origins))


def _forward_of(trace: Trace, origin: Event) -> Event | None:
    """Return the forward operator of a backward origin's own node if its result was bad already, and hidden.

    0 / 0 in the backward pass of a division by 0 is no new fault.
    """
    if not origin.backward:
        return None
    same = (e for e in trace.events if not e.backward and e.sequence == origin.sequence)
    return next((e for e in same if e.fresh and not e.lawful and not e.in_no_grad), None)


def call_of(trace: Trace, event: Event) -> Call:
    """Return where an operator was called from; for a backward one, where its forward was."""
    if not event.backward:
        return event.call
    forward = trace.calls.get(event.sequence)
    if forward is None:
        return event.call
    return Call(forward.module, event.call.line or forward.line)


def _route(events: list[Event], parents: Mapping[int, int | None], start: int) -> tuple[Event, ...]:
    route = []
    index: int | None = start
    while index is not None:
        route.append(events[index])
        index = parents[index]
    return tuple(route)


def _touched(events: list[Event], origin: Event) -> set[int]:
    """The operators that the origin's bad values reached."""
    touched = {origin.index}
    for event in events[origin.index + 1 :]:
        if any(edge.writer in touched for edge in event.edges):
            touched.add(event.index)
    return touched
