"""The terminal charts and the PNG: every curve a run can leave, in every terminal."""

import builtins
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from rich.table import Table

from gradsentinel.demo.canvas import Canvas, Scale
from gradsentinel.demo.charts import LossCurve, loss_chart, save_png, sparkline
from gradsentinel.demo.curve import common_scales

NAN = math.nan
CROSS = "\N{MULTIPLICATION SIGN}"
FALLING = [4.6 * 0.99**step for step in range(100)]
BROKEN = LossCurve("without", [*FALLING[:41], *[NAN] * 59], [(41, "bad record")])
CURVES = [
    LossCurve("no faults", FALLING),
    LossCurve("with GradSentinel", [*FALLING[:41], NAN, *FALLING[42:]], [(41, "bad record: skipped")]),
    BROKEN,
]


class Latin(io.StringIO):
    encoding = "latin-1"


def render(renderable, width=100, file=None, **options):
    console = Console(file=file or io.StringIO(), width=width, **options)
    console.print(renderable)
    return console.file.getvalue()


def test_panels_stand_in_a_row_if_there_is_room():
    text = render(loss_chart(CURVES))
    first = text.splitlines()[0]
    assert all(curve.name in first for curve in CURVES)
    assert max(len(line) for line in text.splitlines()) <= 100


def test_panels_are_stacked_in_a_narrow_terminal():
    text = render(loss_chart(CURVES), width=50)
    lines = text.splitlines()
    assert [sum(curve.name in line for line in lines) for curve in CURVES] == [1, 1, 1]
    assert not any("no faults" in line and "with GradSentinel" in line for line in lines)


def test_axes_verdicts_and_marks_are_labelled():
    text = render(loss_chart(CURVES), width=120)
    assert text.count("loss") == 5  # 3 axes and 2 verdicts
    assert text.count(" step ") == 7  # 3 axes, 2 marks, and the break twice
    assert "final loss 1.87" in text
    assert "NaN from step 41 on" in text
    assert "1 step 41  bad record: skipped" in text


def test_all_panels_have_the_same_scale():
    steps, losses = common_scales([LossCurve("a", [3.0, 1.0]), LossCurve("b", [2.0, 4.0, 2.5])])
    assert (steps, losses) == (Scale(0, 2), Scale(1.0, 4.0))


def test_a_run_that_blows_up_does_not_flatten_the_others():
    _, losses = common_scales([LossCurve("a", [4.0, 2.0]), LossCurve("b", [4.0, 1e30])])
    assert losses == Scale(2.0, 5.0)
    assert "final loss" in render(loss_chart([LossCurve("a", [4.0, 2.0, 1e30])]))


def test_without_unicode_there_is_only_ascii():
    text = render(loss_chart(CURVES), file=Latin())
    assert text.isascii()
    assert "*" in text
    assert "X" in text
    assert "^" in text
    assert render(sparkline([3.0, 2.0, NAN], 10), file=Latin()).isascii()


def test_colours_are_never_needed():
    coloured = render(loss_chart(CURVES), force_terminal=True, color_system="truecolor")
    assert "\x1b[1;31m" in coloured
    plain = render(loss_chart(CURVES), force_terminal=True, color_system="truecolor", no_color=True)
    assert "31m" not in plain
    assert "NaN from step 41 on" in plain


def test_markup_in_names_is_text():
    assert "[red]" in render(loss_chart([LossCurve("[red]", [1.0], [(0, "[bold]")])]))


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([], "no steps"),
        ([NAN], "NaN from step 0 on"),
        ([1.0, math.inf, NAN, math.inf], "Inf from step 1 on"),
        ([NAN, 2.0], "final loss 2.00"),
        ([0.0] * 5, "final loss 0.00"),
        ([-1e9, -2e9], "final loss -1500000000.00"),
        ([1e-12, 2e-12], "final loss 0.00"),
    ],
)
@pytest.mark.parametrize("width", [20, 100])
def test_no_curve_is_too_odd(losses, verdict, width, tmp_path):
    curves = [LossCurve("odd", losses, [(0, "here"), (10**6, "far away")])]
    assert curves[0].verdict == verdict
    assert "odd" in render(loss_chart(curves), width=width)
    assert save_png(curves, tmp_path / "odd.png") is not None


def test_no_curves_are_no_chart():
    assert render(loss_chart([])).strip() == ""


@given(
    st.lists(st.floats(-1e30, 1e30) | st.sampled_from([NAN, math.inf, -math.inf]), max_size=80),
    st.integers(1, 130),
    st.booleans(),
)
def test_any_losses_can_be_drawn_in_any_width(losses, width, ascii_only):
    curves = [LossCurve("a", losses), LossCurve("b", losses[: len(losses) // 2], [(3, "mark")])]
    text = render(loss_chart(curves), width=width, file=Latin() if ascii_only else None)
    assert all(len(line) <= width for line in text.splitlines())


def test_steps_may_start_anywhere():
    curve = LossCurve("late", [1.0, NAN, 2.0, NAN, NAN], first_step=100)
    assert curve.broken_from == 103
    assert curve.crosses == [(101, 1.0), (103, 1.5)]
    assert " 100 " in render(loss_chart([curve]))


def test_a_curve_that_goes_on_has_crosses_but_no_break():
    assert CURVES[1].broken_from is None
    assert [step for step, _ in CURVES[1].crosses] == [41]
    assert "NaN" not in CURVES[1].verdict


def test_the_break_is_where_the_losses_end():
    canvas_rows = [line for line in render(loss_chart([BROKEN]), width=106).splitlines() if "╎" in line]
    assert len(canvas_rows) >= 8
    assert {line.index("╎") for line in canvas_rows} == {4 + round(41 / 99 * 101)}


def test_a_line_rises_from_the_bottom_left_to_the_top_right():
    canvas = Canvas(2, 2, ascii_only=False)
    canvas.line([(0.0, 0.0), (1.0, 1.0)], "")
    assert [line.plain for line in canvas.lines()] == [" ⡜", "⡜ "]


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (Scale(1.8, 4.6), ["2", "3", "4"]),
        (Scale(0.0, 1.0), ["0.0", "0.5", "1.0"]),
        (Scale(0.1, 0.18), ["0.10", "0.12", "0.14", "0.16", "0.18"]),
        (Scale(-1.0, 1.0), ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        (Scale(0.0, 4e9), ["0", "1e+09", "2e+09", "3e+09", "4e+09"]),
    ],
)
def test_ticks_are_round(scale, labels):
    assert [label for _, label in scale.ticks(4)] == labels


@given(st.lists(st.floats(-1e30, 1e30), max_size=5), st.integers(1, 10))
def test_there_are_about_as_many_ticks_as_asked_for(values, about):
    scale = Scale.around(values)
    ticks = scale.ticks(about)
    assert len(ticks) <= about + 2
    assert all(-1e-6 <= scale.place(value) <= 1 + 1e-6 for value, _ in ticks)


def test_a_sparkline_falls_and_shows_what_is_missing():
    assert render(sparkline([8, 7, 6, 5, 4, 3, 2, 1], 20)).strip() == "█▇▆▅▄▃▂▁"
    assert render(sparkline([2.0, 1.0, NAN, math.inf], 4)).strip() == "█▁" + 2 * CROSS
    assert render(sparkline([1.0] * 10, 5)).strip() == "▅▅▅▅▅"
    assert render(sparkline([2.0, 2.0, 1.0, NAN], 2)).strip() == "▅" + CROSS
    assert render(sparkline([], 5)).strip() == ""


def test_a_sparkline_fits_into_a_table():
    table = Table.grid()
    table.add_row("loss ", sparkline(FALLING, 30), "!")
    assert render(table).splitlines()[0].index("!") == 35


def test_the_png_is_a_picture(tmp_path):
    path = save_png(CURVES, tmp_path / "loss.png", title="Three runs, $1 and more_")
    assert path == tmp_path / "loss.png"
    with Image.open(path) as image:
        image.verify()
        assert image.format == "PNG"
        assert image.width > 2 * image.height > 800


def test_a_png_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no curves"):
        save_png([], tmp_path / "loss.png")


def test_without_matplotlib_there_is_no_png(tmp_path, monkeypatch):
    original = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert save_png(CURVES, tmp_path / "loss.png") is None
    assert not (tmp_path / "loss.png").exists()
