"""The callback that a Lightning Trainer calls."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.natives import Native, carry, names_of, native_class
from gradsentinel.integrations.versions import check, require
from gradsentinel.integrations.wraps import Wraps, take_off

if TYPE_CHECKING:
    from gradsentinel.integrations.lightning.session import Session

    Base = object
else:
    OLDEST = "2.6"
    _PACKAGES = ("lightning.pytorch", "pytorch_lightning")
    """Two packages with the same code and different classes."""

    def _installed() -> list[type]:
        """Return the Callback classes of the packages in use; of the first that is installed if none is."""
        found = [sys.modules[name] for name in _PACKAGES if sys.modules.get(name) is not None]
        if not found:
            require("lightning", "pytorch_lightning", oldest=OLDEST, extra="lightning")
            chosen = next(name for name in _PACKAGES if sys.modules.get(name.partition(".")[0]) is not None)
            found = [importlib.import_module(chosen)]
        for module in found:
            name = module.__name__.partition(".")[0]
            version = getattr(sys.modules[name], "__version__", "0")
            check(name, version, oldest=OLDEST, extra="lightning")
        return [importlib.import_module(f"{module.__name__}.callbacks").Callback for module in found]

    class Base(*_installed()):
        """The framework's own class, or both."""


P = ParamSpec("P")
C = TypeVar("C", bound=Callback)
HOME = "gradsentinel.integrations.lightning"
_KEY = "gradsentinel"
"""Where a checkpoint keeps what belongs to the run, whoever drives it."""

logger = logging.getLogger("gradsentinel")


class SentinelCallback(Native, Base):
    """A Lightning callback that carries one of GradSentinel's; those of one Trainer share one run.

    It is a `Callback` of `lightning.pytorch` and of `pytorch_lightning`, whichever is in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _join_packages()
        super().__init__(*args, **kwargs)
        self._unused()

    def _unused(self) -> None:
        self._session: Session | None = None
        """The run, if this is the callback that drives it."""
        self._watched: Session | None = None
        """The run, for every callback of it."""
        self._early: Wraps | None = None
        self._ended: tuple[Any, Mapping[str, Any]] | None = None
        """The module of the run before, and what that run came to."""
        self._key = f"gradsentinel.{self.callback!r}"
        self._restored: Mapping[str, Any] | None = None
        """What a checkpoint holds of the run beside its callbacks, if this one is going to drive it."""
        self._own: Mapping[str, Any] = {}
        """What this callback had to remember when the run before ended, or when a checkpoint was written."""

    @property
    def state_key(self) -> str:
        """The kind, with a number for a further one of it in its Trainer; before that is known, the settings.

        Lightning wants two of a kind told apart when a Trainer is made, and a state that is found again when
        a setting was changed.
        """
        return self._key  # Lightning asks at every hook

    # -- Lightning's hooks ----------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any = None, stage: Any = None) -> None:
        """Learn which one of its kind it is."""
        if not isinstance(self, SentinelCallback):  # a class, of which this is called as a function
            raise _class_given(self)
        if stage == "fit":
            self._refuse_shared(trainer)
        natives = _natives(trainer)
        self._key = f"gradsentinel.{names_of(natives)[natives.index(self)]}"

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Be there before the loaders are iterated over."""
        if _leads(self, trainer):
            from gradsentinel.integrations.lightning.session import begin_early  # noqa: PLC0415 - likewise

            self._let_go()
            take_off(trainer, "save_checkpoint")  # of a fit that ended badly
            self._early = begin_early(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run: the checkpoint is loaded, and model and optimizers are in place."""
        if not _leads(self, trainer):
            return
        from gradsentinel.integrations.lightning.session import Session  # noqa: PLC0415 - it imports this module

        if self._session is not None:
            self._end(trainer, pl_module, None)
        natives = _natives(trainer)
        earlier = self._earlier(natives, pl_module)
        early, self._early = self._early or Wraps(), None
        try:
            self._session = Session(trainer, pl_module, natives, earlier, early)
        except BaseException:
            early.undo()
            raise
        for one in natives:
            one._watched = self._session

    def _earlier(self, natives: Sequence[SentinelCallback], pl_module: Any) -> Mapping[str, Any] | None:
        """Return the state that this run goes on from: of a checkpoint, or of the run before."""
        restored, self._restored = self._restored, None
        if restored is not None:
            own = {name: one._own for name, one in zip(names_of(natives), natives, strict=True) if one._own}
            return {**restored, "callbacks": {**restored["callbacks"], **own}}
        same = self._ended is not None and self._ended[0] is pl_module
        return self._ended[1] if same and self._ended else None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Look which sampler the epoch is drawn through."""
        if self._session is not None:
            self._session.begin_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take note of the micro-batch, already on its device."""
        if self._session is not None:
            self._session.take(batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """See the loss, divided and scaled."""
        if self._session is not None:
            self._session.see_loss(loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Take note of the gradients of a micro-batch."""
        if self._session is not None:
            self._session.backward_done()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Judge the final gradients: unscaled, not yet clipped."""
        if self._session is not None:
            self._session.judge(optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Put back what manual optimization has moved although its step was dropped."""
        if self._session is not None:
            self._session.batch_done()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Have the run end when everybody has heard of it: checkpoints may yet be written."""
        if self._session is not None:
            self._session.at_last(lambda: self._end(trainer, pl_module, None))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Let go of a fit without any training batches."""
        self._let_go()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any = None) -> None:
        """End the run by somebody's exception, which goes on its way unchanged."""
        if isinstance(self, SentinelCallback) and not self._belongs_elsewhere(trainer):
            self._end(trainer, pl_module, exception)

    def state_dict(self) -> dict[str, Any]:
        """Return what this callback has to remember."""
        if self._watched is not None:
            return dict(self._watched.engine.state_of(self.callback))
        return dict(self._own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until the run begins."""
        self._own = dict(state_dict)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add what the run has to remember beside its callbacks, under a key of its own."""
        if not _leads(self, trainer):
            return
        state = self._ended[1] if self._ended is not None else None
        if self._watched is not None:
            state = self._watched.engine.state_dict()
        if state is not None:
            mine = names_of(_natives(trainer))
            others = {name: one for name, one in state["callbacks"].items() if name not in mine}
            checkpoint[_KEY] = {**state, "callbacks": others}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep what a checkpoint holds of the run; say so if it holds nothing."""
        self._own = {}
        if not _leads(self, trainer):
            return
        self._restored = copy.deepcopy(checkpoint.get(_KEY))
        if (
            self._restored is None
            and trainer.is_global_zero
            and getattr(trainer.state.fn, "value", "") == "fit"
        ):
            logger.warning(
                "the checkpoint was written without GradSentinel: its step counters, budgets and histories "
                "begin anew"
            )

    def _belongs_elsewhere(self, trainer: Any) -> bool:
        return self._watched is not None and self._watched.trainer is not trainer

    def _refuse_shared(self, trainer: Any) -> None:
        """Raise ConfigurationError if this is at work for another Trainer at this moment."""
        if self._watched is not None and self._belongs_elsewhere(trainer):
            state = self._watched.trainer.state
            if getattr(state.status, "value", state.status) == "running":
                raise ConfigurationError(
                    f"this {type(self).__name__} is watching another Trainer that is training: give each "
                    "Trainer callbacks of its own"
                )

    def _let_go(self) -> None:
        """Undo what was done for a run that never began."""
        early, self._early = self._early, None
        if early is not None:
            early.undo()

    def _end(self, trainer: Any, pl_module: Any, error: BaseException | None) -> None:
        self._let_go()
        session, self._session = self._session, None
        if session is None:
            return
        natives = [one for one in _natives(trainer) if one._watched is session]
        try:
            state = session.end(error)
        finally:
            for one in natives:
                one._watched = None
        self._ended = (pl_module, state)
        for one, name in zip(natives, names_of(natives), strict=True):
            one._own = state["callbacks"].get(name, {})


def _natives(trainer: Any) -> list[SentinelCallback]:
    return [one for one in trainer.callbacks if isinstance(one, SentinelCallback)]


def _leads(callback: SentinelCallback, trainer: Any) -> bool:
    return _natives(trainer)[0] is callback


def _class_given(trainer: Any) -> ConfigurationError:
    kinds = (one for one in trainer.callbacks if isinstance(one, type) and issubclass(one, SentinelCallback))
    name = next((kind.__name__ for kind in kinds), "a callback")
    return ConfigurationError(f"{name} is a class; give an instance: {name}()")


def _join_packages() -> None:
    """Become a callback of the other package too, if that was imported later."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        callbacks = sys.modules.get(f"{name}.callbacks")
        other = getattr(callbacks, "Callback", None)
        if other is not None and not issubclass(Base, other):
            Base.__bases__ = (*Base.__bases__, other)


def native(kind: Callable[P, C]) -> Callable[P, SentinelCallback]:
    """Return the Lightning callback class that carries callbacks of this kind; takes the same arguments."""
    return native_class(kind, SentinelCallback, HOME)  # type: ignore[arg-type] # a class is what is called here


def adapt(callback: Callback) -> SentinelCallback:
    """Return a Lightning callback that carries one of your own making.

    Raises:
        ConfigurationError: if it is no GradSentinel callback, or could never be called as meant.
    """
    _join_packages()
    carried = carry(callback, SentinelCallback, HOME)
    carried._unused()
    return carried
