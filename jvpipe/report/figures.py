"""Draws timelines as figures: the tasks of each device, and below them the bytes on each device."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator

from jvpipe.ir.kinds import KINDS
from jvpipe.ir.span import Level, Picture, Span
from jvpipe.report.timeline import COMPUTE, sorted_devices
from jvpipe.util.sizes import format_bytes

_WIDTH, _GAP = 12.0, 0.03  # inches
_THIN_PT, _SEEN_PT = 3.0, 0.8
"""Boxes of at most `_THIN_PT` points have no white edge. No box is drawn narrower than `_SEEN_PT`
points, because it would be invisible."""
_MOST_ROOM = 3.0
"""A limit is drawn as a line if it is at most this many times the most bytes held. With a line for
a larger limit, the curves would shrink to the bottom of the axis."""
_HOST = "host"
_Corners = list[tuple[float, float]]
LINES = ("#2f6db3", "#c8691c", "#3f8f4f", "#8557a8", "#b0413e", "#4f9ea3", "#8a7440", "#6b7683")


def check_format(path: str | Path) -> None:
    """Raises ValueError unless a path's suffix is a format that pictures can be written in.

    >>> check_format("plan.json")
    Traceback (most recent call last):
    ...
    ValueError: plan.json: no picture ends in '.json', use one of ...png...
    """
    formats = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        raise ValueError(
            f"{path}: no picture ends in {Path(path).suffix!r}, use one of {', '.join(sorted(formats))}"
        )


def timeline_figure(
    picture: Picture, path: str | Path, limits: Mapping[str, int] | None = None, title: str = ""
) -> None:
    """Draws the timeline of steps, simulated or measured, to a file.

    Each device has a row, and each link with traffic has a thinner row. A box is a task, with the
    number of its micro-batch if there is room for it. If the picture has bytes, curves below show
    the bytes on each device over time, and the limits.

    Args:
        picture: the tasks with their times, and the bytes over time.
        path: the file to draw to; its suffix is the format, such as png, svg or pdf.
        limits: the memory limits of devices by name. A limit far above the curves is not drawn, and
            is only named in the legend.
        title: the title of the figure.
    """
    picture = _from_zero(picture)
    spans, curves = picture.spans, _curves(picture.levels)
    working = {span.device for span in spans if span.kind in COMPUTE}
    rows = {
        row: 0.36 if row in working else 0.2
        for row in sorted_devices(span.device for span in spans)
    }
    # The heights, in inches, of the rows of devices and links, and of the curves.
    parts = [0.2 + sum(rows.values()), *([2.0] if curves else [])]
    figure = Figure(figsize=(_WIDTH, 0.9 + sum(parts)), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=parts)[:, 0]
    end_s = max((span.end_s for span in spans), default=1.0)
    _draw_rows(axes[0], spans, rows, end_s or 1.0)
    if curves:
        _draw_curves(axes[1], curves, end_s, limits or {})
    axes[-1].set_xlim(0.0, end_s)
    axes[-1].xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes[0].set_title(title, loc="left", fontsize=10)
    figure.savefig(path)


def _from_zero(picture: Picture) -> Picture:
    """Returns a picture with times counted from its first start, whatever the clock's origin."""
    start_s = min((span.start_s for span in picture.spans), default=0.0)
    spans = (
        replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s)
        for span in picture.spans
    )
    levels = (level._replace(at_s=max(0.0, level.at_s - start_s)) for level in picture.levels)
    return Picture(tuple(spans), tuple(levels))


def _curves(levels: Sequence[Level]) -> dict[str, tuple[list[float], list[int]]]:
    """Returns, for each place that ever holds bytes, the times and the bytes held from then on.

    The host comes last.
    """
    found: dict[str, tuple[list[float], list[int]]] = {}
    for place, at_s, held_bytes in levels:
        times_s, sizes = found.setdefault(place, ([], []))
        times_s.append(at_s)
        sizes.append(held_bytes)
    places = sorted(found, key=lambda place: place == _HOST)
    return {place: found[place] for place in places if max(found[place][1])}


def _draw_rows(
    axes: Axes, spans: Sequence[Span], rows: Mapping[str, float], total_s: float
) -> None:
    """Draws the boxes of spans, with the first row at the top."""
    bottoms = dict(zip(rows, -np.cumsum(list(rows.values())), strict=True))
    pt_per_s = _WIDTH * 72 * 0.9 / total_s  # rows take about 0.9 of the width
    by_look: dict[tuple[str, str], list[tuple[_Corners, float]]] = {}
    for span in spans:
        low, high = bottoms[span.device] + _GAP, bottoms[span.device] + rows[span.device] - _GAP
        corners = [(span.start_s, low), (span.start_s, high), (span.end_s, high), (span.end_s, low)]
        width_pt = (span.end_s - span.start_s) * pt_per_s
        by_look.setdefault(KINDS[span.kind].look, []).append((corners, width_pt))
    for device, label, start_s, end_s in _labels(spans):
        size = 7.5 if rows[device] > 0.3 else 5.5
        # A digit is about 0.6 times as wide as the font's size.
        if (end_s - start_s) * pt_per_s > size * (0.6 * len(label) + 0.3):
            middle = (start_s + end_s) / 2, bottoms[device] + rows[device] / 2
            axes.text(*middle, label, ha="center", va="center_baseline", size=size)
    for (_, color), boxes in by_look.items():
        _draw_boxes(axes, color, boxes)
    axes.set_ylim(min(bottoms.values(), default=-1.0), 0.0)
    axes.set_yticks([bottoms[row] + rows[row] / 2 for row in rows], list(rows))
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontsize(9 if rows[row] > 0.3 else 6.5)
    axes.tick_params(left=False, bottom=False)
    axes.spines[:].set_visible(False)
    kinds = [
        look for look in dict.fromkeys(info.look for info in KINDS.values()) if look in by_look
    ]
    _legend(axes, [Patch(color=color, label=name) for name, color in kinds])


def _labels(spans: Sequence[Span]) -> Iterator[tuple[str, str, float, float]]:
    """Yields (row, micro-batch, start, end) of each label; consecutive boxes of a task share one.

    Measured boxes are of single layers, so a task has several boxes. Simulated boxes are of whole
    stages.
    """
    order = sorted(spans, key=lambda span: (span.device, span.start_s))

    def task(span: Span) -> tuple[str, str, str]:
        return span.device, span.kind, str(span.args.get("microbatch", ""))

    for (device, _, label), boxes in groupby(order, task):
        first, *others = boxes
        if not label.startswith("-"):
            yield device, label, first.start_s, max(box.end_s for box in (first, *others))


def _draw_boxes(axes: Axes, color: str, boxes: Sequence[tuple[_Corners, float]]) -> None:
    """Draws boxes, given as corners and the width in points.

    Narrow boxes are drawn above the white edges of their neighbors, which would hide them.
    """
    wide = [corners for corners, width_pt in boxes if width_pt > _THIN_PT]
    axes.add_collection(PolyCollection(wide, facecolors=color, edgecolors="white", linewidths=0.5))
    thin = [(corners, width_pt) for corners, width_pt in boxes if width_pt <= _THIN_PT]
    axes.add_collection(
        PolyCollection(
            [corners for corners, _ in thin],
            facecolors=color,
            edgecolors=color,
            linewidths=[max(0.0, _SEEN_PT - width_pt) for _, width_pt in thin],
            snap=False,  # snapping to pixels would put both sides of a narrow box on one pixel
            zorder=1.5,
        )
    )


def _draw_curves(
    axes: Axes,
    curves: Mapping[str, tuple[list[float], list[int]]],
    end_s: float,
    limits: Mapping[str, int],
) -> None:
    """Draws the bytes of each place as a step curve, dotted for the host, and the limits.

    A limit that all devices share is black. Other limits have the colors of their devices.
    """
    colors = {place: LINES[i % len(LINES)] for i, place in enumerate(curves)}
    colors |= {_HOST: "#777777"}
    for place, (times_s, sizes) in curves.items():
        axes.step(
            [*times_s, end_s],
            [*sizes, sizes[-1]],
            where="post",
            color=colors[place],
            linestyle=":" if place == _HOST else "-",
            linewidth=1.3,
            label=f"{place}: {format_bytes(max(sizes))}",
        )
    highest = max(max(sizes) for _, sizes in curves.values())
    # If all devices have the same limit, it is drawn once.
    alike = len(set(limits.values())) == 1
    for place, limit in list(limits.items())[: 1 if alike else None]:
        label = f"{'limit' if alike else f'limit of {place}'}: {format_bytes(limit)}"
        if limit > _MOST_ROOM * highest:
            axes.plot([], [], " ", label=f"{label}, above")
        else:
            color = "black" if alike else colors.get(place, "black")
            axes.axhline(limit, color=color, linestyle="--", linewidth=1, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(_binary_ticks(axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda size, _: format_bytes(int(size)).replace(".00", ""))
    )
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    _legend(axes, axes.get_legend_handles_labels()[0])


def _binary_ticks(highest: float) -> MultipleLocator:
    """Places four to eight ticks at round multiples of a power of two."""
    return MultipleLocator(2.0 ** max(0, math.floor(math.log2(max(highest, 8.0) / 4))))


def _legend(axes: Axes, handles: Sequence[Artist]) -> None:
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
        handlelength=1.4,
    )
