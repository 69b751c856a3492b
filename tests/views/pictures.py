"""Makes the pictures of the documentation anew: `make pictures`.

python tests/views/pictures.py [FOLDER [LOGDIR]] puts them elsewhere, and keeps the runs for the next time.

A real TensorBoard, on a run of the demo and on a made-up job of 64 ranks, in a headless Chromium.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from boards import demo, tensorboard
from PIL import Image
from playwright.sync_api import FrameLocator, Route, sync_playwright

from conftest import chromium

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
WIDTHS = (1280, 1920)
HEIGHTS = {"overview": 1080, "incident": 1080, "layers": 1420, "incidents": 640, "safety": 900, "ranks": 1130}
JOB = "job-of-64-ranks"
COLOURS = 160
"""A page of text and lines needs no more, and a third of the bytes."""
TAB = re.compile("^gradsentinel$", re.IGNORECASE)

sys.path.append(str(ROOT / "benchmarks"))


def main(images: Path = IMAGES, logdir: Path | None = None) -> None:
    """Make all pictures."""
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = logdir or Path(folder) / "runs"
        make_runs(runs)
        with tensorboard(runs) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            for lang, locale in (("en", "en-US"), ("zh", "zh-CN")):
                for width in WIDTHS:
                    context = browser.new_context(locale=locale, viewport={"width": width, "height": 900})
                    context.route("**/gradsentinel/**", lambda route: beside(route, runs.resolve()))
                    name = f"{{}}-{width}-{lang}.png"
                    take(context.new_page(), address, lambda what, name=name: images / name.format(what))
                    context.close()
            browser.close()


def beside(route: Route, logdir: Path) -> None:
    """Answer as if it was asked in the directory of the runs: no path of this machine in a picture."""
    answer = route.fetch()
    if "json" in answer.headers.get("content-type", ""):
        route.fulfill(response=answer, body=answer.text().replace(f"{logdir}/", ""))
    else:
        route.fulfill(response=answer)


def make_runs(logdir: Path) -> None:
    """Make the runs to look at, those that are not there yet."""
    import viewing  # noqa: PLC0415 - a script beside the project

    if not (logdir / "demo").exists():
        demo(logdir / "demo", steps=160)
    if not (logdir / JOB).exists():
        mesh = {"pp": 4, "dp": 4, "tp": 4}
        viewing.write_run(logdir / JOB, steps=4000, parameters=384, incidents=8, mesh=mesh)


def take(page: Any, address: str, path: Any) -> None:
    """Take the pictures of one width and language."""
    page.goto(address)
    page.get_by_role("tab", name=TAB).click()
    tab = page.frame_locator("iframe")
    tab.get_by_test_id("gs-headline").wait_for()
    show(tab, "demo", "")
    shoot(page, path("overview"))
    show(tab, "demo", "incidents")
    tab.get_by_test_id("gs-incident-row").first.wait_for()
    shoot(page, path("incidents"))
    row = tab.get_by_test_id("gs-incident-row").filter(has_text="blocks.1.attn").first
    name = row.get_attribute("data-id")
    show(tab, "demo", f"incident/{name}")
    tab.get_by_test_id("gs-layers").wait_for()
    shoot(page, path("incident"))
    shoot(page, path("layers"), tab.get_by_test_id("gs-layers"))
    show(tab, "demo", "safety")
    shoot(page, path("safety"))
    show(tab, JOB, "incidents")
    name = tab.get_by_test_id("gs-incident-row").first.get_attribute("data-id")
    show(tab, JOB, f"incident/{name}")
    tab.get_by_test_id("gs-heat-cell").first.wait_for()
    shoot(page, path("ranks"))


def show(tab: FrameLocator, run: str, place: str) -> None:
    """Go to a page of a run, and wait until it is drawn."""
    root = tab.locator(".gs-app")
    root.evaluate("(root, hash) => { root.dataset.page = ''; location.hash = hash }", f"#/{run}/{place}")
    page = place.partition("/")[0] or "overview"
    tab.locator(f'.gs-app[data-page="{page}"]').wait_for()


def shoot(page: Any, path: Path, part: Any = None) -> None:
    """Write a picture, small; of the page from a part on."""
    height = HEIGHTS[path.name.partition("-")[0]]
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    if part is not None:
        part.evaluate(
            "part => { (part.closest('section') ?? part).scrollIntoView(); window.scrollBy(0, -70) }"
        )
    page.wait_for_function("document.fonts.ready.then(() => true)")
    page.frames[-1].evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled")))
    picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size // 1000} kB")  # noqa: T201 - a script


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
