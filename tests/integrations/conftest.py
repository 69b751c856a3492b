"""Lets the tests of several ranks find what runs them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "multiprocess"))
pytest.register_assert_rewrite("contract", "outcomes")
