"""The plugin in TensorBoard itself, in this process: found, active, and within what TensorBoard allows."""

import http.client
import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from runs_on_disk import train, write_incident, write_steps

program = pytest.importorskip("tensorboard.program", reason="tensorboard is not installed")
default = pytest.importorskip("tensorboard.default", reason="tensorboard is not installed")


def get(port, path):
    """Ask without tidying the path up, as a browser would do."""
    connection = http.client.HTTPConnection("localhost", port, timeout=60)
    connection.putrequest("GET", path)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """A TensorBoard with the plugins it finds by itself; the log directory and the port."""
    logdir = tmp_path_factory.mktemp("logs")
    train(logdir / "a", steps=12, bad=(5,))
    write_incident(logdir.parent / "secret", 1, message="secret message")
    (logdir / "link").symlink_to(logdir.parent / "secret")
    (found,) = entry_points(group="tensorboard_plugins", name="gradsentinel")
    plugins = default.get_plugins()  # those that are installed, which are found by their entry points
    assert found.load() in plugins
    server = program.TensorBoard(plugins=plugins)
    server.configure(argv=[None, "--logdir", str(logdir), "--port", "0", "--load_fast", "false"])
    return logdir, int(server.launch().rstrip("/").rpartition(":")[2])


def test_the_tab_is_listed_as_active(board):
    listing = json.loads(get(board[1], "/data/plugins_listing")[1])["gradsentinel"]
    assert (listing["enabled"], listing["tab_name"]) == (True, "GradSentinel")
    assert listing["loading_mechanism"] == {
        "type": "IFRAME",
        "module_path": "/data/plugin/gradsentinel/index.js",
    }


def test_the_frame_loads_the_front_end_and_forbids_other_sites(board):
    answer, body = get(board[1], "/data/plugin_entry.html?name=gradsentinel")
    assert b'import("./index.js")' in body
    policy = answer.headers["Content-Security-Policy"]
    assert "connect-src 'self'" in policy
    answer, body = get(board[1], "/data/plugin/gradsentinel/index.js")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
    assert b"render" in body


def test_data_comes_through_tensorboard(board):
    answer, body = get(board[1], "/data/plugin/gradsentinel/run?name=a")
    assert (answer.status, json.loads(body)["numbers"]["incidents"]) == (200, 1)


@pytest.mark.parametrize(
    "path",
    [
        "run?name=../secret",
        "run?name=..%2Fsecret",
        "run?name=link",
        "incidents?name=%2e%2e/secret",
        "../../../../secret/incidents/000001-nonfinite_gradient/incident.json",
        "%2e%2e/%2e%2e/secret/incidents/000001-nonfinite_gradient/incident.json",
        "index.js/../../../secret",
        "..%5c..%5csecret",
        "__init__.py",
        "",
    ],
)
def test_no_path_leads_out(board, path):
    answer, body = get(board[1], f"/data/plugin/gradsentinel/{path}")
    assert answer.status == 404
    assert b"secret message" not in body


def test_without_tensorboard_nothing_but_the_tab_is_missing():
    """TensorBoard brings the base class, and asks for it: only then is it needed."""
    code = (
        "import sys\n"
        "sys.modules['tensorboard'] = None\n"
        "import gradsentinel.tensorboard_plugin as plugin, gradsentinel.views.library\n"
        "try:\n    plugin.GradSentinelPlugin\nexcept ImportError:\n    print('no tab')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert done.stdout == "no tab\n"


def test_the_tab_is_listed_without_importing_torch(tmp_path):
    """It would make every TensorBoard start slowly, also where there is no run of ours."""
    write_steps(tmp_path / "a", [1.0])
    code = (
        "import sys\n"
        "from gradsentinel.tensorboard_plugin.plugin import Tab\n"
        "tab = Tab(sys.argv[1])\n"
        "tab.apps()\n"
        "print(tab.is_active(), 'torch' in sys.modules)\n"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run([sys.executable, "-c", code, empty], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert done.stdout == "False False\n"
