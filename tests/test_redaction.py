"""What is shown to strangers names nobody and no place."""

import getpass
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.redaction import harmless_variables, redact


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("9.2.0 in /usr/local/Ascend/cann, but", "9.2.0 in <path>, but"),
        ("source '/opt/my place/set_env.sh'", "source '<path>'"),
        ("libhccl.so: cannot open ~/lib/libhccl.so", "libhccl.so: cannot open <path>"),
        (r"FileNotFoundError: 'C:\Users\me\x.py'", "FileNotFoundError: '<path>'"),
        ('File "/home/me/a.py", line 3', 'File "<path>", line 3'),
        ("path=/data:/more", "path=<path>:<path>"),
        ("see https://intranet.example/wiki?x=1.", "see <path>"),
        ("connect to 10.0.7.12:29500 failed", "connect to <address> failed"),
        ("at fe80::1ff:fe23:4567:890a", "at <address>"),
        ("[2001:db8:0:0:1:2:3:4]", "[<address>]"),
        ("gpu-17.cluster.internal:29500 refused", "<address> refused"),
        ("the master secret-host said no", "the master <host> said no"),
        ("interface enp-x3 is down", "interface <hidden> is down"),
    ],
)
def test_what_names_a_place_is_taken_out(monkeypatch, text, left):
    monkeypatch.setenv("MASTER_ADDR", "secret-host.example")
    assert redact(text, hide=["enp-x3"]) == left


@pytest.mark.parametrize(
    "text",
    [
        "PASS retry: ends bit for bit, w/o a trace; 1/2 and and/or | a | b |",
        "torch 2.13.0+cpu, torch_npu 2.13.0.post3, Python 3.11.9",
        "dot_product_attention.py:1940 in layer 17",
        "plain 0.52 ms, host 0.61 ms; pip install 'torch-npu==2.13.*'",
        "CUBLAS_WORKSPACE_CONFIG :4096:8, bus 0000:C1:00.0 at 12:30:01",
    ],
)
def test_the_rest_stays(text):
    assert redact(text, hide=["true", ":4096:8", "a"]) == text


def test_this_user_and_this_machine_are_not_named(monkeypatch):
    monkeypatch.setenv("USER", "jane.doe")
    text = redact(f"jane.doe and {getpass.getuser()} on {socket.gethostname()}, jane.doe@there")
    assert text.startswith("<user> and <user> on <host>, <user>@")


def test_of_variables_only_switches_and_numbers_are_shown():
    harmless = {
        "HCCL_DETERMINISTIC": "true",
        "NPU_ASD_CONFIG": "enable:true,with_checksum:true",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "ASCEND_RT_VISIBLE_DEVICES": "0,1,2",
        "TASK_QUEUE_ENABLE": "2",
        "GRADSENTINEL_TOPOLOGY": "dp=2,pp=2",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    }
    assert harmless_variables(harmless) == harmless
    naming = ("/opt/cann", "10.0.0.1", "node17", "eth0", "fe80::1", "me@there", "C:\\x", "1.2.3.4:5", "")
    assert set(harmless_variables({f"HCCL_{i}": v for i, v in enumerate(naming)}).values()) == {"(set)"}


@given(st.lists(st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True), min_size=2, max_size=5))
def test_no_part_of_an_absolute_path_is_left(parts):
    assert redact(f"in '/{'/'.join(parts)}'") == "in '<path>'"


@given(st.text(max_size=80))
def test_what_was_taken_out_once_is_taken_out(text):
    once = redact(text)
    assert redact(once) == once
