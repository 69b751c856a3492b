"""The words of the pages: the same keys in both languages, each used, each value of the core named."""

import json
import re
from pathlib import Path
from string import Formatter

import pytest

from gradsentinel.decision import Action, Kind, Severity
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Outcome
from gradsentinel.views import strings
from gradsentinel.views.strings import Strings
from gradsentinel.views.words import word

ASSETS = Path(strings.__file__).parent / "assets"
TABLES = {lang: json.loads((ASSETS / f"strings.{lang}.json").read_text("utf-8")) for lang in ("en", "zh")}
MODULES = {path.name: path.read_text("utf-8") for path in sorted(ASSETS.glob("*.js"))}
PYTHON = {path.name: path.read_text("utf-8") for path in sorted(ASSETS.parent.glob("*.py"))}

GROUPS = {
    "kind": [str(kind) for kind in Kind],
    "severity": [severity.label for severity in Severity],
    "outcome": [str(outcome) for outcome in Outcome],
    "action": [action.label for action in Action],
    "cause": ["data", "precision", "math", "operator", "hardware", "optimizer", "desync", "setup", "unknown"],
    "phase": ["setup", "input", "forward", "loss", "backward", "reduce", "optimizer"],
    "state": ["running", "ended", "failed", "aborted", "empty", "unknown"],
    "snapshot": ["good", "probation", "damaged", "unknown", "gone"],
    "mark": ["rollback", "restart", "abort", "scaler_skip", "run_start", "run_end", "incident"],
    "node": ["operator", "module", "tensor", "parameter"],
    "seconds": ["detect", "diagnose", "recover"],
    "place": ["disk", "memory"],
    "tag": ["loss", "grad_norm", "learning_rate", "loss_scale"],
}
FREE = {"tag", "column", "budget", "detail"}
"""Groups with further words for values that runs may or may not hold."""


def placeholders(text):
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def used():
    """Keys that the modules name in so many letters; for a template the keys it can become."""
    found = set()
    for text in MODULES.values():
        for call, key in re.findall(r'\b(t|counted)\(\s*"([\w.]+)"', text):
            found |= {f"{key}.one", f"{key}.many"} if call == "counted" else {key}
        for call, ternary in re.findall(r"\b(t|press)\(([^()]*\?[^()]*)\)", text):
            found |= set(re.findall(r'"([a-z]+\.\w+)"', ternary)) if call else set()
        found |= set(re.findall(r'press\([^,]*, "([\w.]+)"', text))
        found |= {f"column.{name}" for name in re.findall(r'key: "(\w+)"', text)}
        for start, choices in re.findall(r"t\(`(\w+)\.\$\{([^}]*)\}`", text):
            literal = re.findall(r'"(\w+)"', choices)
            found |= {f"{start}.{name}" for name in literal}
    return found


def test_both_languages_have_the_same_keys_and_placeholders():
    assert TABLES["en"].keys() == TABLES["zh"].keys()
    wrong = [
        key for key in TABLES["en"] if placeholders(TABLES["en"][key]) != placeholders(TABLES["zh"][key])
    ]
    assert wrong == []
    assert [key for table in TABLES.values() for key, text in table.items() if not text.strip()] == []


def test_every_string_that_is_asked_for_exists():
    assert len(used()) > 100
    assert sorted(used() - TABLES["en"].keys()) == []


def test_every_string_is_asked_for_somewhere():
    groups = {*GROUPS, *FREE}
    texts = "\n".join([*MODULES.values(), *PYTHON.values()])
    spare = [
        key
        for key in TABLES["en"]
        if key.split(".")[0] not in groups
        and f'"{key}"' not in texts
        and f'"{key.rpartition(".")[0]}"' not in texts  # counted: one and many
        and f"`{key.split('.')[0]}.$" not in texts  # made of a value
    ]
    assert spare == []


@pytest.mark.parametrize("group", GROUPS)
def test_every_value_of_the_core_has_a_word(group):
    missing = [f"{group}.{value}" for value in GROUPS[group] if f"{group}.{value}" not in TABLES["en"]]
    assert missing == []


def test_columns_that_tables_name_have_words():
    named = set()
    for name, text in MODULES.items():
        for names in re.findall(r'table\(\[((?:"\w+",? ?)+)\]', text) + re.findall(
            r'columns = \[((?:"\w+",? ?)+)\]', text
        ):
            named |= {f"column.{one}" for one in re.findall(r'"(\w+)"', names)}
        assert name
    assert len(named) > 15
    assert sorted(named - TABLES["en"].keys()) == []


def test_modules_make_no_markup_and_ask_for_nothing_outside():
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|"
        r"https?://(?!www\.w3\.org/2000/svg)|XMLHttpRequest|WebSocket|sendBeacon|srcdoc|\.src\s*="
    )
    found = {name: forbidden.findall(text) for name, text in MODULES.items()}
    assert {name: what for name, what in found.items() if what} == {}
    assert [name for name, text in MODULES.items() if "fetch(" in text] == ["source.js"]


def test_an_unknown_language_is_refused_and_a_strange_value_is_shown():
    with pytest.raises(ConfigurationError, match="unknown language 'fr'"):
        Strings("fr")
    words = Strings("en")
    assert words.label("kind", "new_kind") == "new kind"
    assert words("step", step=3) == "Step 3"


@pytest.mark.parametrize("group", ["cause", "kind"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_sentences_and_labels_have_the_same_words(group, lang):
    labels = {
        key.partition(".")[2]: text for key, text in TABLES[lang].items() if key.startswith(f"{group}.")
    }
    assert labels
    assert {key: word(group, key, lang) for key in labels} == labels
