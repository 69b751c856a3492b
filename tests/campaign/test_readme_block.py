"""The results in short in both READMEs: made from results.json, and from nothing else."""

import json
from pathlib import Path

import pytest

from gradsentinel.campaign.readme import BEGIN, CHINESE, END, ENGLISH, LANGUAGES, block, fill

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_readmes_say_what_the_results_say(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    between = text.partition(BEGIN)[2].partition(END)[0]
    assert between == f"\n{block(RESULTS, LANGUAGES[name])}\n"


@pytest.mark.parametrize("words", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_every_goal_that_was_missed_is_named(words):
    goals = [
        {"goal": "useful steps, at one fault in 9 steps", "wanted": "90 %", "measured": "89 %", "met": False},
        {"goal": "hangs", "wanted": "0", "measured": 3, "met": False},
        {"goal": "right rank", "wanted": "all", "measured": None, "met": None},
        {"goal": "right operator", "wanted": "95 %", "measured": "96 %", "met": True},
    ]
    said = block({**RESULTS, "goals": goals}, words)
    assert "89 %" in said
    assert "90 %" in said
    assert "96 %" not in said
    assert ("1 of 3 goals" in said) or ("3 项目标中达到 1 项" in said)


def test_runs_that_ended_in_nan_are_told_beside_the_median_of_the_others():
    loops = RESULTS["tables"]["loops"]
    ruined = {**loops["gradsentinel"], "ruined": 2}
    tables = {**RESULTS["tables"], "loops": {**loops, "gradsentinel": ruined}}
    assert "2 x NaN" in block({**RESULTS, "tables": tables}, ENGLISH).split("final loss")[1].split("|")[1]


def test_only_the_place_between_the_marks_is_written(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    (tmp_path / "README.zh-CN.md").write_text("no place for it\n", encoding="utf-8")
    assert fill(RESULTS, tmp_path) == [tmp_path / "README.md"]
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n`make campaign`")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text
    assert (tmp_path / "README.zh-CN.md").read_text(encoding="utf-8") == "no place for it\n"
    assert fill({"tables": {}}, tmp_path) == []
