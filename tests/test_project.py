"""The project's own rules: what may import what, how long a file may be, what the metadata says."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "gradsentinel"
SOURCE_FILES = sorted(PACKAGE.rglob("*.py"))

FRAMEWORKS = {"lightning", "pytorch_lightning", "transformers", "accelerate", "megatron", "torch_npu"}
OPTIONAL = {"tensorboard", "matplotlib", "numpy", "prometheus_client", "mlflow"}
OUTER = {
    *("callbacks", "presets", "integrations", "diagnosis", "risks", "faults", "demo", "cli"),
    *("sinks", "tensorboard_plugin", "views"),
}
CORE_FOLDERS = {"again", "data", "devices", "measures", "ranks", "state"}
NOT_CORE = OUTER | {"__init__", "__main__", "testing"}
MAX_LINES = 400


class Import(NamedTuple):
    """One import in a source file, wherever it stands."""

    module: str  # absolute; for `from a import b` both `a` and `a.b` are listed
    line: int
    in_function: bool
    in_try: bool
    for_types_only: bool

    @property
    def top(self) -> str:
        # torch.utils.tensorboard is tensorboard under another name
        return (
            "tensorboard" if self.module.startswith("torch.utils.tensorboard") else self.module.split(".")[0]
        )


def dotted(name: ast.expr) -> str:
    return ast.unparse(name)


def imported_modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = parents[: len(parents) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and dotted(node.func) in {
        "importlib.import_module",
        "import_module",
        "__import__",
    }:
        return [
            arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
    return []


def imports_in(source: str, package: str) -> Iterator[Import]:
    """Yield every import of `source`, a module of `package`, dynamic ones with a literal name included."""

    def walk(node: ast.AST, in_function: bool, in_try: bool, for_types_only: bool) -> Iterator[Import]:  # noqa: FBT001
        for module in imported_modules(node, package):
            yield Import(module, node.lineno, in_function, in_try, for_types_only)
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        in_try |= isinstance(node, ast.Try)
        for child in ast.iter_child_nodes(node):
            guarded = (
                isinstance(node, ast.If)
                and child in node.body
                and dotted(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
            )
            yield from walk(child, in_function, in_try, for_types_only or guarded)

    yield from walk(ast.parse(source), in_function=False, in_try=False, for_types_only=False)


def imports_of(path: Path) -> list[Import]:
    package = ".".join(path.parent.relative_to(SOURCE).parts)
    return list(imports_in(path.read_text(encoding="utf-8"), package))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def may_import_frameworks(path: Path) -> bool:
    # The campaign trains with the frameworks that it measures.
    outer = (PACKAGE / "integrations", PACKAGE / "campaign" / "workloads", PACKAGE / "devices" / "npu.py")
    return any(path.is_relative_to(place) for place in outer)


def is_core(path: Path) -> bool:
    inside = path.relative_to(PACKAGE)
    return (len(inside.parts) == 1 and path.stem not in NOT_CORE) or inside.parts[0] in CORE_FOLDERS


def is_outer(module: str) -> bool:
    return module.startswith("gradsentinel.") and module.split(".")[1] in OUTER


def test_the_walk_sees_every_form_of_import():
    source = (
        "import a.b\n"
        "from .c import d\n"
        "from .. import e\n"
        "from torch.utils import tensorboard\n"
        "if TYPE_CHECKING:\n    import f\nelse:\n    import g\n"
        "try:\n    import h\nexcept ImportError:\n    pass\n"
        "def lazy():\n    importlib.import_module('i')\n"
    )
    found = {found.module: found for found in imports_in(source, "gradsentinel.devices")}
    assert found.keys() == {
        *("a.b", "gradsentinel.devices.c", "gradsentinel.devices.c.d", "gradsentinel", "gradsentinel.e"),
        *("torch.utils", "torch.utils.tensorboard", "f", "g", "h", "i"),
    }
    assert [name for name, one in found.items() if one.for_types_only] == ["f"]
    assert [name for name, one in found.items() if one.in_try] == ["h"]
    assert [name for name, one in found.items() if one.in_function] == ["i"]
    assert found["torch.utils.tensorboard"].top == "tensorboard"


@pytest.mark.slow
def test_frameworks_are_imported_by_their_adapters_only_and_lazily():
    wrong = [
        f"{place(path, found.line)}: {found.module}"
        for path in SOURCE_FILES
        for found in imports_of(path)
        if found.top in FRAMEWORKS
        and not (may_import_frameworks(path) and (found.in_function or found.in_try or found.for_types_only))
    ]
    assert wrong == []


@pytest.mark.slow
def test_optional_packages_are_imported_lazily():
    wrong = [
        f"{place(path, found.line)}: {found.module}"
        for path in SOURCE_FILES
        for found in imports_of(path)
        if found.top in OPTIONAL and not (found.in_function or found.for_types_only)
    ]
    assert wrong == []


def test_importing_gradsentinel_imports_nothing_optional():
    code = "import gradsentinel, sys; print('\\n'.join(sys.modules))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    modules = set(fresh.stdout.split())
    assert "gradsentinel" in modules
    # numpy is missing here on purpose: torch imports it
    assert modules & (FRAMEWORKS | {"tensorboard", "matplotlib", "prometheus_client", "mlflow"}) == set()


def test_the_core_imports_nothing_built_on_it():
    wrong = [
        f"{place(path, found.line)}: {found.module}"
        for path in SOURCE_FILES
        if is_core(path)
        for found in imports_of(path)
        if is_outer(found.module)
        and not (
            path.name == "assembly.py"
            and found.module.split(".")[1] in {"callbacks", "diagnosis"}
            and found.in_function
        )
    ]
    assert wrong == []


def test_every_source_file_can_be_read_in_a_sitting():
    lengths = {place(path, 1): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE_FILES}
    assert {where: lines for where, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_two_test_files_have_the_same_name():
    # pytest imports them by their name alone, and refuses the second one
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_nothing_names_a_path_of_one_machine():
    directories = "work|root"
    pattern = re.compile(rf"(?<![\w.~-])/(?:{directories})/")
    folders = [ROOT / name for name in ("src", "tests", "docs", "examples", "benchmarks", ".ci")]
    built = {"__pycache__", ".build"}
    files = [path for folder in folders for path in folder.rglob("*") if built.isdisjoint(path.parts)]
    files += [
        path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".txt"} or path.name == "Makefile"
    ]
    wrong = [
        place(path, number)
        for path in files
        if path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert wrong == []


def test_version_is_pep_440():
    source = (PACKAGE / "_version.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert version is not None
    assert str(Version(version[1])) == version[1]


def extras() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        name: [Requirement(line) for line in lines]
        for name, lines in project["optional-dependencies"].items()
    }


def test_extras_are_complete():
    assert extras().keys() >= {"tensorboard", "lightning", "huggingface", "megatron", "npu", "test", "dev"}


@pytest.mark.parametrize("extra", ["test", "dev"])
def test_tests_need_no_npu_package(extra):
    every = extras()
    reached, to_visit = set(), [extra]
    while to_visit:
        name = to_visit.pop()
        reached.add(name)
        to_visit += [
            inner for one in every[name] if one.name == "gradsentinel" for inner in one.extras - reached
        ]
    assert "npu" not in reached
    assert "torch-npu" not in {one.name.replace("_", "-").lower() for name in reached for one in every[name]}


def test_every_pinned_version_runs_on_the_oldest_python():
    """A pin that left Python 3.10 behind has a second line for it; else a set-up there finds no answer."""
    oldest = requires_python()
    here = {"python_version": oldest, "python_full_version": f"{oldest}.0"}
    pins = [Requirement(line) for line in pin_lines()]
    judged, left_behind = 0, []
    for pin in pins:
        if pin.marker is not None and not pin.marker.evaluate(here):
            continue
        try:
            about = importlib.metadata.metadata(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for other interpreters
        if pin.specifier.contains(about["Version"]) and about["Requires-Python"]:
            judged += 1
            if not SpecifierSet(about["Requires-Python"]).contains(f"{oldest}.0"):
                left_behind.append(f"{pin}: needs Python {about['Requires-Python']}")
    assert judged > len(pins) // 2
    assert not left_behind


def test_no_package_is_pinned_twice_for_one_interpreter():
    named = [Requirement(line) for line in pin_lines()]
    for version in ("3.10", "3.13"):
        env = {"python_version": version, "python_full_version": f"{version}.0"}
        names = [
            re.sub(r"[-_.]+", "-", pin.name).lower()
            for pin in named
            if pin.marker is None or pin.marker.evaluate(env)
        ]
        assert len(names) == len(set(names))


def pin_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def requires_python() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["requires-python"]).removeprefix(">=")


def headings(path: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#{1,6} .+$", prose, re.MULTILINE)


def test_both_readmes_have_the_same_headings():
    english, chinese = headings(ROOT / "README.md"), headings(ROOT / "README.zh-CN.md")
    assert english
    assert len(english) == len(chinese)
