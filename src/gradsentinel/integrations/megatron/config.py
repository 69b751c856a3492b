"""What the launcher is told by a file instead of on the command line: TOML or JSON."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron.by_name import from_table, from_text, nearest
from gradsentinel.integrations.megatron.values import fitted

KEYS: Mapping[str, Any] = {
    "run_dir": str,
    "callbacks": Any,
    "timeout": float,
    "diagnosis_budget": float,
    "keep_nan_checks": bool,
    "module": str | list[str],
}
"""What a file may say, and of which type: the launcher's options, by their names."""


def read_config(path: str) -> dict[str, Any]:
    """Return what a file says, by key; `callbacks` as a tuple of `Wanted`, `module` as a tuple of names.

    Raises:
        ConfigurationError: for a file that cannot be read, a key that there is not, a value of another type.
    """
    found = _parsed(path)
    if not isinstance(found, dict):
        raise ConfigurationError(f'{path}: at the top there must be an object, such as {{"run_dir": ...}}')
    said: dict[str, Any] = {}
    for key, value in found.items():
        if key not in KEYS:
            raise ConfigurationError(f"{path}: there is no key {key!r}{nearest(key, KEYS)}")
        try:
            said[key] = fitted(value, KEYS[key])
        except ValueError as error:
            raise ConfigurationError(f"{path}: {key}={value!r} {error}") from None
        if said[key] in ("", ()):
            raise ConfigurationError(f"{path}: {key} is empty; leave it out")
    if "callbacks" in said:
        said["callbacks"] = _callbacks(said["callbacks"], f"{path}: callbacks")
    if isinstance(said.get("module"), str):
        said["module"] = (said["module"],)
    return said


def _callbacks(value: Any, place: str) -> Any:
    if isinstance(value, str):
        return from_text(value, place)
    if isinstance(value, Mapping):
        return from_table(value, place)
    raise ConfigurationError(
        f"{place} must be a table with one entry for each callback, or a text such as "
        "'NanCallback, Retry(attempts=1)'"
    )


def _parsed(path: str) -> Any:
    parse = _parser(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        return parse(text)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # what all decoders raise is a ValueError
        raise ConfigurationError(f"{path} cannot be read: {error}") from None


def _parser(path: str) -> Callable[[str], Any]:
    ending = Path(path).suffix.lower()
    if ending == ".json":
        return _from_json
    if ending != ".toml":
        raise ConfigurationError(f"{path}: a name that ends with .toml or .json says what it is")
    loads: Callable[[str], Any] = _toml(path).loads
    return loads


def _toml(path: str) -> ModuleType:
    """Python's own reader, from 3.11 on; before that the package it was made of, if somebody has it."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ConfigurationError(
        f"{path}: TOML needs Python 3.11 or the package tomli (pip install tomli); "
        "JSON, in a file that ends with .json, needs neither"
    )


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: json takes the last of several, without a word."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found
