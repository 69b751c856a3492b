"""How long the GradSentinel tab takes from a click to the picture, in a headless Chromium.

A real TensorBoard serves the run of viewing.py. The time runs from the event in the browser until what was
asked for has been painted: the question to the server, its answer and the drawing are in it. Beside it stands
what the page's own thread computed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import viewing

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 9
WINDOW = {"width": 1280, "height": 900}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

ARM = """([event, ready]) => {
  const root = document.querySelector(".gs-app");
  const old = document.querySelector("svg.gs-plot");
  const done = new Function("root", "old", `return ${ready}`);
  window.gsTimed = new Promise((resolve) => window.addEventListener(event, () => {
    const begun = performance.now();
    if (event === "click") root.dataset.page = "";
    const look = () => done(root, old)
      ? requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - begun)))
      : requestAnimationFrame(look);
    requestAnimationFrame(look);
  }, { capture: true, once: true }));
}"""
PAGE = 'root.dataset.page === "{}" && document.querySelector("svg.gs-plot")'
NEW_CURVE = 'document.querySelector("svg.gs-plot") !== old && document.querySelector("svg.gs-plot")'


def measure() -> dict[str, Any]:
    """Return the times of what one does in the tab, in ms; or what is missing to measure them."""
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - may be missing
    except ImportError:
        return {"missing": "playwright"}
    if browser is None:
        return {"missing": "Chromium"}
    sys.path.append(str(ROOT / "tests" / "views"))
    from boards import tensorboard  # noqa: PLC0415 - beside the tests

    with tempfile.TemporaryDirectory() as folder:
        viewing.write_run(Path(folder) / "run")
        with tensorboard(Path(folder)) as address, sync_playwright() as playwright:
            started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = started.new_page(viewport=WINDOW, locale="en-US")
            page.set_default_timeout(30_000)
            name = f"Chromium {started.version.partition('.')[0]}"
            found = {"browser": name, "does": in_the_tab(page, address), "load": os.getloadavg()[0]}
            started.close()
    return found


def in_the_tab(page: Any, address: str) -> dict[str, dict[str, float]]:
    """Return how long each thing takes that one does in the tab."""
    page.goto(address)
    page.get_by_role("tab", name="gradsentinel").click()
    frame = page.frame_locator("iframe")
    frame.get_by_test_id("gs-headline").wait_for()
    inside = page.frames[-1]
    inside.wait_for_function("document.querySelector('svg.gs-plot') !== null")
    console = page.context.new_cdp_session(page)
    console.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = console.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    def link(name: str) -> Callable[[], None]:
        made: Callable[[], None] = (
            frame.locator("nav.gs-nav").get_by_role("link", name=name, exact=True).click
        )
        return made

    def brush() -> None:
        box = frame.locator(".gs-stage").first.bounding_box()
        across, down = box["x"] + 0.4 * box["width"], box["y"] + 120
        page.mouse.move(across, down)
        page.mouse.down()
        page.mouse.move(across + 0.2 * box["width"], down, steps=3)
        page.mouse.up()

    def newest() -> None:
        frame.get_by_test_id("gs-incident-row").first.get_by_role("link").first.click()

    rows = 'root.dataset.page === "incidents" && document.querySelector("[data-testid=gs-incident-row]")'
    heat = f'{PAGE.format("incident")} && document.querySelector("[data-testid=gs-layers] canvas")'
    rounds: dict[str, tuple[Callable[[], None], str, str]] = {
        "overview": (link("Overview"), "click", PAGE.format("overview")),
        "zoom by brush": (brush, "pointerup", NEW_CURVE),
        "back to the whole run": (
            frame.get_by_role("button", name="Show all", exact=True).first.click,
            "click",
            NEW_CURVE,
        ),
        "list of incidents": (link("Incidents"), "click", rows),
        "one incident": (newest, "click", heat),
        "the one before it": (frame.locator('a[data-go="previous"]').click, "click", heat),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in rounds}
    for _ in range(REPEATS):
        for name, (act, event, ready) in rounds.items():
            inside.evaluate(ARM, [event, ready])
            before = spent()
            act()
            took = inside.evaluate("window.gsTimed")
            times[name].append((took, 1e3 * (spent() - before)))
    return {
        name: {
            "median_ms": statistics.median(took for took, _ in found),
            "least_ms": min(took for took, _ in found),
            "thread_ms": statistics.median(own for _, own in found),
        }
        for name, found in times.items()
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
