"""The callback that a Lightning Trainer calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from gradsentinel.callback import Callback
from gradsentinel.integrations.natives import Native, carry, native_class
from gradsentinel.integrations.versions import check, require
from gradsentinel.integrations.wraps import Wraps

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


class SentinelCallback(Native, Base):
    """A Lightning callback that carries one of GradSentinel's; those of one Trainer share one run.

    It is a `Callback` of `lightning.pytorch` and of `pytorch_lightning`, whichever is in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _join_packages()
        super().__init__(*args, **kwargs)
        self._session: Session | None = None
        self._early: Wraps | None = None
        self._ended: tuple[Any, Mapping[str, Any]] | None = None
        """The module of the run before, and what that run came to."""

    @property
    def state_key(self) -> str:
        """The kind and its settings, so that two of a kind with other settings keep their own state."""
        key: str | None = vars(self).get("_key")  # Lightning asks at every hook
        if key is None:
            key = vars(self)["_key"] = f"gradsentinel.{self.callback!r}"
        return key

    def _leads(self, trainer: Any) -> bool:
        return next(one for one in trainer.callbacks if isinstance(one, SentinelCallback)) is self

    # -- Lightning's hooks ----------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Be there before the loaders are iterated over."""
        if self._leads(trainer):
            from gradsentinel.integrations.lightning.session import begin_early  # noqa: PLC0415 - likewise

            self._let_go()
            self._early = begin_early(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run: the checkpoint is loaded, and model and optimizers are in place."""
        if not self._leads(trainer):
            return
        from gradsentinel.integrations.lightning.session import Session  # noqa: PLC0415 - it imports this module

        if self._session is not None:
            self._session.end(None)
        natives = [one for one in trainer.callbacks if isinstance(one, SentinelCallback)]
        same = self._ended is not None and self._ended[0] is pl_module
        earlier = self._ended[1] if same and self._ended else None
        early, self._early = self._early or Wraps(), None
        try:
            self._session = Session(trainer, pl_module, natives, earlier, early)
        except BaseException:
            early.undo()
            raise

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
        """End the run."""
        self._end(pl_module, None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Let go of a fit without any training batches."""
        self._let_go()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run by somebody's exception, which goes on its way unchanged."""
        self._end(pl_module, exception)

    def state_dict(self) -> dict[str, Any]:
        """Return what the run has to remember; the first of its callbacks gives it for all."""
        if self._session is not None:
            return self._session.engine.state_dict()
        return dict(self._ended[1]) if self._ended is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until the run begins."""
        self.restored = dict(state_dict)

    def _let_go(self) -> None:
        """Undo what was done for a run that never began."""
        early, self._early = self._early, None
        if early is not None:
            early.undo()

    def _end(self, pl_module: Any, error: BaseException | None) -> None:
        self._let_go()
        session, self._session = self._session, None
        if session is not None:
            self._ended = (pl_module, session.end(error))


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
    carried._session, carried._early, carried._ended = None, None, None
    return carried
