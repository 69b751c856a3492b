"""Which parameter is number 17: every flat index that can turn up somewhere, with its name, on disk."""

from __future__ import annotations

import fnmatch
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from gradsentinel.errors import StoreError
from gradsentinel.incident import jsonable, now
from gradsentinel.measures.inspection import local
from gradsentinel.run import Run
from gradsentinel.state.disk import is_full_or_broken
from gradsentinel.store import check_schema, write_json
from gradsentinel.wording import plain_name

logger = logging.getLogger("gradsentinel")

SCHEMA = 1
_FILE = re.compile(r"params-rank(\d+)\.json")


_WHAT = "the names of the parameters"


class ParameterMap:
    """Writes the name map of this rank, and again when a parameter was added or got its shape."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._generation = -1
        self._unborn: list[Tensor] = []
        self._failed = False

    def write(self) -> Path | None:
        """Write `params-rank<N>.json`; returns where, or None if that was not possible (logged once)."""
        run = self._run
        path = run.directory.path / f"params-rank{run.rank.rank}.json"
        self._generation = getattr(run.host, "generation", 0)
        try:
            self._unborn = [p for _, p in run.host.named_parameters() if is_lazy(p)]
            data = describe_parameters(run)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, data)
            run.disk.taken(_WHAT)
        except Exception as error:  # names are a convenience: whatever a host or a disk does, the run goes on
            if isinstance(error, OSError) and is_full_or_broken(error):
                run.disk.refused(_WHAT, error, self.write)
                return None
            if not self._failed and isinstance(error, OSError):
                logger.warning("the names of the parameters could not be written to %s: %s", path, error)
            elif not self._failed:
                logger.exception("the names of the parameters could not be written to %s", path)
            self._failed = True
            return None
        return path

    def refresh(self) -> None:
        """Write it again if it is out of date; cheap enough for every step."""
        generation = getattr(self._run.host, "generation", 0)
        unborn = self._unborn
        if self._generation != generation or (unborn and any(not is_lazy(one) for one in unborn)):
            self.write()


def describe_parameters(run: Run) -> dict[str, Any]:
    """Return the name map as JSON, in the order of `Host.named_parameters`; reads no value.

    Numbers of elements and offsets are those of this rank's part, shapes those of the whole parameter.
    Where a parameter has no shape yet, it and the offsets behind it are null.
    """
    aliases, kinds = _aliases(run), _module_types(run)
    describe = getattr(run.host, "describe", None)
    members = _members(run)
    roots = [prefix for prefix, _ in run.host.modules()]
    entries: list[dict[str, Any]] = []
    trainable: dict[str, int] = {}
    offset: int | None = 0
    for index, (name, parameter) in enumerate(run.host.named_parameters()):
        known = id(parameter) in aliases
        names = aliases.get(id(parameter), [name])
        module = name.rpartition(".")[0] if known else None
        root = next((r for r in roots if r and name.startswith(f"{r}.")), "")
        number = None
        if known and parameter.requires_grad:
            number = trainable.get(root, 0)
            trainable[root] = number + 1
        numel = _numel(parameter)
        entries.append(
            {
                "index": index,
                "name": name,
                "aliases": [other for other in dict.fromkeys(names) if other != name],
                "module": module,
                "module_type": None if module is None else kinds.get(module),
                "shape": None if is_lazy(parameter) else list(parameter.shape),
                "local_shape": list(local(parameter).shape) if hasattr(parameter, "to_local") else None,
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "device": str(parameter.device),
                "numel": numel,
                "trainable": parameter.requires_grad,
                "trainable_index": number,
                "offset": None if numel is None else offset,
                "optimizers": members.get(id(parameter), []),
                **(describe(parameter) if describe is not None else {}),
            }
        )
        offset = None if offset is None or numel is None else offset + numel
    return {
        "schema": SCHEMA,
        "time": now(),
        "step": run.step,
        "rank": run.rank.as_dict(),
        "world_size": run.consensus.world_size,
        "optimizers": [type(optimizer).__name__ for optimizer in run.host.optimizers],
        "parameters": jsonable(entries),
    }


def _numel(parameter: Tensor) -> int | None:
    return None if is_lazy(parameter) else local(parameter).numel()


def _aliases(run: Run) -> dict[int, list[str]]:
    """All names that the modules have for each parameter: a tied one has several."""
    found: dict[int, list[str]] = {}
    for prefix, root in run.host.modules():
        for name, parameter in root.named_parameters(prefix=prefix, remove_duplicate=False):
            found.setdefault(id(parameter), []).append(plain_name(name))
    return found


def _module_types(run: Run) -> dict[str, str]:
    return {
        plain_name(".".join(part for part in (prefix, path) if part)): type(module).__name__
        for prefix, root in run.host.modules()
        for path, module in root.named_modules()
    }


def _members(run: Run) -> dict[int, list[dict[str, int | None]]]:
    """Where each parameter is in the optimizers: as `Optimizer.state_dict` numbers them."""
    found: dict[int, list[dict[str, int | None]]] = {}
    # An optimizer may step a float32 copy of a parameter, or a part of one.
    model_parameter = getattr(run.host, "model_parameter", lambda parameter: parameter)
    for number, optimizer in enumerate(run.host.optimizers):
        index = 0
        for place, group in enumerate(optimizer.param_groups):
            offset: int | None = 0
            for position, parameter in enumerate(group["params"]):
                numel = _numel(parameter)
                found.setdefault(id(model_parameter(parameter)), []).append(
                    {
                        "optimizer": number,
                        "group": place,
                        "position": position,
                        "index": index,
                        "offset": None if numel is None else offset,
                    }
                )
                offset = None if offset is None or numel is None else offset + numel
                index += 1
    return found


# -- reading -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Match:
    """A parameter that a number or a name may mean."""

    entry: Mapping[str, Any]
    meaning: str
    """What the number counts, such as 'number 17 of optimizer 0 (AdamW)'."""
    element: tuple[int, ...] | None = None
    """The element that an offset falls on, in this rank's part."""


def ranks_with_map(run_dir: Path) -> list[int]:
    """Return the ranks whose name map is in a run directory.

    Raises:
        StoreError: if there is none.
    """
    try:
        names = [entry.name for entry in run_dir.iterdir()]
    except FileNotFoundError:
        raise StoreError(f"{run_dir} does not exist; give the directory that run_dir= named") from None
    except OSError as error:
        raise StoreError(f"cannot read {run_dir}: {error.strerror}") from error
    ranks = sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))
    if not ranks:
        raise StoreError(f"{run_dir} holds no params-rank<N>.json: it is no run directory, or an older run's")
    return ranks


def read_map(run_dir: Path, rank: int) -> dict[str, Any]:
    """Read one rank's name map.

    Raises:
        StoreError: if it is missing, foreign, damaged or too new.
    """
    path = run_dir / f"params-rank{rank}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is truncated or not JSON: {error}") from error
    check_schema(data, path)
    if not _is_map(data):
        raise StoreError(f"{path} is no map of parameters")
    return dict(data)


_KEYS = (("index", int), ("name", str), ("aliases", list), ("dtype", str), ("trainable", bool))
_OPTIONAL = (
    *(("module", str), ("module_type", str), ("shape", list), ("local_shape", list)),
    *(("numel", int), ("trainable_index", int), ("offset", int)),
)


def _is_map(data: Mapping[str, Any]) -> bool:
    """Check what the readers below rely on; the file may have been written by anybody."""
    entries = data.get("parameters")
    return (
        isinstance(data.get("optimizers"), list)
        and isinstance(entries, list)
        and all(map(_is_entry, entries))
    )


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), kind) for name, kind in _KEYS):
        return False
    if not all(name in entry and isinstance(entry[name], kind | None) for name, kind in _OPTIONAL):
        return False
    sizes = [*(entry["shape"] or ()), *(entry["local_shape"] or ())]
    members = entry.get("optimizers")
    is_shaped = all(type(size) is int for size in sizes)
    return is_shaped and isinstance(members, list) and all(map(_is_member, members))


def _is_member(member: Any) -> bool:
    names = ("optimizer", "group", "position", "index")
    return (
        isinstance(member, dict)
        and all(type(member.get(name)) is int for name in names)
        and isinstance(member.get("offset"), int | None)
    )


def by_index(data: Mapping[str, Any], index: int) -> list[Match]:
    """Return what a flat index may mean: the numbering of all, of each optimizer, of the trainable ones."""
    found: list[tuple[Mapping[str, Any], str]] = []
    for entry in data["parameters"]:
        if entry["index"] == index:
            found.append((entry, "of all parameters"))
        found += [
            (entry, f"of {_optimizer(data, member['optimizer'])}, as its state_dict() counts")
            for member in entry["optimizers"]
            if member["index"] == index
        ]
        if entry["trainable_index"] == index:
            found.append((entry, "of the trainable ones, as DDP's messages count"))
    return [Match(entry, f"number {index} {'; '.join(how)}") for entry, how in _together(found)]


def by_offset(data: Mapping[str, Any], offset: int) -> list[Match]:
    """Return which element an offset into a flat buffer may mean: of all parameters, or of one group's."""
    found: list[tuple[Mapping[str, Any], str, int]] = []
    for entry in data["parameters"]:
        starts = [(entry["offset"], "all parameters one behind the other")]
        starts += [
            (member["offset"], f"group {member['group']} of {_optimizer(data, member['optimizer'])}")
            for member in entry["optimizers"]
        ]
        for start, buffer in starts:
            if start is not None and 0 <= offset - start < (entry["numel"] or 0):
                found.append((entry, buffer, offset - start))
    grouped: dict[tuple[int, int], list[str]] = {}
    for entry, buffer, place in found:
        grouped.setdefault((entry["index"], place), []).append(buffer)
    entries = {entry["index"]: entry for entry in data["parameters"]}
    return [
        Match(entries[index], f"offset {offset} in {'; '.join(how)}", _unravel(place, entries[index]))
        for (index, place), how in grouped.items()
    ]


def by_name(data: Mapping[str, Any], pattern: str) -> list[Match]:
    """Return the parameters one of whose names matches: with wildcards as a file name, else as a part."""
    wild = any(character in pattern for character in "*?[")

    def fits(name: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern) if wild else pattern in name

    return [
        Match(entry, "by name")
        for entry in data["parameters"]
        if any(fits(name) for name in (entry["name"], *map(str, entry["aliases"])))
    ]


def _together(
    found: Sequence[tuple[Mapping[str, Any], str]],
) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
    grouped: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
    for entry, how in found:
        grouped.setdefault(id(entry), (entry, []))[1].append(how)
    yield from grouped.values()


def _optimizer(data: Mapping[str, Any], number: int) -> str:
    names = data["optimizers"]
    name = f" ({names[number]})" if 0 <= number < len(names) else ""
    return f"optimizer {number}{name}"


def _unravel(place: int, entry: Mapping[str, Any]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(entry["local_shape"] or entry["shape"] or ()):
        place, position = divmod(place, max(size, 1))
        index.append(position)
    return tuple(reversed(index))


def total_numel(data: Mapping[str, Any]) -> int | None:
    """Return the number of elements of this rank's parameters; None if some have no shape yet."""
    numbers = [entry["numel"] for entry in data["parameters"]]
    return None if any(n is None for n in numbers) else sum(numbers)
