"""Methods of single objects replaced for a while, and put back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the method that is there and returns what is to be called instead."""


_MARK = "_gradsentinel_wraps"


def is_wrapped(owner: Any, name: str) -> bool:
    """Return True if a method of this object is wrapped, and the wraps have not been taken off."""
    found = getattr(vars(owner).get(name), _MARK, None)
    return isinstance(found, Wraps) and found.active


def take_off(owner: Any, name: str) -> None:
    """Undo the wraps around a method of this object, if there are any, with all that came with them."""
    found = getattr(vars(owner).get(name), _MARK, None)
    if isinstance(found, Wraps):
        found.undo()


class Wraps:
    """Wraps around methods of instances; classes and modules stay as they are."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, bool, Any, Any]] = []
        self.active = True
        """False once they were taken off: whoever kept one of them gets the plain method."""

    def wrap(self, owner: Any, name: str, make: Make) -> None:
        """Replace the method of this one object."""
        own = name in vars(owner)
        plain = getattr(owner, name)
        instead = make(plain)

        @wraps(plain)  # with its marks: torch's schedulers look whether the step they know is still there
        def method(*args: Any, **kwargs: Any) -> Any:
            return instead(*args, **kwargs) if self.active else plain(*args, **kwargs)

        vars(method)[_MARK] = self
        object.__setattr__(owner, name, method)
        self._done.append((owner, name, own, plain, method))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, to be put back like a method."""
        self._done.append((owner, name, True, getattr(owner, name), value))
        object.__setattr__(owner, name, value)  # a DataLoader allows nobody else to

    def undo(self) -> None:
        """Put everything back; where somebody else has put something on top, that finds the plain one."""
        self.active = False
        for owner, name, own, plain, ours in reversed(self._done):
            if vars(owner).get(name) is not ours:
                continue
            if own:
                object.__setattr__(owner, name, plain)
            else:
                delattr(owner, name)
        self._done.clear()
