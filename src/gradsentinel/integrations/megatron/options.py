"""The launcher's own options, taken out of a command line that belongs to somebody else's script."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from gradsentinel import callbacks
from gradsentinel.assembly import check_seconds
from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError

USAGE = """\
usage: python -m gradsentinel.integrations.megatron [--gs-...] SCRIPT [the script's own arguments]

  --gs-run-dir DIR       where events and incidents are written
  --gs-callbacks LIST    such as 'NanCallback, Retry(attempts=1), Rollback(every=50)';
                         without it: NanCallback, Retry, Rollback
  --gs-timeout SECONDS   how long a rank may keep the others waiting (600)
  --gs-keep-nan-checks   leave Megatron's own checks for NaN on: an error if they are
  --gs-module NAME       a further module whose setup_model_and_optimizer and train are the ones in use

Options may stand anywhere on the line; the script does not see them.
"""
MODULES = ("megatron.training.training", "mindspeed_llm.training.training")
"""Where training scripts of Megatron-LM and MindSpeed-LLM have their loop."""
_DEFAULT = "NanCallback, Retry, Rollback"
_KEEP = "--gs-keep-nan-checks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the launcher was asked for."""

    script: str
    arguments: tuple[str, ...]
    run_dir: str | None = None
    callbacks: str = _DEFAULT
    timeout: float = 600.0
    keep_nan_checks: bool = False
    modules: tuple[str, ...] = MODULES


def parse(line: Sequence[str]) -> Options:
    """Part the launcher's options from the script and its arguments; raises ConfigurationError."""
    rest: list[str] = []
    given: dict[str, str] = {}
    modules = list(MODULES)
    keep = False
    words = iter(line)
    for word in words:
        if not word.startswith("--gs-"):
            rest.append(word)
            continue
        name, equals, value = word.partition("=")
        if word == _KEEP:
            keep = True
            continue
        if name not in {"--gs-run-dir", "--gs-callbacks", "--gs-timeout", "--gs-module"}:
            raise ConfigurationError(f"there is no option {word if name == _KEEP else name}")
        value = value if equals else next(words, "")
        if not value:
            raise ConfigurationError(f"{name} needs a value")
        if name == "--gs-module":
            modules.append(value)
        given[name] = value
    if not rest or rest[0].startswith("-"):
        raise ConfigurationError("the script to run is missing")
    return Options(
        script=rest[0],
        arguments=tuple(rest[1:]),
        run_dir=given.get("--gs-run-dir"),
        callbacks=given.get("--gs-callbacks", _DEFAULT),
        timeout=_seconds(given.get("--gs-timeout", "600")),
        keep_nan_checks=keep,
        modules=tuple(dict.fromkeys(modules)),
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigurationError(f"--gs-timeout {text} is no number of seconds") from None
    try:
        check_seconds(seconds)
    except ConfigurationError as error:
        raise ConfigurationError(f"--gs-timeout: {error}") from None
    return seconds


def make_callbacks(text: str) -> list[Callback]:
    """Return the callbacks that a text names; only names and literal arguments are read, nothing is run.

    Raises:
        ConfigurationError: for a callback or an argument that there is not.
    """
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body
    except SyntaxError as error:
        raise ConfigurationError(f"--gs-callbacks {text!r} is no list of callbacks: {error.msg}") from None
    assert isinstance(tree, ast.List)
    return [_make(entry) for entry in tree.elts]


def _make(entry: ast.expr) -> Callback:
    call = entry if isinstance(entry, ast.Call) else None
    name = entry.func if call is not None else entry  # type: ignore[attr-defined]
    if not isinstance(name, ast.Name) or name.id not in callbacks.__all__:
        known = ", ".join(callbacks.__all__)
        raise ConfigurationError(f"--gs-callbacks: no callback is {ast.unparse(entry)!r}; there are {known}")
    if call is not None and call.args:
        raise ConfigurationError(f"--gs-callbacks: {ast.unparse(entry)} needs the names of its arguments")
    try:
        keywords = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords} if call is not None else {}
        made: Callback = getattr(callbacks, name.id)(**keywords)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"--gs-callbacks: {ast.unparse(entry)}: {error}") from error
    return made
