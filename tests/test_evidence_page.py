"""docs/evidence.md: its example runs, and its commands print what the page says."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsentinel import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "evidence.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXIT_CODES = re.compile(r"^\| exit code of `(\w+)` \|", re.MULTILINE)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The directory in which the example has been run, and the page's commands with what they print."""
    folder = tmp_path_factory.mktemp("evidence")
    blocks = [(match[1], match[2]) for match in FENCE.finditer(PAGE.read_text(encoding="utf-8"))]
    for language, code in blocks:
        name = re.match(r"# (\w+\.py)\n", code)
        if language == "python" and name is not None:
            (folder / name[1]).write_text(code)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    commands = []
    for language, code in blocks:
        for line in code.splitlines() if language == "console" else ():
            if line.startswith("$ "):
                commands.append((shlex.split(line[2:]), []))
            else:
                commands[-1][1].append(line)
    return folder, blocks, commands


@pytest.mark.slow
def test_the_commands_print_what_the_page_says(followed, monkeypatch, capsys):
    folder, _, commands = followed
    monkeypatch.chdir(folder)
    assert len(commands) >= 6
    for (program, *arguments), lines in commands:
        if program == "python":
            monkeypatch.setattr(sys, "argv", arguments)
            with pytest.raises(SystemExit) as end:
                runpy.run_path(arguments[0], run_name="__main__")
            code, printed = end.value.code, capsys.readouterr().out
        else:
            result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
            code, printed = result.exit_code, result.stdout
        assert code == 0, (arguments, printed)
        shown = [" ".join(line.split()) for line in printed.splitlines()]
        for line in lines:
            assert any(" ".join(line.split()) in text for text in shown), (line, printed)
    monkeypatch.delitem(sys.modules, "project")
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]


def test_the_example_leaves_the_files_that_the_page_lists(followed):
    folder, blocks, _ = followed
    tree = next(code for _, code in blocks if code.startswith("runs/evidence/"))
    listed = {line.split()[0].rstrip("/") for line in tree.splitlines()[3:]}
    (incident,) = (folder / "runs/evidence/incidents").iterdir()
    assert {entry.name for entry in incident.iterdir()} == listed
    assert f"incidents/{incident.name}/" in tree
    assert (folder / "runs/evidence/params-rank0.json").is_file()


def test_the_exit_codes_of_the_commands_are_on_the_page_and_in_their_help():
    text = PAGE.read_text(encoding="utf-8")
    assert EXIT_CODES.findall(text) == ["replay", "verify"]
    for command in ("replay", "verify"):
        assert (
            "Exit codes: 0 "
            in CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        )
