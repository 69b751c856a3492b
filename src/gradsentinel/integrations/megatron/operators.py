"""Which operator made the first bad value: the step once more, with the guilty rank's operators watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis.fields import fields_behind
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.operands import finite_again
from gradsentinel.diagnosis.record import FROM_BUFFERS, Call, Event
from gradsentinel.diagnosis.replay import Computed
from gradsentinel.diagnosis.swap import NARROW
from gradsentinel.diagnosis.trace import Trace, names_of
from gradsentinel.diagnosis.verdict import came_in, decide
from gradsentinel.diagnosis.walk import Path, walk
from gradsentinel.evidence import Diagnosis
from gradsentinel.integrations.megatron.host import MegatronHost
from gradsentinel.integrations.megatron.places import Onlooker, Place, finite, floats_in
from gradsentinel.run import Run
from gradsentinel.state.rng import RngState
from gradsentinel.state.tree import tensors_in

_EXCHANGES = ("c10d", "_c10d_functional")
_MESSAGE = "a message from another rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What a rank's trace came to; travels to the others."""

    diagnosis: Diagnosis | None = None
    """None if no operator of this rank is to blame."""
    arrived: bool = False
    """True if the bad value came from another rank, in a message."""


class StageTrace(Trace):  # type: ignore[no-untyped-call]
    """Watches the operators of one rank, between the messages of a schedule.

    Messages are let pass: what is in their memory is known when somebody reads it, and not before. It looks
    only while `active`, since the schedule runs other micro-batches in between. An error of its own ends the
    looking, and not the step, for which other ranks wait.
    """

    def __init__(self, host: MegatronHost) -> None:
        super().__init__((), host.named_parameters())
        self.memory.watched = False  # other micro-batches run in between
        self.active = False
        self.failure: Exception | None = None
        for chunk, (_, root) in enumerate(host.modules()):
            for path, module in root.named_modules():
                self._names.setdefault(id(module), host.names.module(path, chunk) if path else "")
            for name, buffer in root.named_buffers():
                self.declare(buffer, f"buffer {name}", FROM_BUFFERS)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and look at what it made if it is one of those that are watched."""
        if not self.active or self._delivers(func, args):
            return func(*args, **(kwargs or {}))
        if func.namespace in _EXCHANGES:
            result = func(*args, **(kwargs or {}))
            self._exchanged(func, (args, kwargs), result)
            return result
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the operator's own comes again, below
            self.active = False
            result = func(*args, **(kwargs or {}))
            self.failure = error
            return result

    def _delivers(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Tell gloo's last act of a message: it copies what came from memory of its own, when waited for."""
        if func.overloadpacket.__name__ != "copy_" or len(args) < 2 or not isinstance(args[1], Tensor):
            return False
        target, source = self.memory.known(args[0]), self.memory.known(args[1])
        foreign = source is None or (source.writer is None and source.leaf == "constant")
        return foreign and target is not None and target.leaf == _MESSAGE

    def _exchanged(self, func: Any, given: Any, result: Any) -> None:
        """Remember what memory holds after a message: this rank's own bad values, or what others sent."""
        receives = "recv" in func.overloadpacket.__name__
        own = [self._writer_of(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        writer = next((number for number in own if number is not None), None)
        for leaf in tree_leaves(given if receives else (result, _written(func, given[0]))):
            cell = self.memory.cell(leaf) if isinstance(leaf, Tensor) else None
            if cell is not None:
                cell.leaf, cell.fine = _MESSAGE, False
                cell.writer = None if receives else writer
                cell.lawful = writer is not None and not receives and self.events[writer].lawful

    def _writer_of(self, tensor: Tensor) -> int | None:
        """The operator of this rank that made bad values which are sent; not what allocated the memory."""
        cell = self.memory.known(tensor)
        if cell is None or cell.writer is None or self.events[cell.writer].allocation:
            return None
        return cell.writer

    def _call(self, *, backward: bool) -> Call:
        call = super()._call(backward=backward)
        # Above a backward pass there are only the lines of the schedule: the forward pass knows better.
        return Call(call.module, None) if backward else call


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """What an exchange writes to of what it is given, by its name: not all of them return it or mark it."""
    arguments = zip(func._schema.arguments, args, strict=False)
    return [given for one, given in arguments if one.name.startswith(("output", "tensors"))]


class Tracer(Onlooker):
    """Traces one micro-batch on the rank on which its first bad value begins."""

    def __init__(self, host: MegatronHost, place: Place, microbatches: Sequence[MicroBatch]) -> None:
        super().__init__()
        self._host = host
        self._place = place
        self._microbatches = microbatches
        self._trace = StageTrace(host)
        self._came_out: Computed | None = None
        """Where the bad value came out."""
        self._calls = -1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The operators are watched from the forward pass of the micro-batch until the value comes out."""
        host, place = self._host, self._place
        _, root = host.modules()[place.chunk]
        handle: Any = None
        if place.gradient:
            guilty = next(p for name, p in host.named_parameters() if name == place.gradient)
            handle = guilty.register_hook(self._quiet(self._in_backward))  # type: ignore[no-untyped-call]
        elif place.module:
            handle = root.get_submodule(place.path).register_forward_hook(self._quiet(self._after))
        try:
            with host.looked_at_by(self), self._trace.module_stack(), self._trace:
                yield
        finally:
            self._trace.active = False
            if handle is not None:
                handle.remove()

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Watch, if it is the micro-batch; what is outside of all forward passes is a backward pass."""
        trace = self._trace
        if microbatch == self._place.microbatch and self._came_out is None:
            trace.active = True
            if microbatch < len(self._microbatches):  # what its values are computed from tells data from math
                for path, tensor in tensors_in(self._microbatches[microbatch].batch):
                    trace.declare_field(tensor, path)
        trace.in_backward = False
        try:
            yield
        finally:
            trace.in_backward = True

    def loss(self, loss: Tensor, microbatch: int) -> None:
        """Stop with the loss, if that is what is bad first."""
        if microbatch == self._place.microbatch and not (self._place.module or self._place.gradient):
            self._quiet(self._end)((loss,))

    def _after(self, module: Any, args: Any, made: Any) -> None:
        del module, args
        step = self._host.step
        if step is not None and step.microbatch == self._place.microbatch:
            self._end(floats_in(made))

    def _in_backward(self, gradient: Tensor) -> None:
        self._calls += 1
        if self._calls == self._place.microbatch:
            self._end((gradient,))

    def _end(self, tensors: Iterable[Tensor]) -> None:
        if self._came_out is not None:
            return
        bad = next((tensor for tensor in tensors if not finite((tensor,))), None)
        if bad is None:
            return
        self._trace.active = False
        backward = self._place.gradient
        self._came_out = Computed(
            # Another name for the same memory: the schedule may take it out of the tensor that it has sent.
            loss=torch.zeros(()) if backward else bad.detach(),
            root=None,
            gradients={backward: bad.detach()} if backward else {},
            nodes={} if backward else names_of(bad),
        )

    def tell(self, run: Run) -> tuple[Traced, Findings | None]:
        """Return what the trace came to, for all ranks and for this one."""
        computed, place = self._came_out, self._place
        self.failure = self.failure or self._trace.failure
        self.complain(run.step)
        if computed is None:
            return Traced(), None
        path = walk(self._trace, computed)
        if path is None:
            return Traced(), None
        if path.origin is None:
            return self._came_in(path, computed), None
        if run.known_good is not None:
            run.known_good.settle()
        # Without its batch: here the first dimension is the sequence, and no sample is to be named by it.
        microbatch = MicroBatch(place.microbatch, None, run.scene.rng or RngState.capture())
        findings = Findings.of(run, microbatch, self._trace, computed, path)
        findings.fields = tuple(fields_behind(findings))
        _try_alone(findings)
        return Traced(diagnosis=self._named(decide(findings))), findings

    def _came_in(self, path: Path, computed: Computed) -> Traced:
        leaf = path.leaves[0].leaf if path.leaves else ""
        if leaf in {"", _MESSAGE}:
            return Traced(arrived=bool(leaf))
        return Traced(diagnosis=self._named(came_in(self._trace, path, computed)))

    def _named(self, diagnosis: Diagnosis) -> Diagnosis:
        """Keep to the module that is known to be the first, where the operator ran outside of it.

        A gradient shows where it surfaced: there the operator's module is the one to know.
        """
        found, place = diagnosis.module or "", self._place
        whole = not place.path or bool(place.gradient)
        inside = bool(found) and (whole or found == place.module or found.startswith(f"{place.module}."))
        return diagnosis if inside else replace(diagnosis, module=place.module or None)


def _try_alone(findings: Findings) -> None:
    """Run the operator alone on its inputs: as it was, on the CPU, and in float32."""
    origin = findings.origin
    if origin.allocation or findings.custom is not None:
        return
    finite_now = finite_again(origin)
    findings.repeatable = None if finite_now is None else not finite_now
    if findings.run.host.device.type != "cpu":
        findings.finite_on_cpu = finite_again(origin, torch.device("cpu"))
    if findings.half is not None:
        findings.widened = "it"
        findings.finite_in_wide = _finite_in_wide(origin)


def _finite_in_wide(event: Event) -> bool | None:
    """Whether the operator alone is finite in float32; None if it cannot be computed so."""
    if not (event.args or event.kwargs) or event.function._schema.is_mutable:
        return None
    wider: Callable[[Any], Any] = lambda x: (  # noqa: E731 - needed as a function
        x.float()
        if isinstance(x, Tensor) and x.dtype in NARROW
        else torch.float32
        if isinstance(x, torch.dtype) and x in NARROW
        else x
    )
    try:
        with torch.no_grad():
            args, kwargs = tree_map(wider, (event.args, event.kwargs))
            result = event.function(*args, **kwargs)
    except Exception:  # noqa: BLE001 - kernels raise anything for a dtype they lack; None: not known
        return None
    return not any(judge(tensor) for tensor in floats_in(result))
