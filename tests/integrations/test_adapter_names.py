"""The names of the callbacks stand in three places, for editors to see them; they are the same in all."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from gradsentinel import Callback, ConfigurationError, callbacks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
OWN = {"RunSettings", "SentinelCallback", "adapt"}
BASES = {
    "lightning": ("lightning.pytorch.callbacks", "Callback"),
    "huggingface": ("transformers", "TrainerCallback"),
}


@pytest.fixture(params=BASES)
def ours(request):
    return importlib.import_module(f"gradsentinel.integrations.{request.param}")


def test_every_callback_has_a_native_class_of_its_name_and_arguments(ours):
    package, name = BASES[ours.__name__.rpartition(".")[2]]
    base = getattr(importlib.import_module(package), name)
    assert set(ours.__all__) == {*callbacks.__all__, *OWN}
    for name in callbacks.__all__:
        made = getattr(ours, name)
        assert issubclass(made, base), name
        assert (made.__name__, made.__module__) == (name, ours.__name__)
        assert made.kind is getattr(callbacks, name)
        assert made.__doc__ == made.kind.__doc__
        assert inspect.signature(made) == inspect.signature(made.kind)


def test_each_is_written_out_for_editors(ours):
    """One line a callback, and no code of its own."""
    tree = ast.parse(Path(ours.__file__).read_text(encoding="utf-8"))
    lines = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    written = {line for line in lines if "native(callbacks." in line}
    assert written == {f"{name} = native(callbacks.{name})" for name in callbacks.__all__}


def test_all_callbacks_of_the_package_are_public():
    folder = Path(callbacks.__file__).parent
    modules = [importlib.import_module(f"gradsentinel.callbacks.{path.stem}") for path in folder.glob("*.py")]
    made = {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, Callback)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
        and "__dataclass_params__" in vars(value)
        and not name.startswith("_")
    }
    assert set(callbacks.__all__) <= made


def test_attributes_are_those_inside_and_bad_values_are_refused_at_once(ours):
    one = ours.MagnitudeCallback(max_global_norm=1.0)
    assert (one.max_global_norm, ours.Rollback().known_good_steps) == (1.0, ())
    assert repr(one) == repr(one.callback)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = one.nonsense
    with pytest.raises(ConfigurationError, match="every=0"):
        ours.Rollback(every=0)
    with pytest.raises(ConfigurationError, match="timeout=0 must be above 0"):
        ours.RunSettings(timeout=0)


def test_one_of_your_own_is_carried_like_the_others(ours):
    class Mine(Callback):
        """Counts."""

    carried = ours.adapt(Mine())
    assert isinstance(carried, ours.SentinelCallback)
    assert (type(carried).__name__, type(carried).kind) == ("Mine", Mine)
    with pytest.raises(ConfigurationError, match=r"not a gradsentinel\.Callback"):
        ours.adapt(object())
