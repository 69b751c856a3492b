"""Writes the page reference.md: every public class with its arguments, made from their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

PAGE = "reference.md"
HEAD = """# Reference

Made from the docstrings when the site is built: what each class is, each argument with its type and default.
What a callback costs, when it fires and what it asks for is told in [callbacks.md](callbacks.md).
"""


def field_docs(kind: type) -> dict[str, tuple[str, str]]:
    """Return annotation and docstring of each field, the nearest class in the hierarchy first."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
            for statement, following in zip(body, [*body[1:], None], strict=True):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    told = ""
                    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                        told = inspect.cleandoc(str(following.value.value))
                    found[statement.target.id] = (ast.unparse(statement.annotation), told)
    return found


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return a default as one would write it."""
    if field.default is not dataclasses.MISSING:
        label = getattr(field.default, "label", None)
        return repr(label if label is not None else field.default)
    return "required" if field.default_factory is dataclasses.MISSING else "made anew"


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def section(kind: type) -> str:
    """Return the section of one class."""
    lines = [f"### `{kind.__name__}`", "", inspect.cleandoc(kind.__doc__ or ""), ""]
    if dataclasses.is_dataclass(kind):
        docs = field_docs(kind)
        fields = [f for f in dataclasses.fields(kind) if f.init and not f.name.startswith("_")]
        if fields:
            lines += ["| argument | type | default | meaning |", "|---|---|---|---|"]
        for field in fields:
            annotation, told = docs[field.name]
            lines.append(
                f"| `{field.name}` | `{cell(annotation)}` | `{cell(default_of(field))}` | {cell(told)} |"
            )
        lines.append("")
    lines += [f"*{kind.__module__}*", ""]
    return "\n".join(lines)


def text() -> str:
    """Return the whole page."""
    import gradsentinel  # noqa: PLC0415 - imports torch
    from gradsentinel import callbacks, events  # noqa: PLC0415 - likewise

    groups = {
        "Callbacks": [getattr(callbacks, name) for name in callbacks.__all__],
        "Events": list(events.METHODS),
        "For callbacks of your own": [
            getattr(gradsentinel, name)
            for name in ("Callback", "Detector", "Responder", "Finding", "Evidence", "Diagnosis", "Incident")
        ],
    }
    parts = [HEAD]
    for title, kinds in groups.items():
        parts += [f"## {title}\n", *(section(kind) for kind in kinds)]
    return "\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add the page to those that are built."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only where there is a site to build

    files.append(File.generated(config, PAGE, content=text()))
    return files
