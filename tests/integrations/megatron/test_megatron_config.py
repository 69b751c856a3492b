"""What the launcher is told by a file: the same as on the line, which wins over it, and nothing unclear."""

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import get_type_hints

import pytest

from gradsentinel import MagnitudeCallback, NanCallback, Retry, Rollback, callbacks
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron.config import KEYS
from gradsentinel.integrations.megatron.launch import Launch, main
from gradsentinel.integrations.megatron.options import MODULES, USAGE, Options, parse
from gradsentinel.integrations.megatron.values import fitted

needs_toml = pytest.mark.skipif(
    importlib.util.find_spec("tomllib") is None and importlib.util.find_spec("tomli") is None,
    reason="this Python reads no TOML",
)
TOML = """\
run_dir = "runs/gpt"
timeout = 90
diagnosis_budget = 0
keep_nan_checks = true
module = ["mine.loop", "mine.other"]

[callbacks.NanCallback]
[[callbacks.MagnitudeCallback]]
max_global_norm = 100
[[callbacks.MagnitudeCallback]]
max_value = 10.5
action = "skip"
[callbacks.Retry]
attempts = 1
[callbacks.BatchCallback]
allow_nonfinite = ["weights"]
ranges = { tokens = [0, 50256] }
[callbacks.Rollback]
every = 200
"""


def write(folder, text, name="gs.json"):
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return str(path)


def read(folder, said, *words, name="gs.json"):
    return parse(["--gs-config", write(folder, said, name), *words, "pretrain.py", "--lr", "1"])


def made(options):
    return [wanted.make() for wanted in options.callbacks]


@needs_toml
def test_a_file_says_all_that_the_line_can(tmp_path):
    options = read(tmp_path, TOML, name="gs.toml")
    assert (options.script, options.arguments) == ("pretrain.py", ("--lr", "1"))
    assert (options.run_dir, options.timeout, options.diagnosis_budget) == ("runs/gpt", 90, 0)
    assert options.keep_nan_checks is True
    assert options.modules == (*MODULES, "mine.loop", "mine.other")
    found = made(options)
    assert [type(one).__name__ for one in found] == [
        *("NanCallback", "MagnitudeCallback", "MagnitudeCallback"),
        *("Retry", "BatchCallback", "Rollback"),
    ]
    assert (found[1].max_global_norm, found[2].max_value, found[2].action.label) == (100, 10.5, "skip")
    assert found[3].attempts == 1
    assert found[4].ranges == {"tokens": (0, 50256)}
    assert found[5].every == 200


@needs_toml
def test_json_says_the_same(tmp_path):
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    in_json = read(tmp_path, toml.loads(TOML))
    in_toml = read(tmp_path, TOML, name="gs.toml")
    assert repr(made(in_json)) == repr(made(in_toml))
    for name in ("run_dir", "timeout", "diagnosis_budget", "keep_nan_checks", "modules"):
        assert getattr(in_json, name) == getattr(in_toml, name)


def test_a_file_that_says_nothing_changes_nothing(tmp_path):
    assert read(tmp_path, {}) == Options(script="pretrain.py", arguments=("--lr", "1"))


def test_the_line_wins_over_the_file(tmp_path):
    said = {
        "run_dir": "a",
        "callbacks": {"Retry": {}, "Rollback": {"every": 3}},
        "timeout": 5,
        "diagnosis_budget": 6,
        "keep_nan_checks": True,
        "module": "mine.loop",
    }
    line = ["--gs-run-dir", "b", "--gs-callbacks", "NanCallback", "--gs-timeout", "7"]
    line += ["--gs-diagnosis-budget=8", "--gs-no-keep-nan-checks", "--gs-module", "mine.other"]
    options = read(tmp_path, said, *line)
    assert (options.run_dir, options.timeout, options.diagnosis_budget) == ("b", 7, 8)
    assert options.keep_nan_checks is False
    assert [type(one) for one in made(options)] == [NanCallback]  # all of the list, not some of each
    assert options.modules == (*MODULES, "mine.loop", "mine.other")  # further ones, wherever they are named
    before = parse([*line, "pretrain.py", "--gs-config", write(tmp_path, said)])
    assert before.run_dir == "b"  # wherever the file stands on the line


def test_callbacks_may_be_a_text_as_on_the_line(tmp_path):
    nan, retry = made(read(tmp_path, {"callbacks": "NanCallback,\n Retry(attempts=1),  # once\n"}))
    assert isinstance(nan, NanCallback)
    assert isinstance(retry, Retry)
    assert retry.attempts == 1


def test_null_is_none_where_a_field_may_be(tmp_path):
    [compared] = made(read(tmp_path, {"callbacks": {"CrossRankCallback": {"outlier": None}}}))
    assert compared.outlier is None


WRONG = [
    ({"run-dir": "a"}, "there is no key 'run-dir'; did you mean run_dir?"),
    ({"callback": {}}, "there is no key 'callback'; did you mean callbacks?"),
    ({"xyz": 1}, "there is no key 'xyz'; there are run_dir, callbacks, timeout"),
    ({"run_dir": 5}, "run_dir=5 must be text"),
    ({"run_dir": ""}, "run_dir is empty"),
    ({"run_dir": None}, "run_dir=None must be text"),
    ({"timeout": "90"}, "timeout='90' must be a number"),
    ({"timeout": 0}, "timeout=0 must be above 0 seconds"),
    ({"timeout": True}, "timeout=True must be a number"),
    ({"diagnosis_budget": -1}, "diagnosis_budget=-1 must be 0 seconds or more"),
    ({"keep_nan_checks": "no"}, "keep_nan_checks='no' must be true or false"),
    ({"keep_nan_checks": 1}, "keep_nan_checks=1 must be true or false"),
    ({"module": ["a", 3]}, "must be text or a list, each entry text"),
    ({"module": []}, "module is empty"),
    ({"callbacks": ["NanCallback"]}, "callbacks must be a table with one entry for each callback, or a text"),
    ({"callbacks": "Nan("}, "is no list of callbacks"),
    ({"callbacks": {"Retri": {}}}, "callbacks: no callback is 'Retri'; did you mean Retry?"),
    ({"callbacks": {"rollback": {}}}, "no callback is 'rollback'; did you mean Rollback?"),
    ({"callbacks": {"nan": {}}}, "no callback is 'nan'; did you mean NanCallback?"),
    ({"callbacks": {"Qqqq": {}}}, "no callback is 'Qqqq'; there are BatchCallback, CrossRankCallback"),
    ({"callbacks": {"Retry": {"attempt": 1}}}, "Retry has no field 'attempt'; did you mean attempts?"),
    ({"callbacks": {"Retry": {"zzz": 1}}}, "Retry has no field 'zzz'; there are max_retries, window"),
    ({"callbacks": {"Retry": {"_budget": 1}}}, "Retry has no field '_budget'"),
    ({"callbacks": {"Retry": 3}}, "callbacks.Retry is 3 and must be a table of fields"),
    ({"callbacks": {"Retry": ["attempts"]}}, "callbacks.Retry is 'attempts' and must be a table"),
    ({"callbacks": {"Retry": {"attempts": 0}}}, "attempts at least 1"),
    ({"callbacks": {"Retry": {"attempts": "2"}}}, "Retry: attempts='2' must be a whole number"),
    ({"callbacks": {"Retry": {"attempts": 2.0}}}, "Retry: attempts=2.0 must be a whole number"),
    ({"callbacks": {"Retry": {"overflows": 1}}}, "Retry: overflows=1 must be true or false"),
    ({"callbacks": {"MagnitudeCallback": {}}}, "MagnitudeCallback needs at least one bound"),
    ({"callbacks": {"MagnitudeCallback": {"max_value": [1]}}}, "max_value=[1] must be a number"),
    ({"callbacks": {"MagnitudeCallback": {"max_value": 1, "action": "halt"}}}, "halt"),
    (
        {"callbacks": {"BatchCallback": {"ranges": {"x": [1]}}}},
        "must be a table, each entry a list of a whole",
    ),
    ({"callbacks": {"BatchCallback": {"allow_nonfinite": "x"}}}, "must be a list, each entry text"),
    ({"callbacks": {"SafeMode": {"switches": {}}}}, "SafeMode"),
    ({"callbacks": {"Escalation": {"alarm": "x"}}}, "alarm='x' cannot be written down; a script that calls"),
    ('{"run_dir": "a", "run_dir": "b"}', "'run_dir' is there twice"),
    ('{"callbacks": {"Retry": {}, "Retry": {}}}', "'Retry' is there twice"),
    ("[]", "at the top there must be an object"),
    ("{", "cannot be read: Expecting property name"),
    ("[" * 100_000, "cannot be read"),
]


@pytest.mark.parametrize(("said", "says"), WRONG)
def test_what_is_wrong_is_said_with_its_place_before_anything_is_run(tmp_path, capsys, said, says):
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('was run')")
    path = write(tmp_path, said)
    with pytest.raises(SystemExit) as ended:
        main(["--gs-config", path, str(script)])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"error: {path}" in told
    assert says in told


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("gs.yaml", b"", "gs.yaml: a name that ends with .toml or .json says what it is"),
        ("gs", b"", "a name that ends with .toml or .json"),
        ("gs.json", b"\xff\xfe", "cannot be read: 'utf-8' codec can't decode"),
        pytest.param("gs.toml", b"a = [", "cannot be read", marks=needs_toml),
        pytest.param("gs.toml", b"timeout = 1\ntimeout = 2", "cannot be read", marks=needs_toml),
        pytest.param("gs.toml", b"run_dir = 2026-01-01", "must be text", marks=needs_toml),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, name, text, says):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        parse(["--gs-config", str(tmp_path / name), "a.py"])


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name in ("folder.json", "nowhere.json"):
        with pytest.raises(ConfigurationError, match=rf"{name} cannot be read: "):
            parse(["--gs-config", str(tmp_path / name), "a.py"])
    with pytest.raises(ConfigurationError, match="--gs-config needs a value"):
        parse(["a.py", "--gs-config"])


@needs_toml
def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_it(tmp_path):
    """Editors on Windows write one."""
    (tmp_path / "gs.toml").write_bytes(b"\xef\xbb\xbfrun_dir = 'a'\n")
    assert parse(["--gs-config", str(tmp_path / "gs.toml"), "a.py"]).run_dir == "a"


def test_without_a_reader_of_toml_json_is_named(tmp_path, monkeypatch):
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails then
    with pytest.raises(ConfigurationError, match=r"Python 3\.11 or the package tomli .*; JSON"):
        read(tmp_path, "", name="gs.toml")
    assert read(tmp_path, {"run_dir": "a"}).run_dir == "a"


@needs_toml
def test_the_help_shows_a_file_that_works_and_names_every_key(tmp_path):
    shown = USAGE.partition("on every rank the same:\n")[2]
    options = read(tmp_path, shown, name="gs.toml")
    assert options.run_dir == "runs/gpt"
    assert [type(one) for one in made(options)] == [NanCallback, Retry]
    assert set(KEYS) == {"callbacks", *re.findall(r"\w+", " ".join(re.findall(r"run_dir =.*", shown)))} & set(
        KEYS
    )


@pytest.mark.parametrize("name", callbacks.__all__)
def test_each_fields_default_can_be_written_down(name):
    """So that no field has a type that is refused by mistake; functions and objects are no plain values."""
    kind = getattr(callbacks, name)
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.init and type(field.default) in (int, float, str, bool, type(None)):
            assert fitted(field.default, hints[field.name]) == field.default


@pytest.mark.parametrize(
    ("value", "hint", "taken"),
    [
        (1, float, 1),
        ([1, 2], tuple[int, int], (1, 2)),
        ([1, 2, 3], tuple[int, ...], (1, 2, 3)),
        (["a"], str | Sequence[str], ("a",)),
        ("a", str | Sequence[str], "a"),
        ({"a": [1, None]}, Mapping[str, Sequence[int | None]], {"a": (1, None)}),
        (None, Callable[[], int] | None, None),
        ([], Collection[str], ()),
    ],
)
def test_a_value_is_taken_as_its_field_wants_it(value, hint, taken):
    assert fitted(value, hint) == taken


@pytest.mark.parametrize(
    ("value", "hint", "says"),
    [
        (True, int, "a whole number"),
        (True, float, "a number"),
        (1, bool, "true or false"),
        ("a", Sequence[str], "a list, each entry text"),
        ([1, 2, 3], tuple[int, int], "a list of a whole number, a whole number"),
        ({"a": "b"}, Mapping[str, int], "a table, each entry a whole number"),
        ({1: 1}, Mapping[str, int], "a table"),
        ([["a"]], Sequence[str], "a list, each entry text"),
        ("a", Callable[[], int] | None, "cannot be written down"),
        ("a", int | None, "a whole number"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_words(value, hint, says):
    with pytest.raises(ValueError, match=says):
        fitted(value, hint)


def test_the_launcher_takes_its_callbacks_from_the_file(tmp_path):
    script = tmp_path / "empty.py"
    script.write_text("")
    said = {"callbacks": {"MagnitudeCallback": {"max_value": 2}, "Rollback": {"every": 5}}}
    launch = Launch(parse(["--gs-config", write(tmp_path, said), str(script)]))
    bound, rollback = launch._callbacks
    assert isinstance(bound, MagnitudeCallback)
    assert isinstance(rollback, Rollback)
    assert (bound.max_value, rollback.every) == (2, 5)
