"""The report's figures as inline SVG that follows the page's light or dark colours. No torch here.

Matplotlib writes fixed colours, so figures are drawn in sentinel colours that are then exchanged for the
page's CSS variables; text stays text, in the page's font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from drafter.metrics import StepMetrics

# Sentinel colour -> CSS variable of report.html.j2. Each is a colour that no figure uses by chance.
INK, FAINT, LINE, LOSS = "#010203", "#010204", "#010205", "#010206"
SERIES = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
_VARIABLES = {INK: "--ink", FAINT: "--faint", LINE: "--line", LOSS: "--bad"} | {
    colour: f"--series-{number}" for number, colour in enumerate(SERIES, start=1)
}
_MARKERS = "osD^vP"

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


@dataclass(frozen=True)
class Curve:
    """One line of a figure."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Range:
    """A value with its interval, one row of `acceptance_ranges`."""

    label: str
    group: int
    value: float
    lower: float
    upper: float


def acceptance_per_position(curves: Sequence[Curve]) -> str:
    """Share of drafts whose first k tokens were all accepted, over k."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(height_in=2.7)
        _draw(axes, curves, marked=True)
        axes.set(xlabel="position in the draft", ylim=(0, 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        _legend(axes, len(curves))
        return _svg(figure, "positions", "Acceptance rate per position of the draft")


def acceptance_ranges(ranges: Sequence[Range]) -> str:
    """Acceptance length with its interval, one row each; colours by group."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(height_in=max(1.5, 0.75 + 0.31 * len(ranges)))
        for row, one in enumerate(ranges):
            colour = SERIES[one.group % len(SERIES)]
            axes.plot(
                [one.lower, one.upper],
                [row, row],
                color=colour,
                linewidth=5,
                alpha=0.3,
                solid_capstyle="round",
            )
            axes.plot([one.value], [row], "o", color=colour, markersize=6)
            axes.annotate(
                f"{one.value:.2f}", (one.value, row), (0, 6), textcoords="offset points", ha="center", size=8
            )
        axes.axvline(1, color=FAINT, linewidth=1, linestyle=(0, (2, 3)))
        axes.set_yticks(range(len(ranges)), [one.label for one in ranges])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.grid(axis="y", visible=False)
        axes.set(
            xlabel="tokens per verification step (1 = nothing accepted)", ylim=(len(ranges) - 0.4, -0.75)
        )
        axes.set_xlim(left=min(0.95, *(one.lower - 0.05 for one in ranges)))
        return _svg(figure, "lengths", "Acceptance length per domain with bootstrap intervals")


def speedup_over_concurrency(curves: Sequence[Curve]) -> str:
    """Ratio of output tokens/s to serving without a drafter; below 1 the drafter costs."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(height_in=2.7)
        axes.set_xscale("log", base=2)
        _draw(axes, curves, marked=True)
        axes.axhline(1, color=LOSS, linewidth=1.2, linestyle=(0, (4, 3)))
        low = min((*(value for curve in curves for value in curve.y), 1.0))
        high = max((*(value for curve in curves for value in curve.y), 1.0))
        axes.set_ylim(min(low - 0.1, 0.8), high + 0.15)
        axes.axhspan(axes.get_ylim()[0], 1, color=LOSS, alpha=0.06, linewidth=0)
        levels = sorted({value for curve in curves for value in curve.x})
        axes.set_xticks(levels, [f"{level:.0f}" for level in levels])
        axes.minorticks_off()
        axes.set(xlabel="requests in flight")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}×"))
        _legend(axes, len(curves))
        return _svg(figure, "speedup", "Speed relative to no speculation, over concurrency")


def training_loss(steps: Sequence[StepMetrics]) -> str:
    """Loss per optimizer step, faint, and its running mean."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(height_in=2.5)
        x = [step.step for step in steps]
        loss = [step.loss for step in steps]
        axes.plot(x, loss, color=SERIES[0], alpha=0.25, linewidth=1)
        axes.plot(x, _smooth(loss), color=SERIES[0])
        axes.set(xlabel="optimizer step")
        axes.set_ylim(bottom=0)
        return _svg(figure, "loss", "Training loss")


def training_accuracy(steps: Sequence[StepMetrics]) -> str:
    """Running mean of the accuracy at each depth."""
    depths = min((len(step.accuracy) for step in steps), default=0)
    x = tuple(float(step.step) for step in steps)
    curves = [
        Curve(f"depth {depth}", x, tuple(_smooth([step.accuracy[depth] for step in steps])))
        for depth in range(depths)
    ]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(height_in=2.5)
        for depth, curve in enumerate(curves):
            # One hue that fades with depth: the order matters, not the identity.
            axes.plot(curve.x, curve.y, color=SERIES[0], alpha=1 - 0.75 * depth / max(depths - 1, 1))
            if depth in (0, depths - 1) and curve.x:
                axes.annotate(
                    curve.label,
                    (curve.x[-1], curve.y[-1]),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    size=8,
                )
        axes.set(xlabel="optimizer step")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        return _svg(figure, "accuracy", "Training accuracy per depth")


def _axes(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, height_in), layout="constrained")
    return figure, figure.add_subplot()


def _draw(axes: Axes, curves: Sequence[Curve], marked: bool) -> None:
    for number, curve in enumerate(curves):
        axes.plot(
            curve.x,
            curve.y,
            color=SERIES[number % len(SERIES)],
            marker=_MARKERS[number % len(_MARKERS)] if marked else None,
            label=curve.label,
        )


def _legend(axes: Axes, count: int) -> None:
    if count:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2 if count > 1 else 1, borderaxespad=0.2
        )


def _smooth(values: Sequence[float]) -> list[float]:
    """Running mean over a twentieth of the steps."""
    window = max(1, len(values) // 20)
    smoothed = []
    total = 0.0
    for number, value in enumerate(values):
        total += value - (values[number - window] if number >= window else 0.0)
        smoothed.append(total / min(number + 1, window))
    return smoothed


def _svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an <svg> element whose ids are unique on the page and whose colours are the page's."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"(font|font-family): ?[^;\"]*sans-serif[^;\"]*", _page_font, text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    size = re.search(r'<svg[^>]*viewBox="([^"]+)"', text)
    assert size is not None
    opening = f'<svg role="img" aria-label="{title}" viewBox="{size.group(1)}" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"<svg[^>]*>", opening, text, count=1)


def _page_font(match: re.Match[str]) -> str:
    """Keep the size of a CSS font, take the family from the page."""
    size = re.search(r"([\d.]+)px", match.group(0))
    return f"font-size: {size.group(1)}px; font-family: inherit" if size else "font-family: inherit"
