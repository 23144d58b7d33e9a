# SPDX-License-Identifier: Apache-2.0
"""Heat maps and curves as SVG that stands in a page by itself: no library draws it, nothing is loaded."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Series = Mapping[str, Sequence[tuple[float, float]]]

# Of Viridis: dark is little, bright is much, for the colour-blind too.
_STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
_CHAR, _LINE = 6.6, 16


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    told: Sequence[Sequence[str]],
    *,
    x: str,
    y: str,
) -> str:
    """A cell for each row and column; what it is ``told`` stands in it where there is room, and in its tooltip.

    A value of 0 is darkest, of 1 brightest, and None a gap.
    """
    widest = max((len(text) for of in told for text in of), default=0)
    width = max(22.0, _CHAR * max([*map(len, columns), widest if widest <= 9 else 0]) + 8)
    left, top, height = _CHAR * max([*map(len, rows), 4]) + 34, 34, 22
    parts = [
        _text(left + width * len(columns) / 2, 12, x, "middle"),
        _text(12, top + height * len(rows) / 2, y, turn=True),
    ]
    parts += [_text(left + width * (i + 0.5), top - 6, name, "middle") for i, name in enumerate(columns)]
    for i, name in enumerate(rows):
        parts.append(_text(left - 6, top + height * (i + 0.68), name, "end"))
        for j, value in enumerate(values[i]):
            if value is None:
                continue
            share = min(1.0, max(0.0, value))
            place = f'x="{left + width * j:.1f}" y="{top + height * i}" width="{width - 1:.1f}" height="{height - 1}"'
            hint = escape(f"{name}, {columns[j]}: {told[i][j] or format(value, '.4g')}")
            parts.append(f'<rect {place} fill="{_color(share)}"><title>{hint}</title></rect>')
            if told[i][j] and len(told[i][j]) <= 9:
                ink = "#fff" if share < 0.6 else "#000"
                parts.append(_text(left + width * (j + 0.5), top + height * (i + 0.68), told[i][j], "middle", ink))
    return _svg(left + width * len(columns) + 10, top + height * len(rows) + 8, parts)


def _color(share: float) -> str:
    at = share * (len(_STOPS) - 1)
    i = min(int(at), len(_STOPS) - 2)
    mixed = (round(a + (b - a) * (at - i)) for a, b in zip(_STOPS[i], _STOPS[i + 1]))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def curves(series: Series, *, x: str, y: str, log_x: bool = False) -> str:
    """A line for each of the series, with a legend; empty where no series has a point."""
    series = {name: [p for p in of if not log_x or p[0] > 0] for name, of in series.items()}
    series = {name: of for name, of in series.items() if of}
    points = [point for of in series.values() for point in of]
    if not points:
        return ""
    left, top, width, height = 64.0, 12.0, 430.0, 260.0
    across = _Axis([p[0] for p in points], log_x)
    up = _Axis([p[1] for p in points], False)
    parts = []
    for value in across.ticks:
        place = left + width * across.place(value)
        parts += [
            _line(place, top, place, top + height, "#ddd"),
            _text(place, top + height + 16, _short(value), "middle"),
        ]
    for value in up.ticks:
        place = top + height * (1 - up.place(value))
        parts += [_line(left, place, left + width, place, "#ddd"), _text(left - 6, place + 4, _short(value), "end")]
    parts += [_text(left + width / 2, top + height + 36, x, "middle"), _text(12, top + height / 2, y, turn=True)]
    for i, (name, of) in enumerate(series.items()):
        places = [(left + width * across.place(a), top + height * (1 - up.place(b))) for a, b in sorted(of)]
        color = _COLORS[i % len(_COLORS)]
        dash = ' stroke-dasharray="5 3"' if i >= len(_COLORS) else ""
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>')
        for (a, b), point in zip(places, sorted(of)):
            hint = escape(f"{name}: {point[0]:g}, {point[1]:.4g}")
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"><title>{hint}</title></circle>')
        place = top + 8 + i * _LINE
        parts.append(_line(left + width + 14, place, left + width + 36, place, color, f' stroke-width="2"{dash}'))
        parts.append(_text(left + width + 42, place + 4, name))
    legend = 52 + _CHAR * max(map(len, series))
    return _svg(left + width + legend, max(top + height + 44, top + len(series) * _LINE + 12), parts)


class _Axis:
    """Where a value lies between 0 and 1, and which values are written down."""

    def __init__(self, values: Sequence[float], log: bool) -> None:
        self.log = log
        low, high = min(values), max(values)
        if log:
            self.ticks = sorted(set(values) if len(set(values)) <= 9 else _powers(low, high))
        else:
            if low == high:
                low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
            step = _step((high - low) / 5)
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
            self.ticks = [low + step * i for i in range(round((high - low) / step) + 1)]
        self.low, self.high = self._scaled(low), self._scaled(high)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value

    def place(self, value: float) -> float:
        return 0.5 if self.high == self.low else (self._scaled(value) - self.low) / (self.high - self.low)


def _powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten between them."""
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [found for n in powers for digit in (1, 2, 5) if low <= (found := digit * 10.0**n) <= high]


def _step(about: float) -> float:
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= about * 0.999)


def _short(value: float) -> str:
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}K"
    return f"{round(value, 10):,g}"


def _line(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "#222", turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})" text-anchor="middle"' if turn else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{turned}>{escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11">{"".join(parts)}</svg>'
    )
