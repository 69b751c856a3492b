"""Looking at runs: what a run directory holds, as JSON for the TensorBoard tab and the report.

Reads run directories and never writes into them; nothing in the core knows of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradsentinel.views.files import ViewError
    from gradsentinel.views.library import Views

__all__ = ["ViewError", "Views"]

_WHERE = {"ViewError": "gradsentinel.views.files", "Views": "gradsentinel.views.library"}


def __getattr__(name: str) -> Any:  # looking for runs takes no torch, looking at them does
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - as above

    return getattr(importlib.import_module(_WHERE[name]), name)
