"""Bar charts as SVG, without a library; one file is readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

_BAR, _GAP, _LEFT, _WIDTH, _RIGHT = 16, 14, 150, 430, 90

_STYLE = """\
.ground { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif }
.title { font-weight: 600 } .small { font-size: 11px } .goal, .axis { stroke: #1f2328 }
.goal { stroke-width: 2; stroke-dasharray: 3 2 }
.s0 { fill: #0072b2 } .s1 { fill: #e69f00 } .s2 { fill: #009e73 } .s3 { fill: #cc79a7 } .s4 { fill: #8c8c8c }
@media (prefers-color-scheme: dark) {
.ground { fill: #16191f } text { fill: #e8eaed } .goal, .axis { stroke: #e8eaed }
.s0 { fill: #56b4e9 }
}"""
"""The colours are those of Okabe and Ito, which can be told apart with any colour vision."""


@dataclass(frozen=True)
class Series:
    """One bar of each group; `None` draws none. `goals` are marks on the bars."""

    label: str
    values: Sequence[float | None]
    goals: Sequence[float | None] = ()


def bars(title: str, groups: Sequence[str], series: Sequence[Series], *, digits: int = 2) -> str:
    """Return a chart of horizontal bars: for each group one bar of each series, with its value."""
    numbers = [n for one in series for n in (*one.values, *one.goals) if n is not None]
    scale = _WIDTH / (max(numbers, default=1.0) or 1.0)
    group_height = len(series) * _BAR + _GAP
    height = 62 + len(groups) * group_height
    width, label = _LEFT + _WIDTH + _RIGHT, f"aria-label={quoteattr(title)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {label}>',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}" rx="6"/>',
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
    ]
    x = 12
    for number, one in enumerate(series):
        parts += [
            f'<rect class="s{number % 5}" x="{x}" y="33" width="11" height="11"/>',
            f'<text class="small" x="{x + 16}" y="43">{escape(one.label)}</text>',
        ]
        x += 34 + 6 * len(one.label)
    for index, group in enumerate(groups):
        top = 58 + index * group_height
        middle = top + len(series) * _BAR / 2 + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(group)}</text>')
        for number, one in enumerate(series):
            parts += _bar(one, index, number, top + number * _BAR, scale, digits)
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="54" y2="{height - 8}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(one: Series, index: int, number: int, y: float, scale: float, digits: int) -> list[str]:
    parts: list[str] = []
    value = one.values[index]
    goal = one.goals[index] if one.goals else None
    if value is not None:
        width = value * scale
        end = _LEFT + max(value, goal or 0.0) * scale + 5
        parts += [
            f'<rect class="s{number % 5}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 3}"/>',
            f'<text class="small" x="{end:.1f}" y="{y + 11}">{value:,.{digits}f}</text>',
        ]
    if goal is not None:
        x = _LEFT + goal * scale
        parts.append(f'<line class="goal" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 1}" y2="{y + _BAR - 2}"/>')
    return parts
