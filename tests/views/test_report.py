"""The report as a file: it asks for nothing outside, nothing inside can end its element, errors are clear."""

import base64
import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from runs_on_disk import append, start, step, train, write_incident, write_steps
from typer.testing import CliRunner

from gradsentinel import cli
from gradsentinel.decision import Severity
from gradsentinel.errors import ConfigurationError, StoreError
from gradsentinel.evidence import Diagnosis, Sample
from gradsentinel.incident import Outcome
from gradsentinel.ranks.topology import Rank
from gradsentinel.views import report as reporting
from gradsentinel.views.bundle_js import bundle
from gradsentinel.views.gather import gather, gravest
from gradsentinel.views.report import report
from gradsentinel.views.strings import asset

HOSTILE = "</script><script>alert(1)</script><!--\u2028<b>&"


class Elements(HTMLParser):
    """All elements of a page, with the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = []
        self.open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))
        self.open = True

    def handle_endtag(self, tag):
        self.open = False

    def handle_data(self, data):
        if self.open:
            self.found[-1][2].append(data)

    def of(self, tag):
        return [(attributes, "".join(texts)) for name, attributes, texts in self.found if name == tag]


def embedded(text):
    """What the pages read, by name."""
    found = {}
    for attributes, content in Elements(text).of("script"):
        if "data-name" in attributes:
            if attributes.get("data-encoding") == "gzip":
                content = gzip.decompress(base64.b64decode(content)).decode()  # noqa: PLW2901
            found[attributes["data-name"]] = json.loads(content)
    return found


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


@pytest.fixture
def hostile(run_dir):
    """A run in which everything that has a name has a bad one."""
    write_steps(run_dir, [2.0, 1.9, math.pi])
    write_incident(
        run_dir,
        1,
        tensors=(f"layer.{HOSTILE}",),
        message=HOSTILE,
        samples=(Sample(position=0, id=HOSTILE, field=HOSTILE),),
        diagnosis=Diagnosis(
            cause="math", confidence=0.9, module=HOSTILE, remedy=(HOSTILE,), evidence=(HOSTILE,)
        ),
    )
    return run_dir


def test_the_file_is_one_page_that_may_ask_nobody(run_dir):
    train(run_dir, steps=6, bad=[3])
    text = report(run_dir)
    page = Elements(text)
    assert {tag for tag, _, _ in page.found} == {
        *("html", "head", "meta", "title", "style", "body", "div", "noscript", "p", "script")
    }
    outside = {"src", "href", "srcset", "action", "data", "poster", "style", "background", "ping"}
    assert [attributes for _, attributes, _ in page.found if outside & attributes.keys()] == []
    assert re.findall(r"url\(|@import", page.of("style")[0][1]) == []


def test_the_policy_allows_this_script_and_style_and_nothing_else(run_dir):
    train(run_dir, steps=6, bad=[3])
    page = Elements(report(run_dir))
    policy = next(
        a["content"] for a, _ in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    (script,) = [content for attributes, content in page.of("script") if "type" not in attributes]
    (style,) = [content for _, content in page.of("style")]
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        for content in (script, style)
    ]
    assert rules == {
        "default-src": "'none'",
        "script-src": digests[0],
        "style-src": digests[1],
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_hostile_names_stay_inside_their_element(hostile):
    text = report(hostile)
    # The ends are those of the page itself: data, script; nothing of the run opened or closed one.
    assert text.count("<script") == text.count("</script>") == len(Elements(text).of("script"))
    assert "alert(1)</script>" not in text
    assert "\u2028" not in text
    data = embedded(text)
    told = data["incident.0"]["shared"]["incident"]
    assert told["message"] == HOSTILE
    assert told["samples"][0]["id"] == HOSTILE
    assert told["diagnosis"]["module"] == HOSTILE


def test_large_pieces_are_compressed_and_a_large_job_is_inside_once(run_dir):
    append(run_dir / "events-rank0.jsonl", start(world_size=2000), step(0), step(1), step(2))
    write_incident(run_dir, 1, ranks=[Rank(rank=1234, host="node154", device="npu:2")])
    write_incident(run_dir, 2, ranks=[Rank(rank=7, host="node00", device="npu:7")])
    text = report(run_dir)
    assert 'data-name="ranks" data-encoding="gzip"' in text
    data = embedded(text)
    assert [cell["rank"] for cell in data["ranks"]] == list(range(2000))
    assert [cell for cell in data["ranks"] if cell["hot"]] == []
    for name, hot in (("incident.0", 7), ("incident.1", 1234)):
        ranks = data[name]["en"]["ranks"]
        assert [cell["rank"] for cell in ranks["unlike"] if cell["hot"]] == [hot]
        assert ranks["present"] == [[0, 1999]]


def test_names_that_are_not_text_can_be_written(run_dir):
    write_steps(run_dir, [2.0, 1.9])
    incident = write_incident(run_dir, 1)
    (run_dir / "incidents" / incident.id / "sample-\udcff.json").write_text("{}")
    text = report(run_dir)
    assert text.encode("utf-8")
    names = [one["name"] for one in embedded(text)["incident.0"]["shared"]["files"]]
    assert len(names) == 2


def test_both_languages_are_inside_whichever_it_opens_in(run_dir):
    train(run_dir, steps=6, bad=[3])
    english, chinese = report(run_dir), report(run_dir, lang="zh")
    assert embedded(english) == embedded(chinese)
    assert '<html lang="en">' in english
    assert '<html lang="zh-CN">' in chinese
    assert 'gradsentinel.main("zh")' in chinese
    data = embedded(english)
    assert data["run.en"]["headline"] != data["run.zh"]["headline"]
    assert data["incident.0"]["en"]["story"] != data["incident.0"]["zh"]["story"]


def test_the_numbers_around_an_incident_are_all_there_in_a_long_run(run_dir):
    write_steps(run_dir, [2.0 + (number == 4321) for number in range(9000)])
    write_incident(run_dir, 4321)
    data = embedded(report(run_dir))
    whole = next(one for one in data["timeline"]["series"] if one["tag"] == "loss")["points"]
    assert len(whole) <= 2000
    assert max(point[2] for point in whole) == 3.0
    around = data["incident.0"]["shared"]["around"]
    near = next(one for one in around["series"] if one["tag"] == "loss")["points"]
    assert [point[0] for point in near] == list(range(around["start"], around["stop"] + 1))
    assert [point[0] for point in near if point[3] == 3.0] == [4321]


def test_of_many_incidents_the_gravest_have_pages_and_the_report_says_so(run_dir, monkeypatch):
    monkeypatch.setattr(reporting, "_MOST_PAGES", 2)
    write_steps(run_dir, [2.0] * 9)
    for at, severity in (
        (1, Severity.ERROR),
        (2, Severity.WARNING),
        (3, Severity.CRITICAL),
        (4, Severity.WARNING),
    ):
        write_incident(run_dir, at, severity=severity)
    data = embedded(report(run_dir))
    assert list(data["about"]["pages"]) == ["000003-nonfinite_gradient", "000001-nonfinite_gradient"]
    assert len(data["incidents.en"]) == 4
    assert data["run.en"]["problems"][0].startswith("Pages of the first 2 of 4 incidents")
    assert "4 起事故" in data["run.zh"]["problems"][0]


def test_what_ended_the_run_comes_first(run_dir):
    write_steps(run_dir, [2.0] * 9)
    write_incident(run_dir, 1, severity=Severity.ERROR, outcome=Outcome.ABORTED)
    write_incident(run_dir, 2, severity=Severity.CRITICAL)
    write_incident(run_dir, 3, severity=Severity.CRITICAL)
    steps = [one["step"] for one in gravest(gather(run_dir).incidents("en"))]
    assert steps == [1, 3, 2]


def test_one_incident_alone(run_dir):
    train(run_dir, steps=9, bad=[3, 6])
    data = embedded(report(run_dir, incident="000006-nonfinite_gradient"))
    assert data["about"]["start"] == "000006-nonfinite_gradient"
    assert list(data["about"]["pages"]) == ["000006-nonfinite_gradient"]
    assert len(data["incidents.en"]) == 2
    with pytest.raises(StoreError, match="no incident '000007-x' that can be read"):
        report(run_dir, incident="000007-x")


def test_the_run_is_called_by_its_directory_and_is_not_written_into(run_dir):
    train(run_dir, steps=6, bad=[3])
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    data = embedded(report(run_dir))
    assert data["about"]["runs"][0]["name"] == data["run.en"]["name"] == "run"
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_run_without_incidents_and_one_that_has_only_begun(run_dir):
    train(run_dir, steps=4)
    data = embedded(report(run_dir))
    assert data["about"]["pages"] == {}
    begun = run_dir.with_name("begun")
    write_steps(begun, [])
    assert embedded(report(begun))["run.en"]["state"] in {"running", "unknown", "empty"}


@pytest.mark.parametrize("arguments", [(), ("--markdown",)])
def test_directories_that_are_no_run_are_named_and_nothing_is_written(tmp_path, arguments):
    output = tmp_path / "out.html"
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "file"
    file.write_text("text")
    for path, words in (
        (tmp_path / "nowhere", "does not exist"),
        (empty, "is not a run directory"),
        (file, "is a file"),
    ):
        result = invoke(path, "-o", output, *arguments)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert str(path) in line
        assert words in line
    assert not output.exists()


def test_a_directory_of_runs_says_which_there_are(tmp_path):
    for name in ("a", "b", "c", "d"):
        write_steps(tmp_path / name, [1.0])
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "it holds a, b, c and 1 more: give one of them" in result.stderr


def test_the_command_writes_the_file_as_a_whole(run_dir, tmp_path):
    train(run_dir, steps=6, bad=[3])
    output = tmp_path / "report.html"
    output.write_text("old")
    result = invoke(run_dir, "-o", output, "--lang", "zh", "--incident", "3")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"Report: {output}\n"
    assert output.read_text(encoding="utf-8") == report(
        run_dir, lang="zh", incident="000003-nonfinite_gradient"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "run"}
    streamed = invoke(run_dir, "-o", "-")
    assert streamed.stdout.startswith("<!doctype html>")


def test_a_place_that_cannot_hold_the_file_is_named(run_dir, tmp_path):
    train(run_dir, steps=6, bad=[3])
    for output, words in (
        (tmp_path, "is a directory; name a file"),
        (tmp_path / "no" / "x.html", "cannot write"),
    ):
        result = invoke(run_dir, "-o", output)
        assert result.exit_code == 2
        assert words in result.stderr
    assert invoke(run_dir, "--lang", "fr").stderr.startswith("error: unknown language 'fr'")
    with pytest.raises(ConfigurationError, match="choose one of: en, zh"):
        report(run_dir, lang="fr")


def test_the_bundler_refuses_what_it_does_not_understand():
    def files(**texts):
        return lambda name: texts[name.removesuffix(".js")]

    made = bundle(
        "a.js",
        files(a='import { one } from "./b.js";\nexport const two = one;\n', b="export const one = 1;\n"),
    )
    assert made.index("module_b =") < made.index("module_a =")
    assert "import" not in made
    with pytest.raises(ValueError, match="circle"):
        bundle("a.js", files(a='import { b } from "./b.js";\n', b='import { a } from "./a.js";\n'))
    for text in (
        'import b from "./b.js";\n',
        "export default 1;\n",
        'const x = import("./b.js");\n',
        'x = "</script";\n',
    ):
        with pytest.raises(ValueError, match="cannot bundle"):
            bundle("a.js", files(a=text, b=""))


def test_the_bundle_holds_every_module_the_report_needs():
    made = bundle("report_main.js", asset)
    assert re.search(r"^\s*(import|export)\b", made, re.MULTILINE) is None
    assert {path.name for path in Path(reporting.__file__).parent.glob("assets/*.js")} - {"index.js"} == {
        f"{name}.js" for name in re.findall(r"^const module_(\w+) =", made, re.MULTILINE)
    }
