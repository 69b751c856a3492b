"""The READMEs and the pages under docs/: what they show runs, and what they list is what the code has."""

import dataclasses
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gradsentinel
from gradsentinel import Action, Callback, Kind, Sentinel, callbacks, events
from test_project import CORE_FOLDERS

ROOT = Path(__file__).resolve().parent.parent
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
GUIDE, GUIDE_CHINESE = ROOT / "docs" / "guide.md", ROOT / "docs" / "guide.zh-CN.md"
PAGES = [ENGLISH, CHINESE, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
PICTURE = ROOT / "docs" / "img" / "step.svg"
CALLBACKS = [getattr(callbacks, name) for name in callbacks.__all__]


class Block(NamedTuple):
    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(f[1], f[2], text[: f.start()].count("\n") + 2) for f in fences]


def run(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)  # noqa: S102 - our own page


@pytest.fixture
def in_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def public_fields(kind: type[Callback]) -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(kind) if f.init and not f.name.startswith("_")}


def written(default: Any) -> str:
    """A default as it stands in the tables."""
    if isinstance(default, Action):
        return f'"{default.label}"'
    if isinstance(default, int) and not isinstance(default, bool) and default == 1 << 30:
        return "2**30"
    return repr(default)


@pytest.mark.parametrize(
    "page",
    [ENGLISH, GUIDE],
    ids=lambda page: page.name,
)
def test_the_code_on_the_page_runs_and_prints_what_the_page_says(page, in_temporary_directory, capsys):
    namespace: dict[str, Any] = {"__name__": "page"}
    shown = blocks(page)
    assert any(block.language == "python" for block in shown)
    for block, following in zip(shown, [*shown[1:], None], strict=True):
        if block.language == "python":
            run(page, block, namespace)
            expected = following.code if following is not None and following.language == "text" else ""
            assert capsys.readouterr().out == expected, f"{page.name}:{block.line}"


def test_the_runs_of_the_guide_leave_the_files_it_lists(in_temporary_directory):
    shown = blocks(GUIDE)
    namespace: dict[str, Any] = {"__name__": "page"}
    run(GUIDE, next(block for block in shown if block.language == "python"), namespace)
    tree = next(block.code for block in shown if block.code.startswith("runs/plain/"))
    for name in ("events-rank0.jsonl", "incidents/000007-nonfinite_input", "incident.json"):
        assert name in tree
    incident = in_temporary_directory / "runs/plain/incidents/000007-nonfinite_input/incident.json"
    assert incident.is_file()
    assert (in_temporary_directory / "runs/plain/events-rank0.jsonl").is_file()


def test_the_callback_of_the_readme_reports_vanished_gradients(in_temporary_directory):
    namespace: dict[str, Any] = {"__name__": "page"}
    code = next(block for block in blocks(ENGLISH) if "class VanishingGradients" in block.code)
    run(ENGLISH, code, namespace)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Sentinel(model, optimizer, callbacks=[namespace["VanishingGradients"]()]) as sentinel:
        for scale in (1.0, 0.0, 1.0):
            sentinel.backward(model(torch.ones(4, 2)).mean() * scale)
            sentinel.step()
            assert sentinel.applied
    assert [(i.step, i.kind, i.action) for i in sentinel.incidents] == [(1, Kind.CUSTOM, Action.WARN)]


def test_what_the_page_on_many_ranks_shows_is_in_the_examples():
    scripts = [(ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("ddp.py", "fsdp2.py")]
    written = {line.strip() for script in scripts for line in script.splitlines()}
    shown = [block for block in blocks(ROOT / "docs" / "distributed.md") if block.language == "python"]
    assert shown
    for block in shown:
        for line in block.code.splitlines():
            assert line.strip() in written, f"distributed.md:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_scripts_that_commands_name_are_there(page):
    commands = [block.code for block in blocks(page) if block.language == "sh"]
    named = [name for command in commands for name in re.findall(r"\S+\.py\b", command)]
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("page", "translated"), [(ENGLISH, CHINESE), (GUIDE, GUIDE_CHINESE)], ids=["readme", "guide"]
)
def test_both_languages_show_the_same_code_and_the_same_output(page, translated):
    english, chinese = blocks(page), blocks(translated)
    assert [block.language for block in english] == [block.language for block in chinese]
    for number, (ours, theirs) in enumerate(zip(english, chinese, strict=True)):
        is_code = ours.language in {"python", "sh"}
        if is_code or english[number - 1].language == "python":
            assert without_prose(ours.code) == without_prose(theirs.code), f"{translated.name}:{theirs.line}"


def without_prose(code: str) -> str:
    """The code less what is translated: comments, docstrings and the placeholder for the address."""
    code = re.sub(r"<[^>]+>", "<>", code)
    return re.sub(r'  # .*|"""[^"]*"""', "", code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose)]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert missing == []


def rows(page: Path) -> list[list[str]]:
    lines = page.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=lambda page: page.name)
def test_the_readme_lists_every_callback_with_real_defaults(page):
    listed = {row[0].strip("`"): row[2] for row in rows(page) if row[0].strip("`") in callbacks.__all__}
    assert listed.keys() == set(callbacks.__all__)
    for kind in CALLBACKS:
        fields = public_fields(kind)
        arguments = re.findall(r"`(\w+)(?:=([^`]+))?`", listed[kind.__name__])
        assert arguments
        for name, default in arguments:
            assert name in fields, f"{kind.__name__} has no argument {name}"
            assert (default or "None") == written(fields[name]), f"{kind.__name__}.{name}"


@pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)
def test_the_callbacks_page_lists_every_argument_with_its_default(kind):
    text = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
    section = re.search(rf"^## `{kind.__name__}`$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section[1], re.MULTILINE))
    assert listed == {name: written(default) for name, default in public_fields(kind).items()}


def test_the_picture_shows_every_event():
    picture = ET.parse(PICTURE)  # noqa: S314 - our own file
    words = {"".join(text.itertext()).strip() for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    shown = {word for text in words for word in re.findall(r"\bon_[a-z_]+\b", text)}
    assert shown == set(events.METHODS.values())


def test_the_architecture_page_lists_every_event_and_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for event, method in events.METHODS.items():
        assert f"`{event.__name__}`" in text
        assert f"`{method}`" in text
    package = Path(gradsentinel.__file__).parent
    modules = {path.name for path in package.glob("*.py")}
    for folder in CORE_FOLDERS:
        modules |= {f"{folder}/{path.name}" for path in (package / folder).glob("*.py")}
    modules -= {"__main__.py", "_version.py"} | {name for name in modules if name.endswith("__init__.py")}
    assert {name for name in modules if f"`{name}`" not in text} == set()
