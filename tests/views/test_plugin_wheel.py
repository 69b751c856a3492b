"""What is installed: the front end is in the wheel, and the tab is announced to TensorBoard."""

import configparser
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "src" / "gradsentinel" / "views" / "assets"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    (path,) = builder.WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"]
    )
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_every_file_of_the_front_end_is_in_it(wheel):
    there = {
        name.removeprefix("gradsentinel/views/assets/")
        for name in wheel.namelist()
        if "/views/assets/" in name
    }
    assert there == {path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*") if path.is_file()}
    assert {"index.js", "style.css", "strings.en.json", "strings.zh.json"} <= there


def test_it_announces_the_tab(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(name).decode())
    assert dict(entries["tensorboard_plugins"]) == {
        "gradsentinel": "gradsentinel.tensorboard_plugin:GradSentinelPlugin"
    }


def test_it_holds_no_tests_and_no_built_files(wheel):
    assert [
        name for name in wheel.namelist() if "__pycache__" in name or name.startswith(("tests/", "docs/"))
    ] == []


def test_the_front_end_asks_no_other_site():
    for path in ASSETS.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")  # names of namespaces
        assert "http://" not in text, path.name
        assert "https://" not in text, path.name
