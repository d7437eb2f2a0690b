"""Charts: every number lands inside the frame, what is not finite breaks a line and nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.trainers.report.history import trailing_mean
from turntree.trainers.report.svg import Line, bars, count, duration, line_chart, share

number = st.floats(-1e9, 1e9) | st.sampled_from([float("nan"), float("inf"), 0.0, 1e-12])


@given(st.lists(st.tuples(number, number), min_size=1, max_size=30), st.booleans(), st.booleans())
def test_every_point_lies_in_the_frame(points: list[tuple[float, float]], from_zero: bool, marked: bool) -> None:
    x, y = (np.array(column) for column in zip(*sorted(points, key=str)))
    svg = line_chart([Line("a<b", x, y, y - 1, y + 1, marked=marked)], x_label="x", from_zero=from_zero)
    if not svg:
        assert not np.isfinite(y).any() or not np.isfinite(x).any()
        return
    root = ET.fromstring(svg)
    for circle in root.iter("circle"):
        assert 45 <= float(circle.attrib["cx"]) <= 391
        assert 9 <= float(circle.attrib["cy"]) <= 185
    for path in root.iter("path"):
        values = [float(v) for v in re.findall(r"-?[\d.]+(?:e-?\d+)?", path.attrib["d"])]
        assert all(-1 <= value <= 401 for value in values)


def test_a_gap_breaks_line_and_band() -> None:
    y = np.array([1.0, 2.0, np.nan, 3.0, 4.0])
    svg = line_chart([Line("a", np.arange(5.0), y, y - 1, y + 1)], x_label="x")
    line = next(p for p in ET.fromstring(svg).iter("path") if p.attrib["class"] == "line")
    assert line.attrib["d"].count("M") == 2
    assert svg.count('class="band"') == 2


def test_a_long_line_is_thinned_to_its_ends() -> None:
    x = np.arange(5000.0)
    svg = line_chart([Line("a", x, x)], x_label="x")
    assert len(svg) < 20_000
    last = list(ET.fromstring(svg).iter("circle"))[-1]
    assert float(last.attrib["cx"]) == pytest.approx(390)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [(count(1234.0), "1.23k"), (count(12.0), "12"), (count(2.5e9), "2.5B"), (duration(40), "40 s"),
     (duration(600), "10 min"), (duration(9000), "2.5 h"), (share(0.25), "25%"), (share(0.123), "12.3%")],
)  # fmt: skip
def test_numbers_are_short(shown: str, expected: str) -> None:
    assert shown == expected


def test_bars_are_relative_and_escaped() -> None:
    html = bars([("<b>", 2.0, "two"), ("c", 1.0, "one"), ("d", float("nan"), "-")])
    assert "100.0%" in html
    assert "50.0%" in html
    assert "<b>" not in html


@given(st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), min_size=1, max_size=20), st.integers(1, 25))
def test_trailing_mean(values: list[float], window: int) -> None:
    data = np.array(values)
    found = trailing_mean(data, window)
    for i in range(len(data)):
        part = data[max(0, i + 1 - window) : i + 1]
        part = part[np.isfinite(part)]
        expected = part.mean() if part.size else np.nan
        np.testing.assert_allclose(found[i], expected, atol=1e-6)
