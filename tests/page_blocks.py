"""The code blocks of a page, and how they are run as a reader would: in order, in one directory."""

import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from gradsentinel import cli

ROOT = Path(__file__).resolve().parent.parent
BEFORE = Path(__file__).resolve().parent / "pages"
"""What a page takes for granted (a model, a loader, a Trainer), as a script of the page's name."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"\*Not run by the tests: ([^*]+)\*\s*\Z")
"""What stands before a block that cannot run, for the reader to see, with the reason."""
FILE = re.compile(r"# (\w+\.py)\n")
"""The first line of a block that is a file."""


NEAR = 6
"""A block of text at most so many lines below the code is what it prints."""


class Block(NamedTuple):
    language: str
    code: str
    line: int
    not_run: str
    """Why it is not run; empty if it is."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        reason = NOT_RUN.search(before)
        found.append(Block(fence[1], fence[2], before.count("\n") + 2, reason[1] if reason else ""))
    return found


def run(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)  # noqa: S102 - our own page


def namespace_of(page: Path) -> dict[str, Any]:
    """What the code of a page begins with."""
    names: dict[str, Any] = {"__name__": "page"}
    script = BEFORE / f"{page.stem.replace('-', '_').replace('.', '_')}.py"
    if script.is_file():
        names |= runpy.run_path(str(script))
    return names


def written(line: str) -> str:
    """A line as words: tables and wrapping are not compared."""
    return " ".join(line.split())


@dataclass
class Reader:
    """Follows a page: runs its Python, writes its files, types its commands."""

    page: Path
    printed: Callable[[], str]
    """Returns what was printed since it was called last."""
    names: dict[str, Any] = field(default_factory=dict)

    def follow(self) -> None:
        self.names = namespace_of(self.page)
        self.printed()
        shown = blocks(self.page)
        for block, following in zip(shown, [*shown[1:], None], strict=True):
            if block.not_run:
                continue
            if block.language in {"python", "py"}:
                self.code(block, following)
            elif block.language == "console":
                self.console(block)

    def code(self, block: Block, following: Block | None) -> None:
        file = FILE.match(block.code)
        if file is not None:
            Path(file[1]).write_text(block.code, encoding="utf-8")
            return
        run(self.page, block, self.names)
        if block.language == "python":
            told = following is not None and following.language == "text"
            near = told and following.line - block.line - block.code.count("\n") <= NEAR
            expected = following.code if near else ""
            printed = self.printed()
            assert printed == expected, f"{self.page.name}:{block.line}: {printed!r}"

    def console(self, block: Block) -> None:
        """Type each command, and find the lines below it in what it prints, in this order."""
        typed: list[tuple[str, list[str]]] = []
        for line in block.code.splitlines():
            if line.startswith("$ "):
                typed.append((line[2:], []))
            else:
                typed[-1][1].append(line)
        for command, lines in typed:
            rest = written(self.type(command))
            for line in lines:
                where = f"{self.page.name}:{block.line}: {command}"
                assert written(line) in rest, f"{where}\n{line!r} is not in\n{rest}"
                rest = rest.partition(written(line))[2]

    def type(self, command: str) -> str:
        program, *arguments = shlex.split(command)
        if program == "python":
            return self.script(arguments)
        assert program == "gradsentinel", f"{self.page.name}: who runs {program!r}?"
        result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert result.exit_code == 0, f"{command}: {result.output}"
        return result.output

    def script(self, arguments: list[str]) -> str:
        kept, modules, path = sys.argv, set(sys.modules), list(sys.path)
        sys.argv = arguments
        sys.path.insert(0, str(Path.cwd()))
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"{arguments[0]} ended with {end.code}") from end
        finally:
            sys.argv, sys.path = kept, path
            for name in set(sys.modules) - modules:
                home = getattr(sys.modules[name], "__file__", None)
                if home is not None and Path(home).is_relative_to(Path.cwd()):
                    del sys.modules[name]  # the page's own, not that of the next page
        return self.printed()
