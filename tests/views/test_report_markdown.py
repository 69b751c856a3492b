"""The report as text for a ticket: it says what happened, and nothing of the run acts as markup."""

import re

import pytest
from runs_on_disk import train, write_incident, write_steps
from typer.testing import CliRunner

from gradsentinel import cli
from gradsentinel.decision import Severity
from gradsentinel.errors import StoreError
from gradsentinel.evidence import Diagnosis
from gradsentinel.views.markdown import code, markdown, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the norm is 2.012e+34, above 100 (rank 3)", "the norm is 2.012e+34, above 100 (rank 3)"),
        ("position_embedding.weight_", "position_embedding.weight\\_"),
        ("<script>alert(1)</script>", "\\<script\\>alert(1)\\</script\\>"),
        ("![x](http://host/p.png)", "!\\[x\\](http://\u200bhost/p.png)"),
        ("a | b\nc", "a \\| b c"),
        ("- not a list", "\\- not a list"),
        ("1. not a list", "1\\. not a list"),
        ("1.5 is a number", "1.5 is a number"),
        ("# no title", "\\# no title"),
        ("@all, see #12 and www.example.com", "@\u200ball, see #\u200b12 and www\u200b.example.com"),
        ("`code` *bold* ~gone~ &amp; $x$", "\\`code\\` \\*bold\\* \\~gone\\~ \\&amp; \\$x\\$"),
        ("\x1b[31mred", "\\\\x1b\\[31mred"),
    ],
)
def test_text_is_shown_as_it_is(text, shown):
    assert plain(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a.b", "`a.b`"), ("a`b", "``a`b``"), ("`a``", "``` `a`` ```"), ("", "`  `"), ("<b>@all", "`<b>@all`")],
)
def test_code_is_shown_as_it_is(text, shown):
    assert code(text) == shown


def sections(text):
    """The text under each heading."""
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_real_run_in_english_and_chinese(run_dir):
    train(run_dir, steps=12, bad=[5])
    found = sections(markdown(run_dir))
    assert list(found)[:3] == ["GradSentinel: run", "Step 5: non-finite gradient", "What to do"]
    assert "| ended | 11 |" in found["GradSentinel: run"]
    assert "non-finite gradient in 1.weight" in found["Step 5: non-finite gradient"]
    assert "- **Where**: `1.weight`" in found["What to do"]
    assert f"`gradsentinel show {run_dir}/incidents/000005-nonfinite_gradient`" in found["Command lines"]
    assert "| warning | 5 | non-finite gradient |" in found["Incidents"]
    chinese = sections(markdown(run_dir, lang="zh"))
    assert len(chinese) == len(found)
    assert "第 5 步：梯度为 NaN/Inf" in chinese
    assert "已丢弃该步" in chinese["事故"]


def test_the_gravest_is_told_and_the_others_are_listed(run_dir):
    write_steps(run_dir, [2.0] * 9)
    for at in range(1, 4):
        write_incident(run_dir, at, severity=Severity.CRITICAL if at == 2 else Severity.WARNING)
    found = sections(markdown(run_dir))
    assert "Step 2: non-finite gradient" in found
    rows = [line for line in found["Incidents"].splitlines() if re.match(r"\| (warning|critical)", line)]
    assert [row.split(" | ")[1] for row in rows] == ["3", "2", "1"]


def test_one_incident_alone(run_dir):
    write_steps(run_dir, [2.0] * 9)
    for at in (1, 2):
        write_incident(run_dir, at)
    found = sections(markdown(run_dir, incident="000001-nonfinite_gradient"))
    assert "Step 1: non-finite gradient" in found
    assert "Incidents" not in found
    with pytest.raises(StoreError, match="no incident 'x'"):
        markdown(run_dir, incident="x")


def test_nothing_of_the_run_acts_as_markup(run_dir):
    bad = "<img src=x onerror=alert(1)> ![a](http://host/a.png) @all | `x` **y**"
    write_steps(run_dir, [2.0] * 3)
    told = Diagnosis(cause="math", confidence=0.9, module=bad, source=bad, evidence=(bad,), remedy=(bad,))
    write_incident(run_dir, 1, message=bad, tensors=(bad,), diagnosis=told)
    text = markdown(run_dir)
    outside_code = re.sub(r"(?<!\\)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert re.findall(r"(?<!\\)<img|(?<!\\)\[a|@all|(?<!\\)\*\*y", outside_code) == []
    rows = [line for line in text.splitlines() if line.startswith("| warning")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [8]


def test_a_run_without_incidents_says_so(run_dir):
    train(run_dir, steps=4)
    text = markdown(run_dir)
    assert text.rstrip().endswith("No incident: every step was made with sound gradients.")


def test_the_command_prints_it_or_writes_it(run_dir, tmp_path):
    train(run_dir, steps=8, bad=[3])
    arguments = ["report", str(run_dir), "--markdown", "--lang", "zh"]
    printed = CliRunner().invoke(cli.app, arguments)
    assert printed.exit_code == 0, printed.stderr
    assert printed.stdout == markdown(run_dir, lang="zh")
    output = tmp_path / "ticket.md"
    CliRunner().invoke(cli.app, [*arguments, "-o", str(output)])
    assert output.read_text(encoding="utf-8") == printed.stdout
