"""One self-contained file with the pictures of a run: the TensorBoard tab with its data inside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import re
from collections.abc import Iterable
from typing import Any

from gradsentinel._version import __version__
from gradsentinel.errors import StoreError
from gradsentinel.views.bundle_js import bundle
from gradsentinel.views.files import ViewError
from gradsentinel.views.gather import Gathered, gather, gravest
from gradsentinel.views.strings import LANGUAGES, Strings, asset

_POINTS = 2_000
_MOST_PAGES = 200
"""Of more incidents the gravest have a page; all are in the list."""
_AROUND = 200
"""So many steps before and after an incident are in the file one by one."""
_SMALL = 1 << 16
"""Characters of JSON that are not worth compressing: they stay readable in the file."""
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_TEMPLATE = """\
<!doctype html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="gradsentinel {version}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="gs-root" class="gs-app"><noscript><p>{headline}</p></noscript></div>
{data}
<script>{script}</script>
</body>
</html>
"""


def report(run_dir: str | os.PathLike[str], *, lang: str = "en", incident: str | None = None) -> str:
    """Return the report on a run as one HTML file that asks nobody for anything.

    Args:
        run_dir: the directory that `run_dir=` named; it is read only.
        lang: "en" or "zh", the language it opens in; both are inside.
        incident: the id of an incident: only its page is inside, beside the overview, and it opens there.

    Raises:
        StoreError: if there is no run, or no such incident.
        ConfigurationError: for another language.
    """
    words = Strings(lang)
    run = gather(run_dir)
    try:
        pieces = dict(_pieces(run, incident))
        headline = run.run(lang)["headline"]
    except ViewError as error:
        raise StoreError(f"{run_dir}: {error}") from error
    style = asset("style.css")
    script = f"{bundle('report_main.js', asset)}gradsentinel.main({json.dumps(lang)});\n"
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(script)}",
            f"style-src {_digest(style)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return _TEMPLATE.format(
        lang="zh-CN" if words.lang == "zh" else words.lang,
        policy=policy,
        version=__version__,
        title=html.escape(f"GradSentinel · {run.name}"),
        style=style,
        headline=html.escape(headline),
        data="\n".join(_element(name, value) for name, value in pieces.items()),
        script=script,
    )


def _pieces(run: Gathered, incident: str | None) -> Iterable[tuple[str, Any]]:
    """Yield what the pages read, by the names under which they look for it."""
    rows = run.incidents("en")
    if incident is None:
        chosen = [one["id"] for one in gravest(rows)][:_MOST_PAGES]
    elif any(one["id"] == incident for one in rows):
        chosen = [incident]
    else:
        raise StoreError(f"there is no incident {incident!r} that can be read")
    pages = {id_: f"incident.{number}" for number, id_ in enumerate(chosen)}
    for lang in LANGUAGES:
        overview = run.run(lang)
        if incident is None and len(chosen) < len(rows):
            note = Strings(lang)("report.limited", kept=len(chosen), all=len(rows))
            overview["problems"] = [note, *overview["problems"]]
        yield f"run.{lang}", overview
        yield f"incidents.{lang}", run.incidents(lang)
        yield f"strings.{lang}", json.loads(asset(f"strings.{lang}.json"))
    start = None if incident is None else incident
    runs = [{"name": run.name, "state": overview["state"], "updated": overview["updated"]}]
    yield "about", {"schema": 1, "version": __version__, "runs": runs, "pages": pages, "start": start}
    yield "timeline", run.timeline(_POINTS)
    usual: dict[int, Any] = {}
    for id_, name in pages.items():
        yield name, _both(run, id_, usual)
    yield "ranks", list(usual.values())


def _both(run: Gathered, id_: str, usual: dict[int, Any]) -> dict[str, Any]:
    """Return one incident: what is the same in all languages once, the rest by language."""
    told = {lang: _flat(run.incident(id_, lang), usual) for lang in LANGUAGES}
    first = told[LANGUAGES[0]]
    shared = {key: value for key, value in first.items() if all(one[key] == value for one in told.values())}
    own = {
        lang: {key: value for key, value in one.items() if key not in shared} for lang, one in told.items()
    }
    return {"shared": {**shared, "around": run.around(first["place"], _AROUND)}, **own}


def _flat(incident: dict[str, Any], usual: dict[int, Any]) -> dict[str, Any]:
    """Return an incident whose map of ranks holds what is unlike the usual one: a large job has many."""
    heat = incident.pop("heat")
    ranks = dict(heat["ranks"])
    cells = {cell["rank"]: cell for cell in ranks.pop("cells")}
    for rank, cell in cells.items():
        usual.setdefault(rank, {**cell, "hot": 0.0, "why": ""})
    unlike = [cell for rank, cell in cells.items() if cell != usual[rank]]
    ranks |= {"unlike": unlike, "present": _stretches(cells)}
    return {**incident, "layers": heat["layers"], "ranks": ranks}


def _stretches(ranks: Iterable[int]) -> list[list[int]]:
    """Return the numbers as stretches, first and last of each."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def _element(name: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    encoding = ""
    if len(text) > _SMALL and not name.startswith("strings."):
        # "surrogatepass" would not be UTF-8 to a browser; names that are not text are escaped like the rest.
        packed = gzip.compress(_escaped(text).encode(), compresslevel=6, mtime=0)
        text, encoding = base64.b64encode(packed).decode("ascii"), ' data-encoding="gzip"'
    return f'<script type="application/json" data-name="{name}"{encoding}>{_escaped(text)}</script>'


def _escaped(text: str) -> str:
    """Return JSON that cannot end the element it stands in, and that is text in any case."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
