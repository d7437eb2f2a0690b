"""Line charts as inline SVG: no script, colours from the page's style, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turntree.trainers.report.html import text

__all__ = ["Line", "bars", "count", "duration", "line_chart", "plain", "share"]

_SIZE, _LARGE = (400.0, 220.0), (620.0, 300.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 10.0, 10.0, 36.0
_MAX_POINTS = 240
_MAX_MARKS = 60

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, arrays of shape (n,); NaN breaks it.

    ``faint``: what lies under the line, such as the values it smooths or single seeds, as ``(x, y)``. ``colour`` is an
    index into the page's palette. ``marked``: its values are few and measured, so each gets a dot.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    faint: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    colour: int = 0
    marked: bool = False


# -- numbers ----------------------------------------------------------------------------------------------------------


def count(value: float) -> str:
    """``1.2k``, ``34M``: three significant digits."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``."""
    if abs(seconds) < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if abs(seconds) < 5400 else f"{seconds / 3600:.3g} h"


def share(value: float) -> str:
    """Percent, with a digit where it tells something."""
    return f"{value:.0%}" if abs(value * 100 - round(value * 100)) < 1e-6 else f"{value:.1%}"


def plain(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if value else "0"


# -- charts -----------------------------------------------------------------------------------------------------------


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    x_format: Format = count,
    y_format: Format = plain,
    from_zero: bool = False,
    reference: tuple[str, float] | None = None,
    large: bool = False,
) -> str:
    """The ``<svg>`` of a chart; empty text where nothing is finite.

    ``from_zero``: the scale starts at 0. ``reference``: a level with its name, drawn as a dashed line. ``large``: for a
    card of half the page's width.
    """
    values = np.concatenate([np.asarray(v) for line in lines for v in _heights(line)] or [np.zeros(0)])
    values = np.append(values, reference[1]) if reference else values
    xs = np.concatenate([x for line in lines for x in (line.x, *(under for under, _ in line.faint))] or [np.zeros(0)])
    values, xs = values[np.isfinite(values)], xs[np.isfinite(xs)]
    if not values.size or not xs.size:
        return ""
    ends = (float(xs.min()), float(xs.max()), float(values.min()), float(values.max()))
    frame = _frame(*ends, from_zero=from_zero, size=_LARGE if large else _SIZE)
    described = "; ".join(f"{line.label} {y_format(_last(line.y))}" for line in lines if np.isfinite(line.y).any())
    label = text(f"over {x_label}: {described}")
    parts = [
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" aria-label="{label}">',
        *_grid(frame, x_label, x_format, y_format),
        *(_reference(frame, *reference) if reference else ()),
        *(part for line in lines for part in _drawn(line, frame, x_format, y_format)),
        "</svg>",
    ]
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.width - _RIGHT

    @property
    def bottom(self) -> float:
        return self.height - _BOTTOM

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y0) / (self.y1 - self.y0) * (self.bottom - _TOP)


def _frame(x0: float, x1: float, y0: float, y1: float, *, from_zero: bool, size: tuple[float, float]) -> _Frame:
    x0 = 0.0 if 0 <= x0 <= 0.5 * x1 else x0
    if from_zero or 0 <= y0 < 0.4 * y1:
        y0 = min(0.0, y0)
    if y1 - y0 < 1e-9 * max(abs(y0), abs(y1), 1e-12):
        y0, y1 = (0.0, 1.0) if y1 == 0 else (min(y0, 0.0), max(y1, 0.0))
    y_ticks = _ticks(y0, y1, 5)
    step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else y1 - y0
    top = math.ceil(y1 / step - 1e-9) * step
    bottom = math.floor(y0 / step + 1e-9) * step
    x1 = x1 if x1 > x0 else x0 + 1.0
    return _Frame(x0, x1, bottom, top, _ticks(x0, x1, 5), _ticks(bottom, top, 6), *size)


def _ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Round numbers from ``low`` to ``high``."""
    span = high - low
    if span <= 0:
        return (low,)
    raw = span / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def _grid(frame: _Frame, x_label: str, x_format: Format, y_format: Format) -> Iterator[str]:
    right, bottom = frame.right, frame.bottom
    for tick in frame.y_ticks:
        y = frame.y(tick)
        yield f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{right:g}"/>'
        yield f'<text class="tick" x="{_LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{text(y_format(tick))}</text>'
    for tick in frame.x_ticks:
        x = frame.x(tick)
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 14:g}" text-anchor="middle">{text(x_format(tick))}</text>'
    yield f'<path class="axis" d="M{_LEFT:g} {bottom:g}H{right:g}"/>'
    yield f'<text class="name" x="{right:g}" y="{bottom + 29:g}" text-anchor="end">{text(x_label)}</text>'


def _reference(frame: _Frame, name: str, value: float) -> Iterator[str]:
    y = frame.y(value)
    yield f'<path class="level" d="M{_LEFT:g} {y:.1f}H{frame.right:g}"/>'
    below = y + 11 if y < frame.bottom - 14 else y - 4
    yield f'<text class="tick" x="{frame.right - 2:g}" y="{below:.1f}" text-anchor="end">{text(name)}</text>'


def _drawn(line: Line, frame: _Frame, x_format: Format, y_format: Format) -> Iterator[str]:
    yield f'<g class="c{line.colour % 7} d{line.colour // 7 % 3}">'
    if line.low is not None and line.high is not None:
        yield from _band(line, line.low, line.high, frame)
    for x, y in line.faint:
        yield f'<path class="faint" d="{_path(x, y, frame)}"/>'
    yield f'<path class="line" d="{_path(line.x, line.y, frame)}"/>'
    for i in _thinned(len(line.y), _MAX_MARKS):
        mark = _mark(line, i, x_format, y_format)
        if mark:
            kind = "dot" if line.marked or len(line.y) == 1 else "hit"
            place = f'cx="{frame.x(float(line.x[i])):.1f}" cy="{frame.y(float(line.y[i])):.1f}"'
            yield f'<circle class="{kind}" {place} r="{3 if kind == "dot" else 7}"><title>{text(mark)}</title></circle>'
    yield "</g>"


def _mark(line: Line, i: int, x_format: Format, y_format: Format) -> str:
    """What a point says; empty where it is none."""
    x, y = float(line.x[i]), float(line.y[i])
    if not (math.isfinite(x) and math.isfinite(y)):
        return ""
    bounds = ""
    if line.low is not None and line.high is not None:
        low, high = float(line.low[i]), float(line.high[i])
        bounds = f" [{y_format(low)}, {y_format(high)}]" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{line.label}: {y_format(y)}{bounds} at {x_format(x)}"


def _band(line: Line, lows: np.ndarray, highs: np.ndarray, frame: _Frame) -> Iterator[str]:
    whole = np.isfinite(line.x) & np.isfinite(lows) & np.isfinite(highs)
    x, low, high = (list(map(float, values)) for values in (line.x, lows, highs))
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(whole)) + 1):
        places = [int(i) for i in part if whole[i]]
        if len(places) == 1:  # a band of no width cannot be seen
            i = places[0]
            yield f'<path class="whisker" d="M{frame.x(x[i]):.1f} {frame.y(low[i]):.1f}V{frame.y(high[i]):.1f}"/>'
        elif places:
            up = " ".join(f"{frame.x(x[i]):.1f} {frame.y(high[i]):.1f}" for i in places)
            down = " ".join(f"{frame.x(x[i]):.1f} {frame.y(low[i]):.1f}" for i in reversed(places))
            yield f'<path class="band" d="M{up} L{down}Z"/>'


def _path(xs: np.ndarray, ys: np.ndarray, frame: _Frame) -> str:
    out, pen = [], "M"
    for i in _thinned(len(ys), _MAX_POINTS):
        x, y = float(xs[i]), float(ys[i])
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        out.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
        pen = "L"
    return "".join(out)


def _thinned(n: int, most: int) -> list[int]:
    """Indices spread evenly over ``n`` places, the ends among them."""
    return list(range(n)) if n <= most else sorted({round(i * (n - 1) / (most - 1)) for i in range(most)})


def _heights(line: Line) -> Iterator[np.ndarray]:
    yield line.y
    for bound in (line.low, line.high):
        if bound is not None:
            yield bound
    for _, y in line.faint:
        yield y


def _last(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan


def bars(rows: Sequence[tuple[str, float, str]], *, colour: int = 0) -> str:
    """Horizontal bars as HTML: ``(name, length, what is said)``, lengths relative to the longest."""
    longest = max((length for _, length, _ in rows if math.isfinite(length)), default=0.0) or 1.0
    cells = "".join(
        f'<dt>{text(name)}</dt><dd><i style="width:{_percent(length, longest)}"></i><span>{text(said)}</span></dd>'
        for name, length, said in rows
    )
    return f'<dl class="bars c{colour % 7}">{cells}</dl>'


def _percent(part: float, whole: float) -> str:
    return f"{100 * max(0.0, part) / whole:.1f}%" if math.isfinite(part) else "0"
