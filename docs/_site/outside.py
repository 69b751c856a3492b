"""Files outside of docs/ that a page links to become pages of the site: it is whole without a repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".toml": "toml", ".txt": "text"}
PREFIX = "files"


def page_of(target: Path) -> str:
    """Return where the page of a file or folder of the project stands, relative to docs/."""
    name = target.relative_to(ROOT).as_posix()
    return f"{PREFIX}/{name}" if name.endswith(".md") else f"{PREFIX}/{name}.md"


def text_of(target: Path) -> str:
    """Return the page of a file: Markdown as it is, code in a block, a folder as a list of its files."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        files = sorted(path.name for path in target.iterdir() if path.is_file())
        return f"# `{name}/`\n\n" + "\n".join(f"- `{file}`" for file in files) + "\n"
    content = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return moved(content, target)
    fence = "`" * 4
    return f"# `{name}`\n\n{fence}{LANGUAGES.get(target.suffix, 'text')}\n{content}\n{fence}\n"


def moved(markdown: str, source: Path) -> str:
    """Return a page with its links led from its new place: into docs/, or else, as words, nowhere."""
    page = ROOT / "docs" / page_of(source)

    def lead(match: re.Match[str]) -> str:
        target, _, anchor = match[3].partition("#")
        place = (source.parent / target).resolve()
        if not target or "://" in target:
            return match[0]
        if not place.is_relative_to(ROOT / "docs") or not place.exists():
            return match[2]
        end = f"#{anchor}" if anchor else ""
        return f"{match[1]}[{match[2]}]({os.path.relpath(place, page.parent)}{end})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]*)\)", lead, markdown)


def outside(markdown: str, docs_dir: Path, page: str) -> dict[str, Path]:
    """Return the links of a page that lead to something outside of docs/, with what they lead to."""
    found = {}
    for link, _ in LINK.findall(markdown):
        target = (docs_dir / page).parent.joinpath(link).resolve()
        if target.is_relative_to(ROOT) and not target.is_relative_to(docs_dir) and target.exists():
            found[link] = target
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file that some page links to."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only where there is a site to build

    docs_dir = Path(config["docs_dir"])
    targets = {}
    for file in files.documentation_pages():
        for target in outside(file.content_string, docs_dir, file.src_uri).values():
            targets[page_of(target)] = target
    for uri, target in sorted(targets.items()):
        files.append(File.generated(config, uri, content=text_of(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - as mkdocs calls it
    """Lead the links of a page to the pages made above."""
    if page.file.src_uri.startswith(PREFIX + "/"):
        return markdown
    targets = outside(markdown, Path(config["docs_dir"]), page.file.src_uri)
    up = "../" * page.file.src_uri.count("/")
    return LINK.sub(
        lambda m: f"]({up}{page_of(targets[m[1]])}{m[2] or ''})" if m[1] in targets else m[0], markdown
    )
