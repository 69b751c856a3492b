"""A framework's callback that carries one of ours."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from gradsentinel.callback import Callback, check_callback
from gradsentinel.errors import ConfigurationError

logger = logging.getLogger("gradsentinel")

T = TypeVar("T")


class Native:
    """Carries one callback of ours; a framework's base class comes beside it.

    All of one trainer share one run, which the first of them drives, so their order is free. Each run gets
    callbacks as they were configured; what they must remember comes from a checkpoint or the run before.
    Attributes that the framework does not know are those of the callback inside.
    """

    kind: ClassVar[type[Callback]]
    """What is inside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | Callback = (args, kwargs)
        self.callback: Callback = self.kind(*args, **kwargs)
        self._used = False

    def begin(self) -> Callback:
        """Return the callback for a run that begins."""
        if self._used:
            self.callback = self._anew()
        self._used = True
        return self.callback

    def _anew(self) -> Callback:
        if isinstance(self._given, tuple):
            args, kwargs = self._given
            return self.kind(*args, **kwargs)
        try:
            return copy.deepcopy(self._given)
        except Exception:  # noqa: BLE001 - what somebody keeps in a callback raises anything; it is said
            logger.warning(
                "%s cannot be copied, so it goes into the next run as the last one left it",
                type(self._given).__name__,
            )
            return self.callback

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "callback" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.callback, name)

    def __repr__(self) -> str:
        return repr(self.callback)


def native_class(kind: type[Callback], base: type[T], module: str) -> type[T]:
    """Return a framework's callback class that carries callbacks of this kind."""
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        raise ConfigurationError(f"{kind!r} is no class of GradSentinel callbacks")
    return type(
        kind.__name__,
        (base,),
        {
            "kind": kind,
            "__doc__": kind.__doc__,
            "__module__": module,
            "__qualname__": kind.__name__,
            "__signature__": inspect.signature(kind),
        },
    )


def carry(callback: Callback, base: type[T], module: str) -> T:
    """Return a framework's callback that carries this one; raises ConfigurationError if it cannot be used."""
    check_callback(callback)
    instance = base.__new__(native_class(type(callback), base, module))
    super(Native, instance).__init__()  # type: ignore[misc] # the framework's own part
    try:
        given = copy.deepcopy(callback)
    except Exception:  # noqa: BLE001 - as in `_anew`, which says so if there is a second run
        given = callback
    vars(instance).update(_given=given, callback=callback, _used=False)
    return instance


def names_of(natives: Sequence[Native]) -> list[str]:
    """Return what the run calls their callbacks: by their kind, and a number for a further one of it."""
    kinds = [type(one.callback).__name__ for one in natives]
    counts = [kinds[:place].count(kind) + 1 for place, kind in enumerate(kinds)]
    return [kind if count == 1 else f"{kind}#{count}" for kind, count in zip(kinds, counts, strict=True)]
