"""The callback that a Hugging Face Trainer calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.natives import Native, carry, native_class
from gradsentinel.integrations.versions import require

if TYPE_CHECKING:
    from gradsentinel.integrations.huggingface.session import Session

    Base = object
else:
    require("accelerate", oldest="1.10", extra="huggingface")
    Base = require("transformers", oldest="5.0", extra="huggingface").TrainerCallback

P = ParamSpec("P")
C = TypeVar("C", bound=Callback)
HOME = "gradsentinel.integrations.huggingface"


class SentinelCallback(Native, Base):
    """A Trainer callback that carries one of GradSentinel's; those of one Trainer share one run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unused()

    def _unused(self) -> None:
        self._session: Session | None = None
        """The run, if this is the callback that drives it."""
        self._watched: Session | None = None
        """The run, for every callback of it; perhaps one that is over."""

    # -- the Trainer's events -------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a run: the checkpoint is loaded, everything is prepared."""
        from gradsentinel.integrations.huggingface.session import Session  # noqa: PLC0415 - it imports this module

        trainer, checkpoint = _calling_trainer(self)
        natives = [one for one in trainer.callback_handler.callbacks if isinstance(one, SentinelCallback)]
        if natives[0] is self:
            _refuse_shared(trainer, natives)
            before, self._session = self._session, None
            state = None if before is None else before.leave(None)
            earlier = state if before is not None and before.model is trainer.model else None
            self._session = Session(trainer, natives, kwargs.get("train_dataloader"), checkpoint, earlier)
            for one in natives:
                one._watched = self._session

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take note of the epoch."""
        if self._session is not None:
            self._session.begin_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step, and put what happened to it into the Trainer's own log."""
        if self._session is not None:
            self._session.step_done()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what the run has to remember to the checkpoint."""
        if self._session is not None:
            self._session.save_beside_checkpoint(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run."""
        if self._session is not None:
            self._session.leave(None)


def _calling_trainer(callback: Any) -> tuple[Any, Any]:
    """Return the Trainer that is calling this callback, and the checkpoint that it goes on from.

    Neither is handed to callbacks, so they are looked for where the call comes from.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if handler is not None and any(one is callback for one in handler.callbacks):
            return owner, frame.f_locals.get("resume_from_checkpoint")
        frame = frame.f_back  # type: ignore[assignment] # None at the end
    raise ConfigurationError(
        f"{type(callback).__name__} works in the callbacks of a transformers.Trainer only"
    )


def _refuse_shared(trainer: Any, natives: Sequence[SentinelCallback]) -> None:
    """Raise ConfigurationError if one of these callbacks is at work for another Trainer at this moment."""
    for one in natives:
        run = one._watched
        if run is not None and not run.over and run.trainer is not trainer and _trains_now(run.trainer):
            raise ConfigurationError(
                f"this {type(one).__name__} is watching another Trainer that is training: give each Trainer "
                "callbacks of its own"
            )


def _trains_now(trainer: Any) -> bool:
    """Return True if some thread is in the `train` of this Trainer, which has no mark of that itself."""
    for innermost in sys._current_frames().values():
        frame = innermost
        while frame is not None:
            if frame.f_code.co_name == "train" and frame.f_locals.get("self") is trainer:
                return True
            frame = frame.f_back  # type: ignore[assignment] # None at the end
    return False


def native(kind: Callable[P, C]) -> Callable[P, SentinelCallback]:
    """Return the Trainer callback class that carries callbacks of this kind; takes the same arguments."""
    return native_class(kind, SentinelCallback, HOME)  # type: ignore[arg-type] # a class is what is called here


def adapt(callback: Callback) -> SentinelCallback:
    """Return a Trainer callback that carries one of your own making.

    Raises:
        ConfigurationError: if it is no GradSentinel callback, or could never be called as meant.
    """
    carried = carry(callback, SentinelCallback, HOME)
    carried._unused()
    return carried
