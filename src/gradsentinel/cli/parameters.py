"""`gradsentinel params`: from a flat index, an offset or a part of a name to the parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsentinel.cli.application import app
from gradsentinel.cli.output import console, print_json
from gradsentinel.errors import StoreError
from gradsentinel.wording import printable

if TYPE_CHECKING:
    from gradsentinel.names import Match


_HELP = (
    "Turn a flat index or offset of a parameter into its name.\n\n"
    "Logs number parameters in several ways: all of them, those of one optimizer, those that "
    "are trained. What a number means in each of these ways is shown. Without an option all "
    "parameters are listed."
)


@app.command(help=_HELP)
def params(
    run_dir: Annotated[Path, typer.Argument(help="The directory that run_dir= named.", show_default=False)],
    *,
    index: Annotated[
        int | None, typer.Option(min=0, help="A number of a parameter, wherever it was found.")
    ] = None,
    offset: Annotated[
        int | None, typer.Option(min=0, help="A number of an element in a flat buffer of parameters.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="A part of a name, or a pattern such as '*.bias'.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Whose parameters.", show_default="the lowest there is")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Turn a flat index or offset of a parameter into its name."""
    from gradsentinel import names  # noqa: PLC0415 - imports torch
    from gradsentinel.ranks.topology import fold_ranks  # noqa: PLC0415 - imports torch

    ranks = names.ranks_with_map(run_dir)
    chosen = ranks[0] if rank is None else rank
    if chosen not in ranks:
        raise StoreError(f"{run_dir} has no parameters of rank {chosen}; it has those of {fold_ranks(ranks)}")
    data = names.read_map(run_dir, chosen)
    if sum(option is not None for option in (index, offset, name)) > 1:
        raise StoreError("give one of --index, --offset and --name")
    if index is not None:
        found = names.by_index(data, index)
    elif offset is not None:
        found = names.by_offset(data, offset)
    else:
        found = names.by_name(data, name or "")
    if not found:
        raise StoreError(f"{run_dir}, rank {chosen}: {_nothing(data, index, offset, name)}")
    if as_json:
        print_json([_as_dict(match) for match in found])
    elif index is not None or offset is not None:
        _tell(console(), found, data)
    else:
        console(endless=True).print(_table(found))


def _nothing(data: Mapping[str, Any], index: int | None, offset: int | None, name: str | None) -> str:
    from gradsentinel import names  # noqa: PLC0415 - imports torch

    count = len(data["parameters"])
    if index is not None:
        return f"no parameter has the number {index}; there are {count}, counted from 0"
    if offset is not None:
        total = names.total_numel(data)
        more = "some have no shape yet" if total is None else f"they have {total} elements, counted from 0"
        return f"no parameter is at offset {offset}; {more}"
    return f"no name matches {name!r}" if name else "it has no parameters"


def _as_dict(match: Match) -> dict[str, Any]:
    element = None if match.element is None else list(match.element)
    return {"meaning": match.meaning, "element": element, **match.entry}


def _tell(out: Console, found: Sequence[Match], data: Mapping[str, Any]) -> None:
    for number, match in enumerate(found):
        entry = match.entry
        where = "" if match.element is None else f"{list(match.element)}"
        out.print(Text(""), end="\n" if number else "")
        out.print(Text(printable(f"{entry['name']}{where}"), "bold"))
        for label, text in [("meant as", match.meaning), *_facts(entry, data)]:
            out.print(Text(f"  {label:<10}{printable(text)}"))


def _facts(entry: Mapping[str, Any], data: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("shape", f"{_shape(entry)}, {entry['dtype']}, {entry['numel']} elements here")]
    if entry.get("module") is not None:
        kind = f" ({entry['module_type']})" if entry.get("module_type") else ""
        facts.append(("module", f"{entry['module'] or 'the model itself'}{kind}"))
    if entry["aliases"]:
        facts.append(("also", ", ".join(map(str, entry["aliases"]))))
    facts.append(("number", f"{entry['index']} of all, offset {_known(entry['offset'])}"))
    facts.append(
        ("trained", f"number {entry['trainable_index']}" if entry["trainable"] else "no, it is frozen")
    )
    facts += [("optimizer", _member(member, data)) for member in entry["optimizers"]] or [
        ("optimizer", "none")
    ]
    return facts


def _member(member: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    known = data["optimizers"]
    name = f" ({known[member['optimizer']]})" if member["optimizer"] < len(known) else ""
    return (
        f"{member['optimizer']}{name}, group {member['group']}, number {member['index']} in it, "
        f"offset {_known(member['offset'])} in the group"
    )


def _table(found: Sequence[Match]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title, right in (
        *(("index", True), ("name", False), ("shape", False), ("dtype", False), ("offset", True)),
        *(("trained", True), ("optimizer", False), ("also", False)),
    ):
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for match in found:
        entry = match.entry
        places = [f"{m['optimizer']}, group {m['group']}, {m['index']}" for m in entry["optimizers"]]
        cells = [entry["index"], entry["name"], _shape(entry), entry["dtype"], _known(entry["offset"])]
        cells += [
            _known(entry["trainable_index"]),
            "; ".join(places) or "-",
            ", ".join(map(str, entry["aliases"])),
        ]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _shape(entry: Mapping[str, Any]) -> str:
    if entry["shape"] is None:
        return "not known yet"
    local = "" if entry["local_shape"] is None else f", here {entry['local_shape']}"
    return f"{entry['shape']}{local}"


def _known(value: Any) -> str:
    return "-" if value is None else str(value)
