"""Runs a training script of Megatron-LM as it is, and attaches when there are a model and an optimizer."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron.attach import attach
from gradsentinel.integrations.megatron.options import USAGE, Options, parse
from gradsentinel.integrations.megatron.sentinel import MegatronSentinel


def main(line: Sequence[str] | None = None) -> None:
    """Run the script that the command line names, watched; leaves with 2 if there is no such thing."""
    words = sys.argv[1:] if line is None else list(line)
    if words in (["--gs-help"], ["--help"], ["-h"]):
        sys.stdout.write(USAGE)
        return
    try:
        launch = Launch(parse(words))
    except ConfigurationError as error:
        sys.stderr.write(f"--gs-help tells what can be said.\nerror: {error}\n")
        raise SystemExit(2) from None
    launch.run()


logger = logging.getLogger("gradsentinel")


class Launch:
    """One script under watch.

    Three functions of the training loop's module are replaced as soon as the script imports it, and put
    back at the end: setup_model_and_optimizer, get_forward_backward_func and train. Nothing of Megatron is
    imported before the script does so: an adaptor such as MindSpeed's has to come first.
    """

    def __init__(self, options: Options) -> None:
        if not Path(options.script).exists():
            raise ConfigurationError(f"there is no script {options.script}")
        self._options = options
        self._callbacks = [wanted.make() for wanted in options.callbacks]
        self._replaced: list[tuple[ModuleType, str, Any]] = []
        self.sentinel: MegatronSentinel | None = None

    def run(self) -> None:
        """Run the script as `python SCRIPT` does."""
        script = self._options.script
        before = sys.argv, list(sys.path)
        sys.argv = [script, *self._options.arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # noqa: PTH100, PTH120 - as Python does
        finder = _AfterImport(self._options.modules, self.watch_module)
        for name in self._options.modules:
            if name in sys.modules:  # by whoever has prepared this process
                self.watch_module(sys.modules[name])
        sys.meta_path.insert(0, finder)
        error: BaseException | None = None
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException as raised:
            error = raised
            raise
        finally:
            sys.meta_path.remove(finder)
            for module, name, plain in reversed(self._replaced):
                setattr(module, name, plain)
            sys.argv, sys.path[:] = before
            self._end(error)

    def watch_module(self, module: ModuleType) -> None:
        """Replace the functions of a training loop's module that make, use and end a training."""
        for name, make in (
            ("setup_model_and_optimizer", self._setting_up),
            ("get_forward_backward_func", self._scheduling),
            ("train", self._training),
        ):
            plain = getattr(module, name, None)
            if callable(plain) and not hasattr(plain, "_gradsentinel"):
                instead = functools.wraps(plain)(make(plain))
                instead._gradsentinel = True  # type: ignore[attr-defined]
                setattr(module, name, instead)
                self._replaced.append((module, name, plain))

    def _setting_up(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            model, optimizer, scheduler = made[:3]
            if optimizer is not None and self.sentinel is None:  # evaluation alone has none
                self.sentinel = attach(
                    model,
                    optimizer,
                    scheduler=scheduler,
                    callbacks=self._callbacks,
                    run_dir=self._options.run_dir,
                    timeout=self._options.timeout,
                    diagnosis_budget=self._options.diagnosis_budget,
                    allow_nan_check_off=not self._options.keep_nan_checks,
                )
            return made

        return setup_model_and_optimizer

    def _scheduling(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            function = plain(*args, **kwargs)
            return function if self.sentinel is None else self.sentinel.schedule(function)

        return get_forward_backward_func

    def _training(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **kwargs: Any) -> Any:
            error: BaseException | None = None
            try:
                return plain(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:  # while the ranks can still talk to each other
                self._end(error)

        return train

    def _end(self, error: BaseException | None) -> None:
        if self.sentinel is not None:
            self.sentinel.close(error)
        elif error is None:
            logger.warning(
                "nothing was watched: no setup_model_and_optimizer of %s has made an optimizer; a further "
                "module is named with --gs-module",
                " or ".join(self._options.modules),
            )


class _AfterImport(importlib.abc.MetaPathFinder):
    """Has a function called with a module as soon as that was imported."""

    def __init__(self, names: Sequence[str], then: Callable[[ModuleType], None]) -> None:
        self._names = set(names)
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find what the other finders find, and have its loader tell when it is done."""
        if fullname not in self._names:
            return None
        self._names.remove(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self._then)
        return spec


class _Telling(importlib.abc.Loader):
    """A loader that tells when it has loaded."""

    def __init__(self, plain: Any, then: Callable[[ModuleType], None]) -> None:
        self._plain = plain
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the loader itself."""
        made: ModuleType | None = self._plain.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Load, and tell."""
        self._plain.exec_module(module)
        self._then(module)
