"""The routes of the tab, asked as TensorBoard would, without TensorBoard."""

import gzip
import io
import json
from urllib.parse import quote

import pytest
from runs_on_disk import train, write_incident, write_steps

from gradsentinel.tensorboard_plugin.plugin import Tab

ROUTES = ["/runs", "/run", "/timeline", "/incidents", "/incident", "/compare"]


class Answer:
    def __init__(self, status, headers, body):
        self.code = int(status.split()[0])
        self.headers = dict(headers)
        assert len(self.headers) == len(headers)
        self.body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        assert int(self.headers["Content-Length"]) == len(body)

    @property
    def data(self):
        return json.loads(self.body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def ask(tab, route, method="GET", encoding="", **query):
    pairs = [
        (name, value)
        for name, values in query.items()
        for value in (values if isinstance(values, list) else [values])
    ]
    text = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in pairs)
    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": route,
        "QUERY_STRING": text,
        "HTTP_ACCEPT_ENCODING": encoding,
        "wsgi.input": io.BytesIO(),
    }
    told = []
    body = b"".join(tab.apps()[route](environ, lambda *start: told.append(start)))
    ((status, headers),) = told
    return Answer(status, headers, body)


def test_the_tab_appears_where_there_is_a_run(tmp_path):
    tab = Tab(str(tmp_path))
    assert not tab.is_active()
    write_steps(tmp_path / "deep" / "run", [1.0])
    assert tab.is_active()


@pytest.mark.parametrize("logdir", [None, "", "gs://bucket/runs", "/nowhere/at/all"])
def test_a_log_directory_that_is_not_here_has_no_runs(logdir):
    tab = Tab(logdir)
    assert not tab.is_active()
    answer = ask(tab, "/run", name="a")
    assert (answer.code, list(answer.data)) == (404, ["error"])


def test_every_route_answers_with_json_about_a_run(tmp_path):
    (incident,) = train(tmp_path / "a", steps=30, bad=(20,))
    tab = Tab(str(tmp_path))
    assert [one["name"] for one in ask(tab, "/runs").data] == ["a"]
    assert ask(tab, "/run", name="a", lang="zh").data["headline"].startswith("训练已正常结束")
    timeline = ask(tab, "/timeline", name="a", tag=["loss"], start=5, stop=9, points=3).data
    assert [one["tag"] for one in timeline["series"]] == ["loss"]
    assert [point[0] for point in timeline["series"][0]["points"]] == [6, 8, 9]
    assert ask(tab, "/incidents", name="a").data[0]["id"] == incident.id
    assert ask(tab, "/incident", name="a", id=incident.id).data["heat"]["layers"]["hot"] == ["1.weight"]
    assert [one["name"] for one in ask(tab, "/compare", name=["a", "a"], tag="loss").data["runs"]] == ["a"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "name", ["../secret", "..", "/etc", "link", "a/../../secret", "\0", "%2e%2e/secret", "a\\..\\..\\secret"]
)
def test_nothing_outside_of_the_log_directory_is_served(tmp_path, route, name):
    write_incident(tmp_path / "secret", 1, message="secret message")
    write_steps(tmp_path / "secret", [123.25])
    logs = tmp_path / "logs"
    write_steps(logs / "a", [1.0])
    (logs / "link").symlink_to(tmp_path / "secret")
    answer = ask(Tab(str(logs)), route, name=name, id="000001-nonfinite_gradient")
    assert b"secret message" not in answer.body
    assert b"123.25" not in answer.body
    assert answer.code == (200 if route == "/runs" else 404)


@pytest.mark.parametrize(
    "id", ["../../../secret/incidents/000001-nonfinite_gradient", "..", "", "/etc/passwd", "\0"]
)
def test_an_incident_is_looked_up_and_never_opened_by_its_name(tmp_path, id):  # noqa: A002
    write_incident(tmp_path / "secret", 1)
    write_incident(tmp_path / "logs" / "a", 1)
    assert ask(Tab(str(tmp_path / "logs")), "/incident", name="a", id=id).code == 404


def test_the_front_end_is_served_and_no_other_file(tmp_path):
    tab = Tab(str(tmp_path))
    served = {route: ask(tab, route) for route in tab.apps() if route not in ROUTES}
    assert {"/index.js", "/style.css", "/strings.en.json", "/strings.zh.json"} <= set(served)
    kinds = {
        "js": "text/javascript; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "json": "application/json; charset=utf-8",
    }
    for route, answer in served.items():
        assert answer.code == 200
        assert answer.headers["Content-Type"] == kinds[route.rpartition(".")[2]]
    assert not any("*" in route or "/" in route[1:] for route in tab.apps())


@pytest.mark.parametrize("route", ["/index.js", "/run", "/runs"])
def test_headers_keep_browsers_from_guessing_and_from_asking_elsewhere(tmp_path, route):
    for answer in (ask(Tab(str(tmp_path)), route), ask(Tab(str(tmp_path)), route, name="a")):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "Content-Type" in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("route", [*ROUTES, "/index.js"])
def test_only_reading_is_answered(tmp_path, route, method):
    answer = ask(Tab(str(tmp_path)), route, method=method)
    assert (answer.code, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_head_has_the_headers_and_no_body(tmp_path):
    told = []
    body = Tab(str(tmp_path)).apps()["/index.js"](
        {"REQUEST_METHOD": "HEAD"}, lambda *start: told.append(start)
    )
    assert list(body) == []
    assert int(dict(told[0][1])["Content-Length"]) > 0


@pytest.mark.parametrize(
    ("route", "query"),
    [
        ("/run", {}),
        ("/incident", {"name": "a"}),
        ("/timeline", {"name": "a", "points": "many"}),
        ("/timeline", {"name": "a", "start": "1.5"}),
    ],
)
def test_a_query_that_makes_no_sense_is_told_why(tmp_path, route, query):
    write_steps(tmp_path / "a", [1.0])
    answer = ask(Tab(str(tmp_path)), route, **query)
    assert answer.code == 400
    assert "=" in answer.data["error"]


def test_too_many_fields_are_refused(tmp_path):
    assert ask(Tab(str(tmp_path)), "/compare", name=["a"] * 1000).code == 400


def test_huge_numbers_are_cut(tmp_path):
    write_steps(tmp_path / "a", [1.0] * 20)
    answer = ask(Tab(str(tmp_path)), "/timeline", name="a", points=10**30, start=-(10**30), stop=10**30)
    assert len(answer.data["series"][0]["points"]) == 20


def test_long_answers_are_compressed_if_the_browser_likes(tmp_path):
    write_steps(tmp_path / "a", [float(number) for number in range(500)])
    plain, packed = (
        ask(Tab(str(tmp_path)), "/timeline", encoding=kind, name="a") for kind in ("", "gzip, br")
    )
    assert packed.headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in plain.headers
    assert plain.data == packed.data
    assert int(packed.headers["Content-Length"]) < int(plain.headers["Content-Length"]) / 2


def test_a_failure_of_ours_is_logged_and_told_without_details(tmp_path, monkeypatch, caplog):
    write_steps(tmp_path / "a", [1.0])

    def fail(*_):
        raise RuntimeError("the secret of the server")

    monkeypatch.setattr("gradsentinel.views.library.Views.run", fail)
    answer = ask(Tab(str(tmp_path)), "/run", name="a")
    assert (answer.code, answer.data) == (500, {"error": "the server failed: RuntimeError, see its log"})
    assert "the secret of the server" in caplog.text


def test_names_that_are_no_unicode_are_shown_as_well_as_they_can_be(tmp_path):
    write_incident(tmp_path / "a", 1, message="cut \udcff off")
    try:
        write_steps(tmp_path / "b\udcff", [1.0])
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    tab = Tab(str(tmp_path))
    assert {one["name"] for one in ask(tab, "/runs").data} == {"a", "b?"}
    assert ask(tab, "/incidents", name="a").data[0]["message"] == "cut ? off"
    assert ask(tab, "/run", name="b?").code == 404
