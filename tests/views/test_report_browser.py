"""The report in a real browser: it shows the truth, runs nothing of the run's, asks nobody for anything."""

import math
import re

import pytest
import torch
from runs_on_disk import append, start, step, train, write_incident, write_norms, write_steps
from torch import nn

from gradsentinel import NanCallback, Sentinel, SnapshotSaver
from gradsentinel.decision import Severity
from gradsentinel.evidence import Diagnosis, Sample
from gradsentinel.incident import Outcome
from gradsentinel.ranks.topology import Rank
from gradsentinel.views import incident_view
from gradsentinel.views.report import report

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400), pytest.mark.xdist_group("browser")]

BAD = '"><img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>'


class Root(nn.Module):
    """Has no answer for negative numbers."""

    def forward(self, x):
        return x.sqrt()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.root, self.head = nn.Linear(4, 4), Root(), nn.Linear(4, 1)

    def forward(self, x, shift):
        return self.head(self.root(self.encoder(x).square() + shift)).square().mean()


def train_root(run_dir, *, steps=30, bad=20):
    """A real run: in one step the square root gets negative numbers."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [
        {"x": torch.randn(8, 4), "shift": torch.tensor(-9.0 if k == bad else 1.0)} for k in range(steps)
    ]
    callbacks = [NanCallback(), SnapshotSaver()]
    sentinel = Sentinel(
        model, optimizer, callbacks=callbacks, run_dir=run_dir, forward=lambda model, batch: model(**batch)
    )
    with sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(model(**batch))
            sentinel.step(max_norm=1.0)


def show(page, run_dir, path="", **options):
    """Open the report of a run, at one of its pages."""
    file = run_dir.with_name("report.html")
    file.write_text(report(run_dir, **options), encoding="utf-8")
    page.goto("about:blank")  # a new address that differs behind the # only would not load the file again
    page.goto(f"file://{file}{f'#/{run_dir.name}/{path}' if path else ''}")
    page.wait_for_selector("main .gs-page")


def test_a_real_run_shows_what_happened_where_and_what_to_do(page, run_dir):
    train_root(run_dir)
    show(page, run_dir)
    assert page.get_by_test_id("gs-headline").inner_text().startswith("The run has ended; 30 steps attempted")
    assert "Step 20: non-finite loss" in page.get_by_test_id("gs-look").inner_text()
    (row,) = page.get_by_test_id("gs-incident-row").all()
    assert "root" in row.inner_text()
    row.click()
    incident = page.get_by_test_id("gs-incident-page")
    incident.wait_for()
    text = incident.inner_text()
    assert "Step 20: non-finite loss" in text
    assert "unstable math of the model" in text
    assert "aten.sqrt" in text
    assert page.locator(".gs-todo li").count() >= 1
    lines = page.get_by_test_id("gs-commands").locator("code").all_inner_texts()
    assert any(line.startswith("gradsentinel verify") and "000020-nonfinite_loss" in line for line in lines)
    assert "sqrt" in page.get_by_test_id("gs-spread").inner_text()
    hot = page.get_by_test_id("gs-heat-cell")
    assert [(cell.get_attribute("data-rank"), cell.get_attribute("data-hot")) for cell in hot.all()] == [
        ("0", "1")
    ]
    assert page.get_by_test_id("gs-layers").locator("canvas").count() == 1
    assert [url.partition("#")[0] for url in page.requests] == [page.url.partition("#")[0]]


def test_nothing_of_the_run_is_run(page, run_dir):
    where = Rank(rank=0, host=BAD, device=BAD)
    append(run_dir / "events-rank0.jsonl", start(host=BAD, device=BAD), step(0), step(1), step(2))
    told = Diagnosis(
        cause=BAD,
        confidence=0.9,
        phase=BAD,
        module=BAD,
        op=BAD,
        node=BAD,
        source=BAD,
        evidence=(BAD,),
        remedy=(BAD,),
    )
    incident = write_incident(
        run_dir,
        1,
        tensors=(f"layer.{BAD}", f"other.{BAD}"),
        ranks=[where],
        message=BAD,
        notes=(BAD,),
        detector=BAD,
        recovery=BAD,
        samples=(Sample(position=0, id=BAD, field=BAD),),
        details={BAD: BAD},
        seconds={BAD: 1.0},
        diagnosis=told,
    )
    write_norms(run_dir, incident, [f"layer.{BAD}", f"other.{BAD}"], [[1.0, 2.0]] * 2)
    (run_dir / "incidents" / incident.id / BAD.replace("/", "_")).write_text("{}")
    (run_dir / "incidents" / "broken").mkdir()
    (run_dir / "incidents" / "broken" / "incident.json").write_text(BAD)
    for path in ("", "incidents", "safety", f"incident/{incident.id}", "all"):
        show(page, run_dir, path)
        page.get_by_test_id("gs-lang").click()
        page.get_by_test_id("gs-lang").filter(has_text="English").wait_for()
        assert page.evaluate("window.hacked") is None
        assert page.locator("img, iframe, object, main script, main style").count() == 0
    text = page.locator("main").inner_text()
    assert text.count(BAD) >= 6
    assert {url.partition("#")[0] for url in page.requests} == {page.url.partition("#")[0]}


def test_characters_that_hide_or_turn_text_are_seen(page, run_dir):
    write_steps(run_dir, [2.0, 2.0])
    incident = write_incident(run_dir, 1, message="weights\u202egnp.exe\u200b", tensors=("a\u2066b",))
    show(page, run_dir, f"incident/{incident.id}")
    text = page.get_by_test_id("gs-incident-page").inner_text()
    assert "weights\\u202egnp.exe\\u200b" in text
    assert "a\\u2066b" in text
    assert not set(text) & set("\u202e\u200b\u2066")


def test_the_policy_stops_what_would_ask_outside_or_run(page, run_dir):
    train(run_dir, steps=4)
    show(page, run_dir)
    blocked = page.evaluate(
        """async () => {
          const seen = [];
          document.addEventListener("securitypolicyviolation", (one) => seen.push(one.effectiveDirective));
          document.body.insertAdjacentHTML("beforeend", '<img src="http://127.0.0.1:9/x.png">');
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          document.body.append(script);
          const asked = await fetch("http://127.0.0.1:9/").then(() => "answered", () => "refused");
          for (let turn = 0; turn < 500 && new Set(seen).size < 3; turn += 1) {
            await new Promise((done) => setTimeout(done, 20));
          }
          return [asked, window.hacked ?? null, ...seen.sort()];
        }"""
    )
    page.problems.clear()  # the browser says in the console what it has refused
    assert blocked[:2] == ["refused", None]
    assert {"connect-src", "img-src", "script-src-elem"} <= set(blocked[2:])


def test_the_timeline_zooms_by_mouse_and_keys_and_opens_incidents(page, run_dir):
    write_steps(run_dir, [2.0 + (number == 150) for number in range(300)])
    write_incident(run_dir, 150, severity=Severity.CRITICAL, outcome=Outcome.ROLLED_BACK)
    show(page, run_dir)
    chart = page.get_by_test_id("gs-timeline")
    shown = chart.locator(".gs-timeline-bar .gs-quiet")
    everything = shown.filter(has_text=re.compile(r"^attempted steps 0 \S 299$"))
    everything.wait_for()
    assert chart.locator(".gs-flag .gs-critical").count() == 1
    box = chart.locator(".gs-stage").bounding_box()
    y = box["y"] + 100
    page.mouse.move(box["x"] + box["width"] * 0.45, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=4)
    page.mouse.up()
    everything.wait_for(state="hidden")
    first, last = map(int, re.findall(r"\d+", shown.inner_text()))
    assert 100 < first < 150 < last < 200
    page.mouse.move(box["x"] + box["width"] * 0.5, y)
    assert "attempted step 1" in chart.locator(".gs-tip").inner_text()
    page.locator(".gs-stage").focus()
    page.keyboard.press("0")
    everything.wait_for()
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    assert "non-finite gradient → rolled back" in chart.locator(".gs-unseen").inner_text()
    page.keyboard.press("Enter")
    page.get_by_test_id("gs-incident-page").wait_for()
    assert page.url.endswith("/incident/000150-nonfinite_gradient")


def test_incidents_are_sorted_and_filtered(page, run_dir):
    write_steps(run_dir, [2.0] * 40)
    for at in range(30):
        told = Diagnosis(cause="data" if at % 3 else "hardware", confidence=0.5)
        write_incident(run_dir, at, severity=Severity(1 + at % 3), diagnosis=told, tensors=(f"layer.{at}",))
    show(page, run_dir, "incidents")
    rows = page.get_by_test_id("gs-incident-row")

    def steps():
        return [int(text) for text in rows.locator("td.gs-col-step").all_inner_texts()]

    assert steps() == list(range(29, -1, -1))
    page.get_by_role("button", name="Step").click()
    assert steps() == list(range(30))
    page.get_by_role("button", name="Severity").click()
    assert steps()[:10] == list(range(2, 30, 3))
    page.get_by_label("Cause").select_option("hardware")
    assert steps() == list(range(0, 30, 3))
    page.get_by_role("searchbox").fill("layer.27")
    assert steps() == [27]
    page.get_by_role("searchbox").fill("nothing like that")
    assert "No incident is like that." in page.locator("main").inner_text()


def test_sixteen_thousand_ranks_are_laid_out_and_the_right_ones_are_hot(page, run_dir, monkeypatch):
    tp, pp, dp = 8, 16, 128
    hot = {4099, 12000}
    cells = [
        {
            "rank": rank,
            "coordinates": {"tp": rank % tp, "pp": rank // (tp * dp), "dp": rank // tp % dp},
            "host": f"node{rank // 8:04d}",
            "device": f"npu:{rank % 8}",
            "hot": 1.0 if rank in hot else 0.0,
            "why": "it began here" if rank in hot else "",
        }
        for rank in range(tp * pp * dp)
    ]
    axes = [{"name": "pp", "size": pp}, {"name": "dp", "size": dp}, {"name": "tp", "size": tp}]
    told = {"axes": axes, "cells": cells, "total": len(cells)}
    # Their event logs would be 16,384 files, which the tests of the data read fewer of.
    monkeypatch.setattr(incident_view.heat, "ranks", lambda run, incident, lang: told)
    write_steps(run_dir, [2.0, 2.0])
    incident = write_incident(run_dir, 1)
    show(page, run_dir, f"incident/{incident.id}")
    found = {int(cell.get_attribute("data-rank")): cell for cell in page.get_by_test_id("gs-heat-cell").all()}
    assert found.keys() == hot  # the others are on the canvas
    assert page.locator(".gs-board-canvas").count() == 1
    counts = {4: " one concerned", 11: " one concerned"}
    titles = [f"pp {k}{counts.get(k, '')}" for k in range(pp)]
    assert page.locator(".gs-ranks .gs-facet").all_text_contents() == titles
    said = page.locator(".gs-map-foot .gs-readout")
    found[4099].hover()
    assert "Rank 4099 tp 3 · pp 4 · dp 0 — node0512 npu:3 — it began here" in said.inner_text()
    page.locator(".gs-ranks").focus()
    page.keyboard.press("ArrowRight")
    assert "Rank 4107 tp 3 · pp 4 · dp 1" in said.inner_text()


def test_layers_can_be_read_cell_by_cell(page, run_dir):
    write_steps(run_dir, [2.0] * 20)
    incident = write_incident(run_dir, 15, tensors=("block.1.weight",))
    names = ["block.0.weight", "block.1.weight", "block.2.weight"]
    columns = [[1.0, 10.0, None] for _ in range(8)]
    columns[-1] = [1.0, math.nan, 0.0]
    columns = [
        [str(v) if isinstance(v, float) and math.isnan(v) else v for v in column] for column in columns
    ]
    write_norms(run_dir, incident, names, columns)
    show(page, run_dir, f"incident/{incident.id}")
    said = page.get_by_test_id("gs-layers").locator(".gs-readout")
    page.get_by_test_id("gs-layers").locator(".gs-board").focus()
    for key, words in (
        ("ArrowDown", "block.1.weight · attempted step 15 · NaN"),
        ("ArrowLeft", "block.1.weight · attempted step 14 · norm 10 (log10 1.00)"),
        ("ArrowDown", "block.2.weight · attempted step 14 · not measured"),
        ("ArrowRight", "block.2.weight · attempted step 15 · norm 0"),
    ):
        page.keyboard.press(key)
        assert words in said.inner_text()


def test_language_theme_and_paper(page, run_dir):
    train_root(run_dir)
    show(page, run_dir, lang="zh")
    assert page.get_by_test_id("gs-headline").inner_text().startswith("训练已正常结束")
    page.get_by_test_id("gs-lang").click()
    page.get_by_test_id("gs-headline").filter(has_text="The run has ended").wait_for()
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_test_id("gs-theme").click()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.get_by_role("link", name="All on one page").click()
    page.wait_for_selector(".gs-everything")
    assert page.get_by_test_id("gs-incident-page").count() == 1
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".gs-top").is_visible()
    assert page.locator(".gs-everything h1").first.is_visible()


def test_a_report_of_one_incident_opens_there_and_says_what_is_not_inside(page, run_dir):
    write_steps(run_dir, [2.0] * 20)
    write_incident(run_dir, 5)
    write_incident(run_dir, 9)
    show(page, run_dir, incident="000009-nonfinite_gradient")
    incident = page.get_by_test_id("gs-incident-page")
    incident.wait_for()
    assert "Step 9" in incident.inner_text()
    page.locator('a[data-go="previous"]').click()
    page.wait_for_selector("main .gs-nothing")
    assert "This incident has no page in this file." in page.locator("main").inner_text()
    page.problems.clear()  # the page also tells the console


def test_an_empty_run_has_pages_too(page, run_dir):
    append(run_dir / "events-rank0.jsonl", start())
    show(page, run_dir)
    assert "There are no numbers of steps yet." in page.locator("main").inner_text()
    for path, words in (("incidents", "No incident"), ("safety", "No snapshot is known of.")):
        show(page, run_dir, path)
        assert words in page.locator("main").inner_text()


@pytest.mark.parametrize("place", ["", "incidents"])
def test_a_run_whose_incident_cannot_be_read_is_not_called_sound(page, run_dir, place):
    write_steps(run_dir, [1.0, 0.9])
    show(page, run_dir, place)
    assert "every step was made with sound gradients" in page.locator("main").inner_text()
    lost = write_incident(run_dir, 1)
    (run_dir / "incidents" / lost.id / "incident.json").write_text("{", "utf-8")
    show(page, run_dir, place)
    text = page.locator("main").inner_text()
    assert "that all is well cannot be said" in text
    assert "sound gradients" not in text
