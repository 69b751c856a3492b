"""The base classes of everything that subscribes to events."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from gradsentinel import events
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Finding

if TYPE_CHECKING:
    from torch import Tensor

    from gradsentinel.incident import Incident, Recovery
    from gradsentinel.ranks.replicas import ReplicaGroup
    from gradsentinel.run import Run

Findings = Finding | Sequence[Finding] | None
"""What a detecting method may return."""


@dataclass(kw_only=True)
class Callback:
    """Hears events; override the methods you need, the others cost nothing.

    `on_run_start`, `on_batch`, `on_after_backward`, `on_before_clip`, `on_after_step` and `on_run_end` may
    return findings.
    A callback never waits for the device, never communicates and never changes a gradient in
    `on_batch`, `on_after_backward` and `on_before_clip`: the bus does that for all of them at once.
    """

    prompt_every = cast("int | None", 1)  # no field of a dataclass
    """`on_after_step` is heard at once after the steps divisible by this, and up to eight healthy steps late
    after others: enough for who only keeps books. None: late after all of them. All are heard, in order, and
    before anything is detected, kept or ended. Who may want to stop the run there, or hears `on_step_start`
    or `on_batch` too, hears at once; so does a subclass with an `on_after_step` of its own that says nothing
    of it."""
    needs_random_states = True
    """Whether it may want the random states from before each micro-batch: to compute a step again, or to keep
    them as evidence. Where nobody does, and the loop gave no `forward`, they are not noted."""

    def on_run_start(self, event: events.RunStart) -> Findings:
        """Hear the first event of a run."""

    def on_step_start(self, event: events.StepStart) -> None:
        """Hear that a step begins."""

    def on_batch(self, event: events.Batch) -> Findings:
        """Hear that a micro-batch is about to enter the model; findings wait for `on_before_clip`."""

    def on_after_backward(self, event: events.AfterBackward) -> Findings:
        """Hear that a micro-batch has its gradients; findings wait for `on_before_clip`."""

    def on_before_clip(self, event: events.BeforeClip) -> Findings:
        """Hear that the step's gradients are final, before they are clipped."""

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Hear that something is wrong with this step."""

    def on_diagnosis(self, event: events.DiagnosisEvent) -> None:
        """Hear what an incident turned out to be."""

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Hear what was done about an incident."""

    def on_after_step(self, event: events.AfterStep) -> Findings:
        """Hear that the step was applied or dropped."""

    def on_run_end(self, event: events.RunEnd) -> Findings:
        """Hear the last event of a run; findings are settled after it, unless the run ends by an error."""

    def checks_after_step(self, step: int) -> bool:
        """Return True if findings from `on_after_step` must be settled before the loop goes on.

        Depends on the step and the settings alone: every rank has to give the same answer.
        """
        del step
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what the callback must remember over a restart; tensors, numbers, strings, containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    if not TYPE_CHECKING:  # it would hide every other missing attribute from type checkers

        def __getattr__(self, name: str) -> Any:
            """Say what is wrong if a framework's trainer was given a callback that is not of its kind."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _ASKED_BY_TRAINERS:
                home = f"gradsentinel.integrations.{_ASKED_BY_TRAINERS[name]}"
                text += f": a trainer takes {type(self).__name__} from {home}, or adapt(...) from there"
            raise AttributeError(text)


_BEFORE_A_STEP = ("on_step_start", "on_batch")
"""Who hears of a step's begin is to have heard of the end of the one before."""
_ASKED_BY_TRAINERS = {"state_key": "lightning", "on_init_end": "huggingface"}
"""What trainers look for first in each of their callbacks, and where ours that have it are."""


class Detector(Callback):
    """Observes and returns findings; if it raises it is reported, switched off, and the run goes on."""

    check_interval = 1
    """It looks in every so many steps: between them it hears no `on_batch`, `on_after_backward` and
    `on_before_clip`. Set it in a class of your own, or with `check_every`."""
    attention_steps = 20
    """After an incident it looks in each of so many steps, whatever its interval."""

    def norm_bound(self) -> float | None:
        """Return the largest global gradient norm it lets pass, if `on_before_clip` looks at nothing else.

        Where the framework's norm is known to every rank anyway (FSDP), no agreement is needed then while
        the norm keeps every bound. None: it looks at numbers that other ranks do not have. Depends on the
        settings alone.
        """
        return None

    def calm(self, step: int, norm: float, losses: Sequence[float]) -> bool | None:
        """Return True if this global norm and these losses of a step say that it would find nothing in it.

        None if, with its settings, they never say enough; then nobody is asked any more. The numbers are
        finite, and read by the host anyway; no other rank is concerned.

        If every detector says True, none of them hears that step's `on_before_clip`, nor the
        `on_after_backward` of its last micro-batch; what they found in that of the others is dropped. Else
        all of them hear both, the second one later than usual. A subclass that listens to these events in its
        own way is asked only if it has a `calm` of its own.
        """
        del step, norm, losses
        return None

    def glimpse(self, step: int) -> Tensor | None:
        """Return a number of its own that must be finite for `calm`, 0-dim; None if it has none.

        It is read together with the norm and the losses, at no further wait. If it is not finite nobody is
        asked, and all of them hear the step's events.
        """
        del step
        return None


class Comparer(Detector):
    """A detector whose numbers must be the same on all ranks of a group; the watch does the comparing.

    The callback itself communicates with nobody, so that a rank on which it raised still takes its
    place in the collective.
    """

    def compares(self, step: int) -> bool:
        """Return True if a comparison is due after this step; the same answer on every rank."""
        raise NotImplementedError

    def fingerprints(self, group: ReplicaGroup) -> Tensor:
        """Return what must be equal in the group: 1-dim int64, `width(group)` elements, no wait."""
        raise NotImplementedError

    def width(self, group: ReplicaGroup) -> int:
        """Return the number of fingerprints, known without computing them."""
        raise NotImplementedError

    def differing(self, step: int, group: ReplicaGroup, places: Sequence[int], own: int) -> Findings:
        """Hear which fingerprints differ in the group, and this rank's checksum of all of them."""
        raise NotImplementedError

    def alike(self, step: int) -> None:
        """Hear that nothing differs in this rank's groups, in the state that this step begins with."""

    standings: ClassVar[int] = 1
    """How many numbers `standing` returns where it returns any."""

    def standing(self) -> Tensor | None:
        """Return what should be alike on all ranks though not equal, such as a log norm.

        0-dim, or `standings` numbers in one dimension. What is not finite does not count.
        """
        return None

    def compared(self, step: int, own: float, others: tuple[float, float]) -> Findings:
        """Hear this rank's number and mean and deviation of the other ranks'."""
        return None

    def compared_at(self, place: int, step: int, own: float, others: tuple[float, float]) -> Findings:
        """Hear the same of the number at this place; override it where `standings` is more than 1."""
        del place
        return self.compared(step, own, others)


class Responder(Callback):
    """Acts on an agreed incident; if it raises, the run stops with the last good state on disk.

    All ranks are asked, and have to do the same. One that has to communicate does so through
    `run.consensus`, with the same calls in the same order on every rank: there a rank that raised, or
    answered already, is noticed before the others wait for it. Nothing can notice it in a collective of
    `torch.distributed` itself, nor in one within a group (`copy_from`, `differ`): whatever may raise comes
    before `run.consensus.all_of(True)`, and such a collective after it.
    """

    rung: ClassVar[Action]
    """Where on the recovery ladder it stands."""
    place: ClassVar[int] = 0
    """Of the responders on one rung the one with the lower number is asked first, then as in the list."""

    @property
    def replays_data(self) -> bool:
        """True if it may go back in the data; then `Sentinel.steps` has to draw it."""
        return False

    def escalates(self, incident: Incident, run: Run) -> bool | Action:
        """Return True to take this incident over from the cheaper rungs below, or the rung to begin with."""
        del incident, run
        return False

    def rechecks(self, run: Run) -> bool:
        """Return True if it would compute a step again that may stand as it is; the same on every rank."""
        del run
        return False

    def closes(self, incident: Incident, run: Run) -> Collection[Action]:
        """Return the rungs that must not be used for this incident, such as those whose budget is used up."""
        del incident, run
        return ()

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Recover from the incident, or return None to hand it to the next rung; called on every rank."""
        raise NotImplementedError


D = TypeVar("D", bound=Detector)


def check_every(steps: int, detector: D, *, attention_steps: int = 20) -> D:
    """Have a dear detector look in every so many steps only, and return it.

    On the other steps it costs nothing and sees nothing; so leave one alone that drops bad steps. Its looks
    depend on the number of the step and on incidents, so they are the same on every rank. What it does
    after a step (`on_after_step`, comparisons) is its own business.

    Args:
        steps: it looks in the steps that this divides.
        detector: any detector, also one of your own.
        attention_steps: after an incident it looks in each of so many steps.

    Raises:
        ConfigurationError: for anything else than a detector, or numbers that make no sense.
    """
    if not isinstance(detector, Detector):
        raise ConfigurationError(
            f"check_every takes a detector, not {detector!r:.80}; only detectors look at gradients"
        )
    _check_interval(steps, attention_steps)
    detector.check_interval, detector.attention_steps = steps, attention_steps
    return detector


def prompt_every(owner: object, every: int) -> int | None:
    """Return after which steps a listener hears at once of their end; `every` is a plain function's."""
    if not isinstance(owner, Callback):
        return every
    said = "prompt_every" in vars(owner) or _place(owner, "prompt_every") <= _place(owner, "on_after_step")
    earlier = any(getattr(type(owner), name) is not getattr(Callback, name) for name in _BEFORE_A_STEP)
    return owner.prompt_every if said and not earlier else 1


def needs_random_states(callback: Callback) -> bool:
    """Return True if a callback says so, or hears of incidents, whose scene has them, in a way of its own."""
    own = _place(callback, "on_incident") < _place(callback, "needs_random_states")
    return callback.needs_random_states or own


def _place(callback: Callback, name: str) -> int:
    """Return how far up the class is that says what `name` is."""
    return next(index for index, kind in enumerate(type(callback).__mro__) if name in vars(kind))


def answers(callback: Callback) -> bool:
    """Return True if `calm` speaks for what the callback would do in the events that it replaces.

    Not for a subclass that looks at them in another way and has no answer of its own.
    """
    if not isinstance(callback, Detector):
        return False
    answer = _place(callback, "calm")
    return answer < type(callback).__mro__.index(Detector) and all(
        answer <= _place(callback, name) for name in ("on_after_backward", "on_before_clip")
    )


def _check_interval(steps: Any, attention_steps: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"check_interval={steps!r} must be at least 1 step")
    if isinstance(attention_steps, bool) or not isinstance(attention_steps, int) or attention_steps < 0:
        raise ConfigurationError(f"attention_steps={attention_steps!r} must be a number of steps, 0 or more")


def check_callback(callback: object) -> Callback:
    """Return the callback if it can be registered; raises ConfigurationError saying what is wrong."""
    if isinstance(callback, type):
        raise ConfigurationError(f"{callback.__name__} is a class; give an instance: {callback.__name__}()")
    if isinstance(getattr(callback, "callback", None), Callback):
        name = type(callback).__name__
        raise ConfigurationError(
            f"{name} is a trainer's own callback around ours; here give the one inside: "
            f"from gradsentinel import {name}"
        )
    if not isinstance(callback, Callback):
        raise ConfigurationError(
            f"{type(callback).__name__} is not a gradsentinel.Callback; subclass Callback, or register "
            "a plain function with sentinel.on(event, function)"
        )
    known = set(events.METHODS.values())
    _check_names(type(callback), known)
    for name in known:
        check_signature(getattr(callback, name), f"{type(callback).__name__}.{name}")
    if isinstance(callback, Detector):
        _check_interval(callback.check_interval, callback.attention_steps)
    every = callback.prompt_every
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigurationError(f"prompt_every={every!r} must be at least 1 step, or None")
    if isinstance(callback, Responder):
        for name in ("respond", "escalates", "closes"):
            check_signature(getattr(callback, name), f"{type(callback).__name__}.{name}", "incident", "run")
    if isinstance(callback, Responder) and not isinstance(getattr(callback, "rung", None), Action):
        raise ConfigurationError(
            f"{type(callback).__name__} needs a rung, its place on the recovery ladder: rung = Action.SKIP"
        )
    return callback


def _check_names(kind: type, known: set[str]) -> None:
    """Refuse a method that looks like one for an event and would never be called."""
    allowed = known | {name for name in (*dir(Responder), *dir(Comparer)) if not name.startswith("_")}
    for name in dir(kind):
        if name.startswith("_") or name in allowed:
            continue
        attribute = inspect.getattr_static(kind, name)
        if not inspect.isfunction(attribute):
            continue
        near = difflib.get_close_matches(f"on_{name.removeprefix('on_')}", known, n=1, cutoff=0.9)
        if "_" not in name:
            continue  # batch(), recover(): plausible names of a callback's own methods
        if name.startswith("on_"):
            nearest = (near or difflib.get_close_matches(name, known, n=1, cutoff=0.0))[0]
            raise ConfigurationError(f"{kind.__name__}.{name} hears no event; did you mean {nearest}?")
        if near:
            raise ConfigurationError(f"{kind.__name__}.{name} would never be called; did you mean {near[0]}?")


def check_signature(function: Any, label: str, *arguments: str) -> None:
    """Raise ConfigurationError unless the function takes these arguments; none given means one event."""
    expected = arguments or ("event",)
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{label} is a coroutine; events are delivered synchronously, use a plain def"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # builtins without a signature: the call itself will tell
    try:
        signature.bind(*expected)
    except TypeError as error:
        wanted = "exactly one argument, the event" if not arguments else f"({', '.join(arguments)})"
        verb = "hear an event" if not arguments else "be called"
        raise ConfigurationError(
            f"{label}{signature} cannot {verb}: {error}; it must take {wanted}"
        ) from None
