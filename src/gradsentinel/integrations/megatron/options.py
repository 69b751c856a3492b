"""The launcher's own options, taken out of a command line that belongs to somebody else's script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsentinel.assembly import check_seconds
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron.by_name import Wanted, from_text, nearest
from gradsentinel.integrations.megatron.config import read_config

USAGE = """\
usage: python -m gradsentinel.integrations.megatron [--gs-...] SCRIPT [the script's own arguments]

  --gs-config FILE       a .toml or .json file that says any of these; the command line wins over it
  --gs-run-dir DIR       where events and incidents are written
  --gs-callbacks LIST    such as 'NanCallback, Retry(attempts=1), Rollback(every=50)';
                         without it: NanCallback, Retry, Rollback
  --gs-timeout SECONDS   how long a rank may keep the others waiting (600)
  --gs-diagnosis-budget SECONDS
                         how long finding out about one incident may take (30)
  --gs-keep-nan-checks   leave Megatron's own checks for NaN on: an error if they are;
                         --gs-no-keep-nan-checks switches them off after all
  --gs-module NAME       a further module whose setup_model_and_optimizer and train are the ones in use;
                         may be given several times

Options may stand anywhere on the line; the script does not see them. In a file, on every rank the same:

  run_dir = "runs/gpt"          # likewise timeout, diagnosis_budget, keep_nan_checks, module

  [callbacks.NanCallback]
  [callbacks.Retry]
  attempts = 1
"""
MODULES = ("megatron.training.training", "mindspeed_llm.training.training")
"""Where training scripts of Megatron-LM and MindSpeed-LLM have their loop."""
_DEFAULT = "NanCallback, Retry, Rollback"
_FLAGS = {"--gs-keep-nan-checks": True, "--gs-no-keep-nan-checks": False}
_SECONDS = {"timeout": "--gs-timeout", "diagnosis_budget": "--gs-diagnosis-budget"}
_VALUED = (
    "--gs-config",
    "--gs-run-dir",
    "--gs-callbacks",
    "--gs-timeout",
    "--gs-diagnosis-budget",
    "--gs-module",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the launcher was asked for."""

    script: str
    arguments: tuple[str, ...]
    run_dir: str | None = None
    callbacks: tuple[Wanted, ...] = from_text(_DEFAULT, "--gs-callbacks")
    timeout: float = 600.0
    diagnosis_budget: float = 30.0
    keep_nan_checks: bool = False
    modules: tuple[str, ...] = MODULES


def parse(line: Sequence[str]) -> Options:
    """Part the launcher's options from the script and its arguments, and read the file that they name.

    Raises:
        ConfigurationError: for an option, a file or a value that cannot work; callbacks are not made yet.
    """
    rest: list[str] = []
    given: dict[str, str] = {}
    said: dict[str, Any] = {}
    modules: list[str] = []
    words = iter(line)
    for word in words:
        if not word.startswith("--gs-"):
            rest.append(word)
            continue
        name, equals, value = word.partition("=")
        if word in _FLAGS:
            said["keep_nan_checks"] = _FLAGS[word]
            continue
        if name not in _VALUED:
            known = (*_VALUED, *_FLAGS)
            raise ConfigurationError(
                f"there is no option {word if name in _FLAGS else name}{nearest(name, known)}"
            )
        value = value if equals else next(words, "")
        if not value:
            raise ConfigurationError(f"{name} needs a value")
        if name == "--gs-module":
            modules.append(value)
        given[name] = value
    if not rest or rest[0].startswith("-"):
        raise ConfigurationError("the script to run is missing")
    said = {**_from_file(given), **_from_line(given), **said}
    said["modules"] = tuple(dict.fromkeys((*MODULES, *said.pop("module", ()), *modules)))
    return Options(script=rest[0], arguments=tuple(rest[1:]), **said)


def _from_file(given: Mapping[str, str]) -> dict[str, Any]:
    path = given.get("--gs-config")
    if path is None:
        return {}
    said = read_config(path)
    for key in _SECONDS:
        if key in said:
            _check(key, said[key], path)
    return said


def _from_line(given: Mapping[str, str]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if "--gs-run-dir" in given:
        said["run_dir"] = given["--gs-run-dir"]
    if "--gs-callbacks" in given:
        said["callbacks"] = from_text(given["--gs-callbacks"], "--gs-callbacks")
    for key, name in _SECONDS.items():
        if name in given:
            try:
                said[key] = float(given[name])
            except ValueError:
                raise ConfigurationError(f"{name} {given[name]} is no number of seconds") from None
            _check(key, said[key], name)
    return said


def _check(key: str, seconds: float, place: str) -> None:
    """Seconds are checked here, before a script has spent minutes on its way to the attach."""
    try:
        check_seconds(**{"timeout": 1.0, key: seconds})
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None
