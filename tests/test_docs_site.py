"""Every page of the documentation: its code runs, its commands exist, and the site has all of it."""

import ast
import gc
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import click
import pytest
import typer

from gradsentinel import callbacks, cli, events
from page_blocks import NOT_RUN, ROOT, Reader, blocks, namespace_of, run
from test_project import extras

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "distributed.md": "tests/test_readme.py: its lines are those of examples that run",
    "evidence.md": "tests/test_evidence_page.py; its first block below",
    "npu.zh-CN.md": "tests/test_npu_page.py: the same code as npu.md",
}
"""Pages whose code another test runs."""
CODE = {"python", "py", "console"}
COMMANDS = {"sh", "bash"}
WITH_CODE = [
    page
    for page in PAGES
    if page.name not in ELSEWHERE
    and any(block.language in CODE and not block.not_run for block in blocks(page))
]


@pytest.fixture
def slack(monkeypatch):
    """A server in place of Slack's, and what it was sent."""
    sent = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            sent.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("SLACK_WEBHOOK", f"http://127.0.0.1:{server.server_port}/")
    yield sent
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of frameworks
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # recipes.md loads a checkpoint alone
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by torch itself, up to 2.6
@pytest.mark.filterwarnings("ignore:unclosed file")  # seeing.md makes a sink without a run
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch, capsys, slack):
    monkeypatch.chdir(tmp_path)
    reader = Reader(page, lambda: capsys.readouterr().out)
    reader.follow()
    reader.names.clear()
    gc.collect()  # what a page made and did not use goes here, and not in another test
    if page.name == "recipes.md":
        assert len(slack) == 1
        assert b"nonfinite_input" in slack[0]


def test_the_first_block_of_the_page_on_evidence_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "evidence.md"
    names = namespace_of(page)
    run(page, blocks(page)[0], names)
    names["sentinel"].close()


def named_by(tree: ast.AST) -> dict[str, Any]:
    """What the imports of ours in a piece of code name; fails if something is not there."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.partition(".")[0] == "gradsentinel":
                    importlib.import_module(one.name)
                    found[one.asname or "gradsentinel"] = importlib.import_module("gradsentinel")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gradsentinel":
            module = importlib.import_module(str(node.module))
            for one in node.names:
                if not hasattr(module, one.name):  # a module of the package
                    importlib.import_module(f"{node.module}.{one.name}")
                found[one.asname or one.name] = getattr(module, one.name)
    return found


def check_calls(code: str) -> int:
    """Fail if code calls something of ours with arguments that it does not take; return how many calls."""
    tree = ast.parse(code)
    ours, checked = named_by(tree), 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(isinstance(one, ast.Starred) for one in node.args):
            continue
        called, path = node.func, []
        while isinstance(called, ast.Attribute):
            path.insert(0, called.attr)
            called = called.value
        if not isinstance(called, ast.Name) or called.id not in ours:
            continue
        target = ours[called.id]
        for name in path:
            target = getattr(target, name)
        keywords = {one.arg: None for one in node.keywords if one.arg is not None}
        inspect.signature(target).bind_partial(*node.args, **keywords)
        checked += 1
    return checked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_code_of_a_page_names_of_ours_takes_those_arguments(page):
    """Also in blocks that cannot run here, for want of a card or of the framework's own script."""
    for block in blocks(page):
        if block.language in {"python", "py"}:
            check_calls(block.code)


def test_a_call_with_a_wrong_argument_is_noticed():
    assert check_calls("from gradsentinel import Retry, standard\nRetry(attempts=3)\nstandard('x')") == 2
    megatron = "from gradsentinel.integrations import megatron\nmegatron.attach(a, b, callback=[])"
    for code in ("from gradsentinel import Retry\nRetry(attempt=3)", megatron):
        with pytest.raises(TypeError):
            check_calls(code)
    with pytest.raises(ImportError):
        check_calls("from gradsentinel import Nothing")


def test_few_blocks_are_not_run_and_each_says_why():
    reasons = {f"{page.name}:{block.line}": block.not_run for page in PAGES for block in blocks(page)}
    reasons = {where: reason for where, reason in reasons.items() if reason}
    assert len(reasons) <= 6, reasons
    marks = sum(page.read_text(encoding="utf-8").count("Not run by the tests: ") for page in PAGES)
    assert marks == len(reasons) + 1  # contributing.md explains the mark
    assert NOT_RUN.search("*Not run by the tests: no card.*\n\n")[1] == "no card."


def test_every_block_has_a_language():
    bare = [
        f"{page.name}:{block.line}"
        for page in PAGES
        for block in blocks(page)
        if block.language not in CODE | COMMANDS | {"text", "json", "yaml", "toml"}
    ]
    assert bare == []


def options_of(words: list[str]) -> set[str]:
    """The options of the subcommand that a command line names; its words are taken off."""
    command: click.Command = typer.main.get_command(cli.app)
    while isinstance(getattr(command, "commands", None), dict) and words:
        assert words[0] in command.commands, f"gradsentinel has no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    return {name for one in command.params for name in one.opts}


def check_command(command: str) -> None:
    """Fail if a command names something that is not there."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    program, *rest = words
    scripts = [ROOT / word for word in rest if word.endswith(".py")]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)
    elif program == "pip":
        asked = re.findall(r"\[([^\]]+)\]", command)
        assert {name for one in asked for name in one.split(",")} <= extras().keys()
    elif program == "gradsentinel":
        known = options_of(rest)
        given = {word.partition("=")[0] for word in rest if re.fullmatch(r"--?[a-z].*", word)}
        assert given <= known, f"{given - known} is no option"
    else:
        assert program in {"python", "torchrun", "tensorboard", "git", "cd", "pytest", "export"}, program
        assert all(script.is_file() for script in scripts), scripts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_on_a_page_exist(page):
    for block in blocks(page):
        if block.language in COMMANDS and not block.not_run:
            for line in block.code.replace("\\\n", " ").splitlines():
                for command in re.split(r"&&|\|", line):
                    if command.strip() and not command.strip().startswith("#"):
                        check_command(re.sub(r"<[^>]*>", "x", command))


def test_what_does_not_exist_is_noticed():
    for command in ("make nothing", "pip install '.[nothing]'", "gradsentinel nothing", "python nothing.py"):
        with pytest.raises(AssertionError):
            check_command(command)
    with pytest.raises(AssertionError):
        check_command("gradsentinel show runs/x --nothing")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it."""
    pytest.importorskip("material", reason="the site is built with Python 3.11 or newer")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_in_the_site_and_asks_nobody_else_for_anything(site):
    assert {f"{page.stem}.html" for page in DOCS.glob("*.md")} <= {path.name for path in site.glob("*.html")}
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        tags = re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*>", text)
        loaded = [tag for tag in tags if re.search(r"(?:src|href)=\"?(?:https?:)?//", tag)]
        assert loaded == [], page


@pytest.mark.slow
def test_the_reference_has_every_callback_and_event_with_its_arguments(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    for name in [*callbacks.__all__, *(event.__name__ for event in events.METHODS)]:
        assert f"<code>{name}</code>" in text
    assert "<code>state_warmup</code>" in text
