"""Plots as inline SVG, without a script and without a fixed width.

The rule kept here: horizontal positions are percentages and vertical ones pixels, so that text and
marks keep their size on every screen; colours come from the style sheet by class; whatever a plot
shows stands beside it as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from portattn.conformance.report.facts import largest
from portattn.conformance.report.markup import Markup, element, join

ROW = 22  # pixels of a strip
_LONG = 25  # rows from which on the axis stands below them as well
_LEFT, _RIGHT = 2.0, 98.0  # percent; room for marks at both ends
_DODGE = (0, -4, 4, -7, 7)  # pixels, so that marks of one value do not hide one another


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic axis from ``low`` to ``high``; what lies beyond is drawn at its end."""

    low: float
    high: float

    def percent(self, value: float) -> float:
        """Where ``value`` stands; NaN stands with infinity."""
        if value != value:
            return _RIGHT
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return round(_LEFT + (_RIGHT - _LEFT) * share, 2)

    def decades(self) -> list[float]:
        """The powers of ten on it."""
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**k for k in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a strip plot: its value, what it is, and the class that colours it."""

    value: float
    title: str
    kind: str
    shape: str = "circle"


def scale_of(values: Iterable[float], low: float, high: float) -> Scale:
    """From ``low`` to at least ``high``, further by whole decades where a value needs it."""
    top = max((v for v in values if math.isfinite(v)), default=high)
    return Scale(low, max(high, 10.0 ** min(math.ceil(math.log10(max(top, high))), 12)))


def strips(
    rows: Sequence[tuple[str, str, Sequence[Mark]]],
    scale: Scale,
    limits: Mapping[float, str],
    description: str,
    classes: str = "",
) -> Markup:
    """A strip a row (id, title, marks), all on one scale; ``limits``: lines and what they mean.

    Labels and the largest number of each row are text beside the drawing. A block a group of
    checks, so that a printed page breaks between groups.
    """
    axis = _axis(scale, limits)
    blank, corner = element("div"), element("div", "largest", class_="corner")
    lines = [(blank, axis, corner)]
    for _, block in groupby(rows, key=lambda row: row[0][:1]):
        lines.append(_block(list(block), scale, limits))
    if len(rows) > _LONG:
        lines.append((blank, axis, blank))
    grids = [element("div", *line, class_=f"strips {classes}".strip()) for line in lines]
    return element("div", *grids, role="group", aria_label=description)


def _block(
    rows: Sequence[tuple[str, str, Sequence[Mark]]], scale: Scale, limits: Mapping[float, str]
) -> tuple[Markup, Markup, Markup]:
    """Labels, drawing and largest numbers of some rows."""
    height = ROW * len(rows)
    drawn = [_upright("grid", scale, x, height) for x in scale.decades()]
    drawn += [
        element("line", class_="rule", x1=0, x2="100%", y1=y, y2=y)
        for y in range(ROW, height + 1, ROW)
    ]
    drawn += [_upright(f"limit {kind}", scale, x, height) for x, kind in limits.items()]
    for index, (_, _, marks) in enumerate(rows):
        drawn.append(_strip(marks, scale, index * ROW + ROW // 2))
    names = [
        element("div", element("b", key), " ", element("span", title), title=f"{key} {title}")
        for key, title, _ in rows
    ]
    worst = [element("div", number(largest(mark.value for mark in row[2]))) for row in rows]
    return (
        element("div", *names, class_="names"),
        element("svg", *drawn, class_="strip", width="100%", height=height, aria_hidden="true"),
        element("div", *worst, class_="largest"),
    )


def _upright(kind: str, scale: Scale, value: float, height: int) -> Markup:
    x = _at(scale, value)
    return element("line", class_=kind, x1=x, x2=x, y1=0, y2=height)


def _strip(marks: Sequence[Mark], scale: Scale, y: int) -> Markup:
    taken: dict[int, int] = {}
    drawn = []
    # The better ones first, so that the worse lie on top.
    for mark in sorted(marks, key=lambda m: (m.value != m.value, m.value)):
        x = scale.percent(mark.value)
        slot = round(x)
        step = taken.get(slot, 0)
        taken[slot] = step + 1
        drawn.append(_mark(mark, x, y + _DODGE[step % len(_DODGE)]))
    return join(drawn)


def _mark(mark: Mark, x: float, y: int) -> Markup:
    title = element("title", mark.title) if mark.title else None
    if mark.shape == "circle":
        return element("circle", title, class_=mark.kind, cx=f"{x:g}%", cy=y, r=3.5)
    outline = {
        "diamond": "M0-5 5 0 0 5-5 0z",
        "square": "M-4-4H4V4H-4z",
        "triangle": "M0-5 5 4H-5z",
    }
    # A nested drawing moves the path by a percentage, which a transform cannot.
    path = element("path", title, d=outline[mark.shape], class_=mark.kind)
    return element("svg", path, x=f"{x:g}%", y=y, overflow="visible", width=1, height=1)


def _axis(scale: Scale, limits: Mapping[float, str]) -> Markup:
    ticks = [x for x in scale.decades() if not any(_near(x, y, scale) for y in limits)]
    drawn = [_tick(scale, x, short(x), "tick") for x in ticks]
    drawn += [_tick(scale, x, short(x), f"tick {kind}") for x, kind in limits.items()]
    return element("svg", *drawn, class_="axis", width="100%", height=18, aria_hidden="true")


def _near(x: float, y: float, scale: Scale) -> bool:
    return abs(scale.percent(x) - scale.percent(y)) < 9


def _tick(scale: Scale, value: float, label: str, kind: str) -> Markup:
    x = scale.percent(value)
    anchor = "start" if x < 8 else "end" if x > 92 else "middle"
    return element("text", label, class_=kind, x=f"{x:g}%", y=13, text_anchor=anchor)


def _at(scale: Scale, value: float) -> str:
    return f"{scale.percent(value):g}%"


# ---- bytes over lengths ------------------------------------------------------------------------
_TOP, _BOTTOM, _HEIGHT = 14, 26, 240


def over_length(
    lengths: Sequence[int], curves: Mapping[str, Sequence[float]], description: str
) -> Markup:
    """Bytes over N on logarithmic axes, a curve a class; curves of zero bytes lie on the floor."""
    values = [y for curve in curves.values() for y in curve]
    low = 2.0 ** math.floor(math.log2(max(min(values), 1024.0)) - 0.25)
    high = 2.0 ** math.ceil(math.log2(max(*values, 4 * low)) + 0.25)
    across = Scale(lengths[0] / 1.35, lengths[-1] * 1.25)

    def up(value: float) -> float:
        share = math.log(min(max(value, low), high) / low) / math.log(high / low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), 1)

    drawn = []
    step = 1 if high / low <= 2**6 else 2 if high / low <= 2**12 else 4
    for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1):
        if power % step == 0:
            y = up(2.0**power)
            drawn.append(element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y))
            drawn.append(element("text", size(2.0**power), class_="tick", x=2, y=y - 3))
    for n in lengths:
        x = _at(across, n)
        drawn.append(element("line", class_="grid", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM))
        label = f"N = {n:,}" if n == lengths[0] else f"{n:,}"
        drawn.append(
            element("text", label, class_="tick", x=x, y=_HEIGHT - 8, text_anchor="middle")
        )
    for kind, curve in curves.items():
        ends = list(zip(lengths, curve, strict=True))
        for (n, y), (next_n, next_y) in pairwise(ends):
            drawn.append(
                element("line", class_=f"curve {kind}", x1=_at(across, n), y1=up(y),
                        x2=_at(across, next_n), y2=up(next_y))
            )  # fmt: skip
        if kind == "measured":
            for n, y in ends:
                title = element("title", f"N = {n:,}: {size(y)}")
                drawn.append(
                    element("circle", title, class_=kind, cx=_at(across, n), cy=up(y), r=4.5)
                )
    return element(
        "svg", *drawn, class_="lengths", width="100%", height=_HEIGHT, role="img",
        aria_label=description,
    )  # fmt: skip


# ---- a bar of parts ----------------------------------------------------------------------------
def bar(parts: Sequence[tuple[str, int]], description: str) -> Markup:
    """Shares of a whole, (class, count) each, from left to right."""
    total = sum(count for _, count in parts) or 1
    drawn, start = [], 0.0
    for kind, count in parts:
        width = 100 * count / total
        drawn.append(
            element("rect", class_=kind, x=f"{start:.3f}%", y=0, width=f"{width:.3f}%", height=14)
        )
        start += width
    return element(
        "svg", *drawn, class_="bar", width="100%", height=14, role="img", aria_label=description
    )


# ---- numbers -----------------------------------------------------------------------------------
def number(value: float | None, digits: int = 3) -> str:
    """A number as people read it, to ``digits`` digits; infinity and NaN by name."""
    if value is None:
        return ""
    if value != value:
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 2}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    shown = f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    return "<1" if shown == "1" and value < 1 else shown  # 1 is where the bounds lie


def short(value: float) -> str:
    """A tick: 0.01, 1, 100, then 1e4."""
    return f"{value:g}" if 1e-3 <= value < 1e4 else f"1e{round(math.log10(value))}"


def size(value: float) -> str:
    """Bytes in the unit that suits them."""
    power = min(int(math.log2(max(abs(value), 1)) // 10), 4)
    scaled = value / 1024**power
    digits = f"{scaled:.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"
    return f"{digits} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
