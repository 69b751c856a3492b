"""Pages of docs/ that mkdocs.yml does not list stand under "More", so that a new page is found at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def listed(nav: Any) -> set[str]:
    """Return the pages that a navigation names, at any depth."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav
    return set().union(*(listed(part) for part in parts))


def on_config(config: Any) -> Any:
    """Append what is missing."""
    pages = {path.name for path in Path(config["docs_dir"]).glob("*.md")}
    rest = sorted(pages - listed(config["nav"]))
    if rest:
        config["nav"].append({"More": rest})
    return config
