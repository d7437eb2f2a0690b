"""Learning curves as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turntree.errors import DataError
from turntree.trainers.atomic import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Series", "plot_curve"]

#: Okabe & Ito's colours, told apart with any colour vision; markers differ too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_CJK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "PingFang SC", "WenQuanYi Micro Hei")
_INK, _GREY, _GRID = "#1f2328", "#656d76", "#e4e7eb"


@dataclass(frozen=True, slots=True)
class Series:
    """One line: ``y`` over ``x``, and optionally the bounds of a confidence band; all of one length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    def __post_init__(self) -> None:
        lengths = {len(v) for v in (self.x, self.y, self.low, self.high) if v is not None}
        if len(lengths) != 1:
            raise DataError(f"series {self.label!r}: x, y and bounds must have one length, found {sorted(lengths)}")
        if (self.low is None) != (self.high is None):
            raise DataError(f"series {self.label!r}: a band needs both bounds, low and high")


def plot_curve(
    path: str | Path,
    series: Sequence[Series],
    *,
    cold_start: float | None = None,
    title: str = "",
    x_label: str = "generated tokens",
    y_label: str = "exact match",
) -> None:
    """Draw ``series`` into a PNG file, or an SVG file by the name's ending. Shares (values from 0 to 1) are in percent.

    ``cold_start``: the value before training, drawn as a dashed line. The same data gives the same file.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, one in enumerate(series):
        _draw(axes, one, _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)])
    if cold_start is not None:
        _draw_cold_start(axes, cold_start)
    _style(axes, title=title, x_label=x_label, y_label=y_label)
    _limit(axes, series, cold_start)
    if len(series) > 1 or (series and series[0].label):
        legend = axes.legend(loc="best", frameon=True, fontsize=9, labelcolor=_INK, edgecolor=_GRID, framealpha=0.9)
        legend.set_zorder(5)
    _use_fonts(figure)
    kind, unset = ("svg", "Date") if Path(path).suffix.lower() == ".svg" else ("png", "Software")
    with atomic_file(Path(path)) as handle, rc_context({"svg.hashsalt": "turntree"}):
        figure.savefig(handle, format=kind, metadata={unset: None})


def _use_fonts(figure: Figure) -> None:
    """Matplotlib's own font, then whichever fonts of the machine know Chinese, Japanese and Korean."""
    from matplotlib.font_manager import get_font_names
    from matplotlib.text import Text

    installed = set(get_font_names())
    families = ["DejaVu Sans", *(name for name in _CJK_FONTS if name in installed)]
    for text in figure.findobj(Text):
        text.set_fontfamily(families)


def _draw(axes: Axes, series: Series, colour: str, marker: str) -> None:
    if series.low is not None and series.high is not None:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.14, linewidth=0, zorder=2)
        if len(series.x) == 1:  # a band of no width cannot be seen
            axes.vlines(series.x, series.low, series.high, color=colour, alpha=0.5, linewidth=2, clip_on=False)
    axes.plot(
        series.x,
        series.y,
        color=colour,
        marker=marker,
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        linewidth=2,
        label=series.label or None,
        zorder=3,
        clip_on=False,
    )


def _draw_cold_start(axes: Axes, value: float) -> None:
    axes.axhline(value, color=_GREY, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"cold start {value:.1%}" if 0 <= value <= 1 else f"cold start {value:.3g}",
        xy=(1, value),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color=_GREY,
    )


def _style(axes: Axes, *, title: str, x_label: str, y_label: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=12)
    axes.set_xlabel(x_label, color=_GREY, fontsize=10)
    axes.set_ylabel(y_label, color=_GREY, fontsize=10)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GREY, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c4c9d0")


def _limit(axes: Axes, series: Sequence[Series], cold_start: float | None) -> None:
    """Shares start at zero and show percent; a run that has just begun still gets a width."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    columns = [column for s in series for column in (s.y, s.low, s.high) if column is not None]
    values = [v for column in columns for v in column if v == v] + ([] if cold_start is None else [cold_start])
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, min(1.02, max(0.1, max(values) * 1.15)))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    right = max((x for s in series for x in s.x), default=0)
    axes.set_xlim(0, right if right > 0 else 1)
