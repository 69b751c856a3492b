"""A headless Chromium for the tests of the pages."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """Return the browser of this machine: what CHROMIUM names, else the first that is installed."""
    told = os.environ.get("CHROMIUM")
    return told or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright; one for all tests of a worker."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("there is no Chromium here; install one, or name it in CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        # Without the sandbox, since tests often run as root in a container; the pages are our own.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of a fresh context, without network; errors in it fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-US")
    made = context.new_page()
    made.set_default_timeout(30_000)
    made.problems = []
    made.requests = []
    made.on("pageerror", lambda error: made.problems.append(f"error: {error}"))
    made.on("console", lambda message: made.problems.extend(_problem(message)))
    made.on("request", lambda request: made.requests.append(request.url))
    yield made
    context.close()
    assert made.problems == []


def _problem(message: Any) -> list[str]:
    """Return what the console complains of, unless TensorBoard itself asked for what is not there."""
    about = message.location.get("url", "")
    theirs = about.startswith("http") and "/plugin/gradsentinel/" not in about
    if message.type != "error" or (theirs and "Failed to load resource" in message.text):
        return []
    return [f"console: {message.text} ({about})"]
