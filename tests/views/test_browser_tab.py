"""The tab in a real TensorBoard, in a real browser, on a run made by the demo."""

import itertools
import json
import re

import pytest
from boards import demo, tensorboard
from runs_on_disk import append, start, step, write_incident, write_norms, write_steps

from gradsentinel.evidence import Diagnosis
from gradsentinel.ranks.topology import Rank
from gradsentinel.store import RunDirectory

pytest.importorskip("tensorboard", reason="tensorboard is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(400), pytest.mark.xdist_group("browser")]

TAB = re.compile("^gradsentinel$", re.IGNORECASE)
HOSTILE = "<img src=x onerror=window.pwned=1>"
MESH = {"pp": 2, "dp": 2, "tp": 2}


def write_mesh(run_dir, guilty):
    """Write a job of 8 ranks with an incident on one of them, with hostile names everywhere."""
    places = [dict(zip(MESH, at, strict=True)) for at in itertools.product(*map(range, MESH.values()))]
    for rank, place in enumerate(places):
        append(run_dir / f"events-rank{rank}.jsonl", start(rank, 8, **place))
    append(run_dir / "events-rank0.jsonl", *(step(number, 3.0 - number / 100) for number in range(100)))
    incident = write_incident(
        run_dir,
        60,
        ranks=[Rank(rank=guilty, host="node00", device=HOSTILE, coordinates=places[guilty])],
        tensors=[HOSTILE, "blocks.1.weight"],
        message=f"bad {HOSTILE}",
        diagnosis=Diagnosis(cause="hardware", confidence=0.8, module=HOSTILE, op=HOSTILE, remedy=(HOSTILE,)),
    )
    write_norms(run_dir, incident, [HOSTILE, "blocks.1.weight"], [[1.0, 2.0], ["nan", 2.0]])
    return incident


@pytest.fixture(scope="module")
def logdir(tmp_path_factory, browser):
    """Two runs, one of them by the demo; not made where there is no browser."""
    logdir = tmp_path_factory.mktemp("logs")
    demo(logdir / "demo", steps=40)
    write_mesh(logdir / "mesh", guilty=5)
    return logdir


@pytest.fixture(scope="module")
def address(logdir):
    with tensorboard(logdir) as address:
        yield address


@pytest.fixture
def tab(page, address):
    """The frame that TensorBoard shows under the tab, once the tab was clicked."""
    page.goto(address)
    page.get_by_role("tab", name=TAB).click()
    frame = page.frame_locator("iframe")
    frame.get_by_test_id("gs-headline").wait_for()
    return frame


def choose(tab, run):
    tab.locator("select").first.select_option(run)
    tab.get_by_role("link", name="Overview", exact=True).click()
    tab.get_by_test_id("gs-timeline").wait_for()


def open_incident(tab, id):  # noqa: A002 - as the routes call it
    tab.get_by_role("link", name="Incidents", exact=True).click()
    tab.locator(f'[data-testid="gs-incident-row"][data-id="{id}"]').get_by_role("link").first.click()
    page = tab.locator(f'[data-testid="gs-incident-page"][data-id="{id}"]')
    page.wait_for()
    return page


def test_the_tab_appears_and_shows_the_run(tab, page, address):
    choose(tab, "demo")
    tab.get_by_test_id("gs-headline").filter(has_text="40 steps attempted, 3 incidents").wait_for()
    assert tab.get_by_test_id("gs-timeline").locator("svg, canvas").count() > 0
    local = (address, "data:", "blob:")
    assert [url for url in page.requests if not url.startswith(local)] == []


def test_an_incident_of_the_demo_opens(tab, logdir):
    choose(tab, "demo")
    (incident,) = (one for one in RunDirectory(logdir / "demo").read_incidents() if "loss" in str(one.kind))
    opened = open_incident(tab, incident.id)
    text = opened.inner_text()
    assert "blocks.1.attn" in text
    assert "aten.bmm" in opened.get_by_test_id("gs-spread").inner_text()
    assert "repro.py" in opened.get_by_test_id("gs-commands").inner_text()
    assert incident.diagnosis.remedy[0] in text
    hot = opened.locator('[data-testid="gs-heat-cell"][data-hot="1"]')
    assert [cell.get_attribute("data-rank") for cell in hot.all()] == ["0"]
    assert opened.get_by_test_id("gs-layers").locator("canvas").count() > 0


def test_the_right_cell_of_the_mesh_is_hot(tab, logdir):
    choose(tab, "mesh")
    (incident,) = RunDirectory(logdir / "mesh").read_incidents()
    opened = open_incident(tab, incident.id)
    opened.get_by_test_id("gs-heat-cell").first.wait_for()
    cells = opened.get_by_test_id("gs-heat-cell").all()
    assert {cell.get_attribute("data-rank") for cell in cells} == set(map(str, range(8)))
    hot = [cell for cell in cells if float(cell.get_attribute("data-hot")) > 0]
    assert [cell.get_attribute("data-rank") for cell in hot] == ["5"]
    assert "tp 1" in hot[0].locator("title").text_content()


def test_hostile_names_are_shown_and_not_run(tab, page, logdir):
    choose(tab, "mesh")
    (incident,) = RunDirectory(logdir / "mesh").read_incidents()
    opened = open_incident(tab, incident.id)
    opened.get_by_test_id("gs-layers").wait_for()
    assert HOSTILE in opened.inner_text()
    assert opened.locator("img").count() == 0
    assert [frame.evaluate("window.pwned") for frame in page.frames] == [None] * len(page.frames)


def test_the_language_can_be_changed(tab):
    choose(tab, "demo")
    tab.get_by_test_id("gs-lang").click()
    tab.get_by_test_id("gs-headline").filter(has_text="训练已正常结束").wait_for()
    tab.get_by_test_id("gs-lang").click()
    tab.get_by_test_id("gs-headline").filter(has_text="The run has ended").wait_for()


def test_a_chinese_page_says_in_chinese_what_was_found_and_what_to_do(tab, logdir):
    choose(tab, "demo")
    (incident,) = (one for one in RunDirectory(logdir / "demo").read_incidents() if "loss" in str(one.kind))
    opened = open_incident(tab, incident.id)
    tab.get_by_test_id("gs-lang").click()
    opened.get_by_role("heading", name="损失为 NaN/Inf").wait_for()
    shown = opened.locator(":scope > :not(details)").all_inner_texts()  # all but the file as it is
    text = "\n".join(shown)
    assert "用 float32 计算 blocks.1.attn" in text
    told = [incident.message, *incident.diagnosis.evidence, *incident.diagnosis.remedy]
    assert [one for one in told if one in text] == []
    tab.get_by_test_id("gs-lang").click()
    opened.get_by_text(incident.diagnosis.remedy[0]).first.wait_for()


def test_runs_are_compared(tab):
    tab.get_by_role("link", name="Compare", exact=True).click()
    compared = tab.get_by_test_id("gs-compare")
    compared.locator("svg, canvas").first.wait_for()
    assert "demo" in compared.inner_text()
    assert "mesh" in compared.inner_text()


def test_links_lead_to_the_chosen_run_while_its_page_is_still_on_its_way(tab, page):
    choose(tab, "mesh")
    held = []
    page.route("**/plugin/gradsentinel/runs*", lambda route: held.append(route))  # noqa: PLW0108 - not a built-in
    tab.locator("select").first.select_option("demo")
    tab.get_by_role("link", name="Incidents", exact=True).click()
    page.unroute("**/plugin/gradsentinel/runs*")  # lets those go that were held
    assert held != []
    tab.locator('main [data-testid="gs-incident-row"]').first.wait_for()
    assert tab.locator("select").first.input_value() == "demo"


def test_a_run_that_begins_meanwhile_is_offered(tab, page, logdir):
    assert tab.locator("select").first.locator("option").all_inner_texts() != []
    write_steps(logdir / "late", [2.0, 1.0])
    choose(tab, "late")  # waits until it is there
    assert (
        json.loads(page.evaluate("fetch('data/plugin/gradsentinel/run?name=late').then(r => r.text())"))[
            "iterations"
        ]
        == 2
    )
