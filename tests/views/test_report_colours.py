"""Colours: text stands out from its ground, and severities differ for every kind of colour vision."""

import itertools
import re

import pytest

from gradsentinel.views.strings import asset

STYLE = asset("style.css")


def variables(tone):
    """The colours of a tone: what the light one sets, with what the dark one changes."""
    light, dark = re.findall(r'^:root(?:\[data-tone="dark"\])? \{(.*?)^\}', STYLE, re.MULTILINE | re.DOTALL)[
        :2
    ]
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    return found | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark)) if tone == "dark" else found


def linear(colour):
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def contrast(one, other):
    """Contrast as in WCAG 2.1, section 1.4.3."""
    high, low = sorted(
        (
            sum(part * value for part, value in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))
            for colour in (one, other)
        ),
        reverse=True,
    )
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}


def seen(colour, matrix):
    return [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in matrix]


@pytest.mark.parametrize("tone", ["light", "dark"])
def test_text_stands_out_from_its_ground(tone):
    colours = variables(tone)
    pairs = [(ink, ground) for ink in ("ink", "ink-2") for ground in ("bg", "panel", "sunk")]
    pairs += [("ink-3", "panel"), ("accent", "panel"), ("accent", "accent-soft"), ("critical-ink", "panel")]
    pairs += [(f"{name}-ink", f"{name}-soft") for name in ("warning", "error", "critical", "good")]
    pairs += [("ink", "warning-soft"), ("ink-2", "critical-soft"), ("bad", "panel")]
    weak = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: value for pair, value in weak.items() if value < 4.5} == {}


@pytest.mark.parametrize("tone", ["light", "dark"])
def test_marks_stand_out_from_the_page(tone):
    colours = variables(tone)
    marks = ["warning", "error", "critical", "good", "accent", "hot", "bad"]
    assert {
        name: contrast(colours[name], colours["panel"])
        for name in marks
        if contrast(colours[name], colours["panel"]) < 3
    } == {}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("tone", ["light", "dark"])
def test_severities_differ_for_every_kind_of_colour_vision(tone, vision):
    colours = variables(tone)
    for one, other in itertools.combinations(("warning", "error", "critical"), 2):
        a, b = (seen(colours[name], VISION[vision]) for name in (one, other))
        assert sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 > 0.1, (one, other)
