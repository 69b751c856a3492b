"""npu-smi: what it prints, as fixtures written by hand to the formats of its manual, and how it may fail."""

import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.devices import device_of
from gradsentinel.devices.health import HealthUnavailable
from gradsentinel.devices.npu import Npu
from gradsentinel.devices.npu_smi import VISIBLE, NpuSmi, ask
from gradsentinel.devices.npu_tables import Chip, Numbers, parse_ecc, parse_numbers, parse_table
from gradsentinel.devices.nvml import Nvml

PRINTED = Path(__file__).parent / "npu_smi"
LAYOUTS = ("one_chip", "two_chips", "own_columns", "with_device")


def printed(name):
    return (PRINTED / f"{name}.txt").read_text()


def write_tool(folder, tables, *, ecc="", numbers="", status=0, before=""):
    """Make an npu-smi that prints these texts in turn, an ECC answer, and which device is which chip."""
    tool = folder / "npu-smi"
    data = {"tables": tables if isinstance(tables, list) else [tables], "ecc": ecc, "status": status}
    data["numbers"] = numbers
    tool.write_text(
        f"#!{sys.executable}\nimport sys, pathlib\n{before}\ndata = {data!r}\n"
        "if '-t' in sys.argv:\n    print(data['ecc'], end='')\n"
        "elif '-m' in sys.argv:\n    print(data['numbers'], end='')\n    sys.exit(not data['numbers'])\n"
        "else:\n"
        "    count = pathlib.Path(__file__).with_suffix('.count')\n"
        "    n = int(count.read_text()) if count.exists() else 0\n"
        "    count.write_text(str(n + 1))\n"
        "    print(data['tables'][min(n, len(data['tables']) - 1)], end='')\n"
        "    sys.exit(data['status'])\n"
    )
    tool.chmod(0o755)
    return str(tool)


# -- tables -------------------------------------------------------------------------------------------


def test_a_table_without_physical_numbers():
    assert parse_table(printed("one_chip")) == [
        Chip(npu=0, name="910B3", health="OK", bus="0000:C1:00.0", power=93.7, temperature=41.0),
        Chip(npu=1, name="910B3", health="Warning", bus="0000:01:00.0", power=101.2, temperature=88.0),
        Chip(npu=2, name="910B3", health="OK", bus="0000:C2:00.0", power=90.5, temperature=39.0),
    ]


def test_a_table_of_cards_with_two_chips():
    chips = parse_table(printed("two_chips"))
    assert [(c.npu, c.chip, c.physical) for c in chips] == [(4, 0, 8), (4, 1, 9), (5, 0, 10), (5, 1, 11)]
    assert [c.health for c in chips] == ["OK", "Alarm", "OK", "OK"]
    assert [c.power for c in chips] == [171.9, None, 168.4, None]
    assert [c.temperature for c in chips] == [37, 36, None, 35]  # 32765 is a sensor that was not read


def test_a_table_with_a_column_for_the_number():
    chips = parse_table(printed("own_columns"))
    assert [(c.npu, c.name, c.health, c.bus) for c in chips] == [
        (0, "Ascend950", "OK", "0000:0A:00.0"),
        (1, "Ascend950", "OK", "0000:0B:00.0"),
    ]
    assert [c.temperature for c in chips] == [48, 47]


def test_a_table_of_cards_for_inference():
    chips = parse_table(printed("with_device"))
    assert [(c.npu, c.chip, c.physical, c.name) for c in chips] == [
        (2, 0, 0, "310P3"),
        (2, 1, 1, "310P3"),
        (5, 0, 2, "310P3"),
    ]
    assert [(c.power, c.temperature) for c in chips] == [(None, 48), (None, 47), (None, 51)]


def test_power_and_temperature_stand_where_the_heading_says():
    text = (
        "| NPU Name | Health | Hugepages-Usage(page) Temp (C) Power (W) |\n"
        "| Chip | Bus-Id | AICore(%) |\n"
        "| 7 Ascend 910B3 | OK | 15 / 15 41 93.7 |\n| 0 | 0000:C1:00.0 | 12 |\n"
    )
    (chip,) = parse_table(text)
    assert (chip.npu, chip.name, chip.power, chip.temperature) == (7, "Ascend 910B3", 93.7, 41)


def test_a_card_whose_second_row_is_lost_is_nobody_s():
    lines = [line for line in printed("two_chips").splitlines() if "| 1     9 " not in line]
    assert [(c.npu, c.chip) for c in parse_table("\n".join(lines))] == [(4, 0), (5, 0), (5, 1)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("change", ["narrow", "wide", "quoted", "crlf"])
def test_widths_do_not_matter(name, change):
    text = printed(name)
    other = {
        "narrow": lambda: "\n".join(" ".join(line.split()) for line in text.splitlines()),
        "wide": lambda: text.replace(" | ", "        |  ").replace("  ", "      "),
        "quoted": lambda: "\n".join("> " + line for line in text.splitlines()),
        "crlf": lambda: text.replace("\n", "\r\n"),
    }[change]()
    assert other != text
    assert parse_table(other) == parse_table(text)


def test_a_machine_with_many_cards():
    rows = [
        f"| {n} Ascend910 | OK | {100 + n}.5 {30 + n} 0 / 0 |\n"
        f"| {c} {2 * n + c} | 0000:{n:02X}:0{c}.0 | 0 0 / 0 1 / 2 |"
        for n, c in itertools.product(range(64), range(2))
    ]
    chips = parse_table("\n".join(rows))
    assert [c.physical for c in chips] == list(range(128))
    assert chips[77].temperature == 30 + 38


def test_bus_and_health_that_a_virtual_machine_hides():
    (chip,) = parse_table("| 0  910B4 | NA | - NA 0 / 0 |\n| 0 | NA | 0  0 / 0  10 / 20 |\n")
    assert chip == Chip(npu=0, name="910B4", health="NA")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_table_cut_short_gives_the_rows_before_the_cut(name):
    text = printed(name)
    whole = parse_table(text)
    for end in range(0, len(text), 7):
        chips = parse_table(text[:end])
        for chip, full in zip(chips[:-1], whole, strict=False):
            assert chip == full
        assert len(chips) <= len(whole)


@given(st.text(alphabet=st.sampled_from("| 0123456789/.:-OKAlarmNPU\n\tCD"), max_size=400))
def test_nonsense_is_never_an_error(text):
    for chip in parse_table(text):
        assert chip.npu >= 0
        assert chip.temperature is None or -50 <= chip.temperature <= 200
    assert all(count >= 0 for counters in parse_ecc(text).values() for count in counters.values())


# -- counters -------------------------------------------------------------------------------------------


def test_counters_of_one_chip():
    (counters,) = parse_ecc(printed("ecc_one_chip")).values()
    assert counters["HBM Single Bit Error Count"] == 17
    assert counters["HBM Double Bit Isolated Pages Count"] == 3
    assert not {"NPU ID", "Chip Count", "Chip ID"} & counters.keys()


def test_counters_stand_above_the_number_of_their_chip():
    by_chip = parse_ecc(printed("ecc_two_chips"))
    assert {chip: found["HBM Single Bit Error Count"] for chip, found in by_chip.items()} == {0: 5, 1: 6}
    assert "HBM Single Bit Aggregate Total Err Cnt" not in by_chip[0]  # 2**32 - 1: it has run full


def test_or_below_it():
    text = "Chip ID : 0\nHBM Double Bit Error Count : 1\nChip ID : 1\nHBM Double Bit Error Count : 2\n"
    assert parse_ecc(text) == {
        0: {"HBM Double Bit Error Count": 1},
        1: {"HBM Double Bit Error Count": 2},
    }


def test_a_chip_whose_counters_have_all_run_full_takes_none_of_the_next_one_s():
    text = (
        "HBM Double Bit Error Count : 4294967295\nChip ID : 0\nHBM Double Bit Error Count : 2\nChip ID : 1\n"
    )
    assert parse_ecc(text) == {1: {"HBM Double Bit Error Count": 2}}


def test_counters_whose_chip_was_cut_off_are_nobody_s():
    whole = printed("ecc_two_chips")
    cut = whole[: whole.rindex("Chip ID")]
    assert parse_ecc(cut) == {0: parse_ecc(whole)[0]}


def test_counters_of_another_card_are_left_out():
    both = printed("ecc_two_chips") + "\n" + printed("ecc_one_chip")
    assert {npu: sorted(parse_ecc(both, npu=npu)) for npu in (4, 1, 7)} == {4: [0, 1], 1: [0], 7: []}
    assert parse_ecc(both, npu=1)[0]["HBM Single Bit Error Count"] == 17
    assert parse_ecc(both, npu=4)[0]["HBM Single Bit Error Count"] == 5


def test_counters_that_name_no_chip():
    assert parse_ecc(printed("ecc_nameless"))[0]["HBM Double Bit Next-Isolated Pages Count"] == 1


# -- numbers --------------------------------------------------------------------------------------------


def test_which_chip_is_which_device():
    assert parse_numbers(printed("numbers_one_chip")) == [
        Numbers(npu=npu, chip=0, logic=npu) for npu in (0, 1, 2)
    ]
    assert parse_numbers(printed("numbers_two_chips")) == [
        Numbers(npu=4, chip=0, logic=2, physical=8),
        Numbers(npu=4, chip=1, logic=3, physical=9),
        Numbers(npu=5, chip=0, logic=0, physical=10),
        Numbers(npu=5, chip=1, logic=1, physical=11),
    ]


@pytest.mark.parametrize("name", ["numbers_one_chip", "numbers_two_chips"])
def test_widths_of_the_numbers_do_not_matter(name):
    text = printed(name)
    assert parse_numbers("\n".join(" ".join(line.split()) for line in text.splitlines())) == parse_numbers(
        text
    )


# -- the tool -------------------------------------------------------------------------------------------


def test_a_reading(tmp_path):
    tool = write_tool(
        tmp_path, printed("one_chip"), ecc=printed("ecc_one_chip"), numbers=printed("numbers_one_chip")
    )
    reading = NpuSmi(1, tool=tool).read()
    assert (reading.card, reading.name, reading.health) == ("npu 1", "910B3", "Warning")
    assert (reading.temperature, reading.power, reading.healthy) == (88, 101.2, False)
    assert reading.counters["HBM Double Bit Error Count"] == 1
    assert reading.notes == ("npu 1 chip 0, bus 0000:01:00.0",)
    assert "HBM Double Bit Error Count 1" in reading.words
    assert reading.time


def test_each_chip_of_a_card_has_its_own_counters(tmp_path):
    tool = write_tool(tmp_path, printed("two_chips"), ecc=printed("ecc_two_chips"))
    readings = [NpuSmi(place, tool=tool).read() for place in (0, 1)]
    assert [r.counters["HBM Double Bit Error Count"] for r in readings] == [0, 2]
    assert readings[1].notes[0].startswith("npu 4 chip 1")


@pytest.mark.parametrize(
    ("visible", "index", "card", "npu"),
    [
        ("", 2, "npu 2", "npu 5 chip 0"),
        ("1,3", 1, "npu 3", "npu 5 chip 1"),
        ("2-3", 0, "npu 2", "npu 5 chip 0"),
        ("8,9,10,11", 3, "npu 11", "npu 5 chip 1"),  # a container whose rows are fewer than the numbers
        ("nonsense", 0, "npu 0", "npu 4 chip 0"),
    ],
)
def test_which_row_is_mine(tmp_path, monkeypatch, visible, index, card, npu):
    monkeypatch.setenv(VISIBLE, visible)
    reading = NpuSmi(index, tool=write_tool(tmp_path, printed("two_chips"))).read()
    assert reading.card == card
    assert reading.notes[0].startswith(npu)


@pytest.mark.parametrize(
    ("visible", "index", "npu"),
    [
        ("", 0, "npu 5 chip 0"),
        ("", 3, "npu 4 chip 1"),
        ("1,2", 1, "npu 4 chip 0"),
        ("10,11", 1, "npu 5 chip 1"),  # physical numbers, where the driver counts four devices
    ],
)
def test_the_driver_tells_which_row_is_mine(tmp_path, monkeypatch, visible, index, npu):
    monkeypatch.setenv(VISIBLE, visible)
    tool = write_tool(tmp_path, printed("two_chips"), numbers=printed("numbers_two_chips"))
    assert NpuSmi(index, tool=tool).read().notes[0].startswith(npu)


def shuffled(text, order):
    """Return the table with its chips, two rows each, in another order."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    first = next(place for place, line in enumerate(rows) if line.split()[1].isdigit())
    pairs = [rows[place : place + 2] for place in range(first, len(rows), 2)]
    pairs = [pair for pair in pairs if len(pair) == 2 and pair[0].split()[1].isdigit() and "OK" in pair[0]]
    return "\n".join([*rows[:first], *itertools.chain(*(pairs[place] for place in order))])


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["", "numbers_two_chips"])
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2)])
def test_the_order_of_the_rows_does_not_matter(tmp_path, order, numbers):
    whole = printed("two_chips").replace("Alarm", "OK   ")
    asked = {"ecc": printed("ecc_two_chips"), "numbers": printed(numbers) if numbers else ""}
    readings = []
    for name, text in (("whole", whole), ("shuffled", shuffled(whole, order))):
        (tmp_path / name).mkdir()
        tool = write_tool(tmp_path / name, text, **asked)
        readings.append([replace(NpuSmi(place, tool=tool).read(), time="") for place in range(4)])
    assert readings[0] == readings[1]
    assert len({reading.notes[0] for reading in readings[0]}) == 4


def test_a_card_that_fell_off_the_bus_is_not_taken_for_the_next_one(tmp_path):
    text = printed("one_chip")
    without = "\n".join(line for line in text.splitlines() if "910B3" not in line or "| 1 " not in line)
    tool = write_tool(tmp_path, [text, without], numbers=printed("numbers_one_chip"))
    source = NpuSmi(1, tool=tool)
    assert source.read().temperature == 88
    with pytest.raises(HealthUnavailable, match="shows nothing of device 1"):
        source.read()


def test_a_number_that_was_counted_says_so(tmp_path):
    tool = write_tool(tmp_path, printed("one_chip"))
    assert "its number was taken from the order of the cards" in NpuSmi(0, tool=tool).read().notes
    tool = write_tool(tmp_path, printed("one_chip"), numbers=printed("numbers_one_chip"))
    assert "its number was taken from the order of the cards" not in NpuSmi(0, tool=tool).read().notes


def test_a_card_without_counters_still_has_a_reading(tmp_path):
    tool = write_tool(tmp_path, printed("one_chip"), before="if '-t' in sys.argv: sys.exit('not supported')")
    reading = NpuSmi(0, tool=tool).read()
    assert reading.temperature == 41
    assert reading.counters == {}
    assert "not supported" in reading.notes[-1]


@pytest.mark.parametrize(
    ("tables", "status", "why"),
    [
        ("", 0, "it is silent"),
        ("\x00\xff garbage |||| 7", 0, "garbage"),
        ("\ndcmi module initialize failed. ret is -8005\n", 8, "status 8: dcmi module"),
        (printed("one_chip")[:500], 0, "shows nothing of device 2"),
    ],
)
def test_an_answer_without_the_card_says_so(tmp_path, tables, status, why):
    with pytest.raises(HealthUnavailable, match=why):
        NpuSmi(2, tool=write_tool(tmp_path, tables, status=status)).read()


def test_a_missing_tool_says_where_it_comes_from(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("gradsentinel.cann._TOOL_PLACES", ())
    with pytest.raises(HealthUnavailable, match="comes with the Ascend driver"):
        NpuSmi(0).read()
    write_tool(tmp_path, printed("one_chip"))
    assert NpuSmi(0).read().temperature == 41


def test_a_file_that_is_no_program(tmp_path):
    (tmp_path / "npu-smi").write_text("")
    with pytest.raises(HealthUnavailable, match="cannot be run"):
        NpuSmi(0, tool=str(tmp_path / "npu-smi")).read()


def test_a_tool_that_hangs_is_left_and_takes_its_children_along(tmp_path):
    tool, child = tmp_path / "npu-smi", tmp_path / "child"
    tool.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {child}.new\nmv {child}.new {child}\nwait\n")
    tool.chmod(0o755)
    with pytest.raises(HealthUnavailable, match="did not answer within 3 s"):
        ask((str(tool), "info"), 3.0)
    stat = Path(f"/proc/{child.read_text().strip()}/stat")
    for _ in range(3000):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break  # dead; whoever has inherited it may be slow
        except OSError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the child of the tool is still there")


def test_a_tool_that_never_stops_printing_is_read_to_a_bound(tmp_path):
    row = printed("one_chip")
    tool = write_tool(tmp_path, "", before=f"print({row!r})\nsys.stdout.write('x' * (4 << 20))\nsys.exit()")
    assert NpuSmi(0, tool=tool).read().temperature == 41


def test_who_is_asked_for_which_device():
    npu = SimpleNamespace(type="npu", index=3)  # torch has no name for it before torch_npu is loaded
    source = Npu(npu).health_source()
    assert isinstance(source, NpuSmi)
    assert source.card == "npu 3"
    assert isinstance(device_of("cuda:1").health_source(), Nvml)
    assert [device_of(name).health_source() for name in ("cpu", "meta", "xpu", "mps")] == [None] * 4
