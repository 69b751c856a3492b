"""The GradSentinel tab in TensorBoard; TensorBoard finds it through the entry point `tensorboard_plugins`."""

from typing import Any

__all__ = ["GradSentinelPlugin"]


def __getattr__(name: str) -> Any:  # the class is one of TensorBoard's own, which need not be installed
    if name != "GradSentinelPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gradsentinel.tensorboard_plugin.plugin import plugin_class  # noqa: PLC0415 - as above

    return plugin_class()
