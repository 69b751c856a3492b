"""What a release holds: the wheel, the source archive, and one version for all of it."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gradsentinel

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gradsentinel"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive and the wheel, as `make dist` builds them."""
    pytest.importorskip("build", reason="releases are made with Python 3.11 or newer")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {name for name in names if name.startswith("gradsentinel/")}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert ours == {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    assert {"gradsentinel/py.typed", "gradsentinel/views/assets/index.js"} <= ours
    assert {name.split("/")[0] for name in names - ours} == {
        f"{wheel.name[: wheel.name.index('-py3')]}.dist-info"
    }


def test_its_metadata_names_version_commands_plugin_and_licence(built):
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = archive.read(f"{info}/METADATA").decode()
    points = archive.read(f"{info}/entry_points.txt").decode()
    assert f"\nVersion: {gradsentinel.__version__}\n" in metadata
    assert "gradsentinel = gradsentinel.cli:main" in points
    assert "gradsentinel = gradsentinel.tensorboard_plugin:GradSentinelPlugin" in points
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_source_archive_has_what_is_needed_to_build_and_test(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    needed = {"pyproject.toml", "constraints.txt", "Makefile", "mkdocs.yml", "README.md", "LICENSE"}
    assert (
        needed | {"CHANGELOG.md", "tests/conftest.py", "docs/index.md", "src/gradsentinel/py.typed"} <= names
    )
    assert not any("__pycache__" in name or ".build/" in name for name in names)


def test_both_pass_the_checks_of_the_index(built):
    pytest.importorskip("twine", reason="releases are made with Python 3.11 or newer")
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
