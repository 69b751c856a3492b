"""What TensorBoard knows of the tab: whether there is anything to see, and who answers which route."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gradsentinel.tensorboard_plugin.routes import Application, assets, data_routes
from gradsentinel.views.files import Files
from gradsentinel.views.search import find_runs

NAME = "gradsentinel"


@cache
def plugin_class() -> type[Any]:
    """Return the class that TensorBoard makes the plugin of; raises ImportError without tensorboard."""
    from tensorboard.plugins import base_plugin  # noqa: PLC0415 - an optional dependency

    class GradSentinelPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
        """The tab; makes nothing but the tab if the log directory is not one of this machine."""

        plugin_name = NAME

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self._tab = Tab(getattr(context, "logdir", None))

        def get_plugin_apps(self) -> Mapping[str, Application]:
            """Return who answers which route."""
            return self._tab.apps()

        def is_active(self) -> bool:
            """Return True if there is a run to look at."""
            return self._tab.is_active()

        def frontend_metadata(self) -> Any:
            """Say which module draws the tab."""
            return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="GradSentinel")

    return GradSentinelPlugin


class Tab:
    """The runs under one log directory, seen through TensorBoard.

    Args:
        logdir: as it was given to TensorBoard; None, or a place on another machine, has no runs.
    """

    def __init__(self, logdir: str | None) -> None:
        place = Path(os.path.expanduser(logdir)).absolute() if logdir and "://" not in logdir else None  # noqa: PTH111 - "~" alone
        self._root = place
        self._warming = False

    def is_active(self) -> bool:
        """Return True if there is a run; then what it takes to read one is imported meanwhile."""
        if self._root is None or not find_runs(Files(self._root), most=1):
            return False
        if not self._warming:
            self._warming = True
            threading.Thread(target=_import_views, name="gradsentinel-views", daemon=True).start()
        return True

    def apps(self) -> Mapping[str, Application]:
        """Return who answers which route: the files of the front end, and the data."""
        return {**assets(), **data_routes(self._root)}


def _import_views() -> None:
    import gradsentinel.views.library  # noqa: F401, PLC0415 - takes seconds: it imports torch
