"""The curve: a valid picture for any state of a run, the same bytes for the same data."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from turntree.errors import DataError
from turntree.trainers.report.plots import Series, plot_curve

CURVE = Series("at2po", [0, 1000, 2000], [0.3, 0.5, 0.6], [0.2, 0.4, 0.5], [0.4, 0.6, 0.7])


def drawn(path: Path) -> np.ndarray:
    picture = np.asarray(imread(path))
    assert picture.shape[0] > 400
    assert picture.shape[1] > 800
    return picture


def share_of_colour(picture: np.ndarray, colour: str) -> float:
    target = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float((np.abs(picture[..., :3] - target).max(axis=-1) < 0.02).mean())


@pytest.mark.filterwarnings("ignore:Glyph")  # a machine without a font for it
def test_same_data_same_file(tmp_path: Path) -> None:
    plot_curve(tmp_path / "a.png", [CURVE], cold_start=0.3, title="问题")
    plot_curve(tmp_path / "b.png", [CURVE], cold_start=0.3, title="问题")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert share_of_colour(drawn(tmp_path / "a.png"), "#0072B2") > 0.001


def test_band_and_cold_start_are_drawn(tmp_path: Path) -> None:
    bare = Series("at2po", CURVE.x, CURVE.y)
    for name, series, cold in (("bare", bare, None), ("band", CURVE, None), ("cold", bare, 0.1)):
        plot_curve(tmp_path / f"{name}.png", [series], cold_start=cold)
    pictures = {name: drawn(tmp_path / f"{name}.png") for name in ("bare", "band", "cold")}
    assert share_of_colour(pictures["bare"], "#ffffff") > share_of_colour(pictures["band"], "#ffffff") + 0.02
    assert share_of_colour(pictures["cold"], "#656d76") > share_of_colour(pictures["bare"], "#656d76")


@pytest.mark.parametrize(
    "series",
    [
        [],
        [Series("", [], [])],
        [Series("one point", [0], [0.0], [0.0], [0.0])],
        [Series("gap", [0, 1, 2], [0.1, math.nan, 0.3])],
        [Series("large", [0, 1e10], [-5.0, 1e6])],
        [Series(str(i), [0, 1], [i / 10, i / 10]) for i in range(10)],
    ],
)
def test_any_state_of_a_run_can_be_drawn(tmp_path: Path, series: list[Series]) -> None:
    plot_curve(tmp_path / "x.png", series)
    drawn(tmp_path / "x.png")


def test_lengths_are_checked() -> None:
    with pytest.raises(DataError, match=r"'a'.*\[1, 2\]"):
        Series("a", [1, 2], [1])
    with pytest.raises(DataError, match="both bounds"):
        Series("a", [1], [1], low=[0])
