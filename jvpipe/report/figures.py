"""Draws timelines as figures: the tasks of each device, and below them the bytes on each device."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from jvpipe.report.chrome_trace import COMPUTE, sorted_devices
from jvpipe.util.sizes import format_bytes

_WIDTH, _GAP = 12.0, 0.03  # inches
_DEVICE_ROW, _LINK_ROW, _CURVES = 0.36, 0.2, 2.0  # the heights of the parts, in inches
_THIN_PT, _SEEN_PT = 3.0, 0.8
"""Boxes of at most `_THIN_PT` points have no white edge. Boxes are at least `_SEEN_PT` points wide,
because narrower boxes would be invisible."""
_MOST_ROOM = 3.0
"""A limit is drawn as a line if it is at most this many times the highest curve. A line for a
larger limit would shrink the curves to the bottom of the axis."""
_HOST = "host"
_Corners = list[tuple[float, float]]
_Box = tuple[_Corners, float]
"""The corners of a box, in seconds and inches, and its width in points."""
_Curve = tuple[list[float], list[int]]
"""Times in seconds, and the bytes that a place holds from each of these times on."""
LINES = ("#2f6db3", "#c8691c", "#3f8f4f", "#8557a8", "#b0413e", "#4f9ea3", "#8a7440", "#6b7683")


def check_format(path: str | Path) -> None:
    """Raises ValueError unless a path's suffix is a format that pictures can be written in.

    >>> check_format("plan.json")
    Traceback (most recent call last):
    ...
    ValueError: plan.json: no picture ends in '.json', use one of ...png...
    """
    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    suffix = Path(path).suffix
    if suffix[1:].lower() not in formats:
        raise ValueError(f"{path}: no picture ends in {suffix!r}, use one of {', '.join(formats)}")


def timeline_figure(
    picture: Picture,
    path: str | Path,
    limits: Mapping[str, int] | None = None,
    title: str = "",
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
    picture = picture.since(min((span.start_s for span in picture.spans), default=0.0))
    spans, curves = picture.spans, _curves(picture.levels)
    # A device has work, while a link has only copies.
    working = {span.device for span in spans if span.kind in COMPUTE}
    names = sorted_devices(span.device for span in spans)
    rows = {name: _DEVICE_ROW if name in working else _LINK_ROW for name in names}
    parts = [0.2 + sum(rows.values())]
    if curves:
        parts.append(_CURVES)
    figure = Figure(figsize=(_WIDTH, 0.9 + sum(parts)), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(parts), sharex=True, squeeze=False, height_ratios=parts)[:, 0]
    end_s = max((span.end_s for span in spans), default=1.0)
    _draw_rows(axes[0], spans, rows, end_s or 1.0)
    if curves:
        _draw_curves(axes[1], curves, end_s, limits or {})
    axes[-1].set_xlim(0.0, end_s)
    axes[-1].xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes[0].set_title(title, loc="left", fontsize=10)
    figure.savefig(path)


def _curves(levels: Sequence[Level]) -> dict[str, _Curve]:
    """Returns the curve of each place that ever holds bytes.

    The host is last.
    """
    found: dict[str, _Curve] = {}
    for place, at_s, held_bytes in levels:
        times_s, sizes = found.setdefault(place, ([], []))
        # Bytes that were held before the first span are drawn from its start.
        times_s.append(max(0.0, at_s))
        sizes.append(held_bytes)
    in_order = sorted(found.items(), key=lambda curve: curve[0] == _HOST)
    return {place: (times_s, sizes) for place, (times_s, sizes) in in_order if max(sizes)}


def _draw_rows(
    axes: Axes, spans: Sequence[Span], rows: Mapping[str, float], total_s: float
) -> None:
    """Draws the boxes of spans with their labels, the first row at the top.

    Args:
        axes: the axes to draw on.
        spans: the tasks and copies.
        rows: the height of each row in inches, by the name of the device or link.
        total_s: the seconds that the width of the axes stands for.
    """
    # A row's name is at the middle of the row. Rows begin at 0 and go down:
    #
    #       0.0  ----------------  top of the first row
    #     cpu:0    [0F0]  [0B0]
    #     -0.36  ----------------  bottoms["cpu:0"], top of the second row
    bottoms = dict(zip(rows, -np.cumsum(list(rows.values())), strict=True))
    middles = {row: bottoms[row] + height / 2 for row, height in rows.items()}
    pt_per_s = _WIDTH * 72 * 0.9 / total_s  # rows take about 0.9 of the width
    by_look = defaultdict[tuple[str, str], list[_Box]](list)
    for span in spans:
        low = bottoms[span.device] + _GAP
        high = bottoms[span.device] + rows[span.device] - _GAP
        left, right = span.start_s, span.end_s
        corners = [(left, low), (left, high), (right, high), (right, low)]
        width_pt = (right - left) * pt_per_s
        by_look[KINDS[span.kind].look].append((corners, width_pt))
    for device, label, start_s, end_s in _labels(spans):
        size = 7.5 if rows[device] == _DEVICE_ROW else 5.5
        # A digit is about 0.6 times as wide as the font's size.
        if (end_s - start_s) * pt_per_s > size * (0.6 * len(label) + 0.3):
            axes.text(
                (start_s + end_s) / 2,
                middles[device],
                label,
                ha="center",
                va="center_baseline",
                size=size,
            )
    for (_, color), boxes in by_look.items():
        _draw_boxes(axes, color, boxes)
    axes.set_ylim(min(bottoms.values(), default=-1.0), 0.0)
    axes.set_yticks(list(middles.values()), list(middles))
    for tick, height in zip(axes.get_yticklabels(), rows.values(), strict=True):
        tick.set_fontsize(9 if height == _DEVICE_ROW else 6.5)
    axes.tick_params(left=False, bottom=False)
    axes.spines[:].set_visible(False)
    # The legend has the order of `KINDS`, not the order in which kinds were first drawn.
    looks = dict.fromkeys(info.look for info in KINDS.values())
    drawn = [look for look in looks if look in by_look]
    _legend(axes, [Patch(color=color, label=name) for name, color in drawn])


def _labels(spans: Sequence[Span]) -> Iterator[tuple[str, str, float, float]]:
    """Yields each label's (row, micro-batch, start, end); boxes of one task share a label.

    A measured box is a single layer, so a task has several boxes. A simulated box is a whole stage.
    """
    order = sorted(spans, key=lambda span: (span.device, span.start_s))

    def task(span: Span) -> tuple[str, str, str]:
        return span.device, span.kind, str(span.args.get("microbatch", ""))

    for (device, _, label), group in groupby(order, task):
        boxes = list(group)
        # Work without a micro-batch, such as an update, has the number -1.
        if not label.startswith("-"):
            end_s = max(box.end_s for box in boxes)
            yield device, label, boxes[0].start_s, end_s


def _draw_boxes(axes: Axes, color: str, boxes: Sequence[_Box]) -> None:
    """Draws boxes of one color.

    Narrow boxes are drawn on top, because the white edges of their neighbors would hide them.
    """
    wide = [corners for corners, width_pt in boxes if width_pt > _THIN_PT]
    thin = [box for box in boxes if box[1] <= _THIN_PT]
    axes.add_collection(PolyCollection(wide, facecolors=color, edgecolors="white", linewidths=0.5))
    thin_boxes = PolyCollection(
        [corners for corners, _ in thin],
        facecolors=color,
        edgecolors=color,
        # An edge in the color of the box makes the box wide enough to see.
        linewidths=[max(0.0, _SEEN_PT - width_pt) for _, width_pt in thin],
        snap=False,  # snapping to pixels would put both sides of a narrow box on one pixel
        zorder=1.5,
    )
    axes.add_collection(thin_boxes)


def _draw_curves(
    axes: Axes,
    curves: Mapping[str, _Curve],
    end_s: float,
    limits: Mapping[str, int],
) -> None:
    """Draws the bytes of each place as a step curve, dotted for the host, and the limits.

    Args:
        axes: the axes to draw on.
        curves: the times and bytes by the name of the place.
        end_s: the time at which the curves end.
        limits: the memory limits of devices by name.
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
    _draw_limits(axes, limits, colors, _MOST_ROOM * highest)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(_binary_ticks(axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda size, _: format_bytes(int(size)).replace(".00", ""))
    )
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    _legend(axes, axes.get_legend_handles_labels()[0])


def _draw_limits(
    axes: Axes, limits: Mapping[str, int], colors: Mapping[str, str], highest: float
) -> None:
    """Draws limits as dashed lines; limits above `highest` are only named in the legend.

    A limit that all devices share is drawn once, in black. Other limits have the colors of their
    devices.
    """
    named = {f"limit of {place}": (limit, colors.get(place)) for place, limit in limits.items()}
    if len(set(limits.values())) == 1:
        named = {"limit": (max(limits.values()), None)}
    for name, (limit, color) in named.items():
        label = f"{name}: {format_bytes(limit)}"
        if limit > highest:
            axes.plot([], [], " ", label=f"{label}, above")
        else:
            axes.axhline(limit, color=color or "black", linestyle="--", linewidth=1, label=label)


def _binary_ticks(highest: float) -> MultipleLocator:
    """Places four to eight ticks at round multiples of a power of two."""
    quarter = max(highest, 8.0) / 4
    return MultipleLocator(2.0 ** max(0, math.floor(math.log2(quarter))))


def _legend(axes: Axes, handles: Sequence[Artist]) -> None:
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
        handlelength=1.4,
    )
