"""docs/npu.md and its Chinese version: the same facts, and those that the code has."""

import re
from pathlib import Path

import pytest

from gradsentinel.cann import RELEASES
from gradsentinel.checks import AUTOLOAD, SILENT_CHECK

ROOT = Path(__file__).resolve().parent.parent
ENGLISH, CHINESE = ROOT / "docs" / "npu.md", ROOT / "docs" / "npu.zh-CN.md"
PAGES = pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=lambda page: page.name)


def rows(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def headings(page):
    return re.findall(r"^#+", page.read_text(encoding="utf-8"), re.MULTILINE)


def blocks(page):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [(language, re.sub(r"  +# .*", "", code)) for language, code in found]


@PAGES
def test_the_table_of_versions_is_the_doctors(page):
    listed = [tuple(row) for row in rows(page) if len(row) == 3 and re.match(r"\d", row[0])]
    assert listed == [(one.torch, one.torch_npu, one.cann) for one in RELEASES]


@PAGES
def test_links_within_the_page_and_to_its_neighbours_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", text):
        there = (page.parent / target if target else page).read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.+)$", there, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert anchor in anchors, f"{target}#{anchor}"


def test_both_say_the_same():
    assert headings(ENGLISH) == headings(CHINESE)
    assert blocks(ENGLISH) == blocks(CHINESE)
    codes = [
        re.findall(r"`([A-Z_]{6,}(?:=[^`]+)?)`", page.read_text(encoding="utf-8"))
        for page in (ENGLISH, CHINESE)
    ]
    assert sorted(set(codes[0])) == sorted(set(codes[1]))
    assert {name.partition("=")[0] for name in codes[0]} >= {AUTOLOAD, SILENT_CHECK}


def test_no_page_claims_that_a_card_was_used():
    assert "No part of GradSentinel has run on an Ascend card so far" in ENGLISH.read_text(encoding="utf-8")
    assert "还没有在昇腾卡上运行过" in CHINESE.read_text(encoding="utf-8")
