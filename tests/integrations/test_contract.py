"""The contract of all adapters, held on each; on Megatron's in its own folder."""

import pytest
from contract import CLAUSES, cases, hold
from drivers import DRIVERS
from training import Task

from loops import differences

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "clause"),
    [pytest.param(driver, name, id=f"{driver.name}: {name}") for driver in DRIVERS for name in cases(driver)],
)
def test_every_adapter_keeps_the_contract(driver, clause, tmp_path):
    hold(clause, driver, tmp_path)


def test_what_an_adapter_lacks_takes_nothing_else_from_it():
    whole = [driver.name for driver in DRIVERS if not driver.lacks.keys() - {"checkpoint", "draws"}]
    assert whole == [driver.name for driver in DRIVERS if driver.name != "attached"]
    kept = {name for driver in DRIVERS for name in cases(driver)}
    assert kept == CLAUSES.keys()


def test_all_adapters_train_the_same(tmp_path):
    """The frameworks do the same arithmetic, so what is compared above is comparable."""
    able = [driver for driver in DRIVERS if "accumulate" not in driver.lacks]
    ends = [one.train(Task(accumulate=2), tmp_path / one.name, None).net.state_dict() for one in able]
    assert [differences(ends[0], end) for end in ends[1:]] == [[]] * (len(ends) - 1)
