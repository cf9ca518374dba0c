"""Pictures of timelines: who does what when, and under it who holds how much meanwhile."""

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
"""Boxes up to the first width have no white edge, and none is narrower than the second: it would vanish."""
_MOST_ROOM = 3.0
"""Limits up to so many times the most bytes are lines.

The axis of a larger one would show nothing else.
"""
_HOST = "host"
_Corners = list[tuple[float, float]]
LINES = ("#2f6db3", "#c8691c", "#3f8f4f", "#8557a8", "#b0413e", "#4f9ea3", "#8a7440", "#6b7683")


def check_format(path: str | Path) -> None:
    """Raises ValueError unless a picture can have the suffix of a path.

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
    """Draws steps, simulated or measured, to `path` (the suffix says the format: png, svg, pdf).

    A row for each device, and a thinner one for each link with traffic; a box for each task, with
    the number of its micro-batch where it fits. Under it, where anything is held, bytes over time
    per device, and their `limits`.

    Args:
        picture: what ran when, and who held how much.
        path: of the picture; its suffix says the format: png, svg, pdf.
        limits: what places may hold: lines in the curves of bytes, or words beside them where they
            are far above.
        title: of the picture.
    """
    picture = _from_zero(picture)
    spans, curves = picture.spans, _curves(picture.levels)
    working = {span.device for span in spans if span.kind in COMPUTE}
    rows = {
        row: 0.36 if row in working else 0.2
        for row in sorted_devices(span.device for span in spans)
    }
    # Heights in inches: a row of tasks, thinner ones of links, and the curves.
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
    """Returns the picture with times since its first start, as a measured one has them since some other moment."""
    start_s = min((span.start_s for span in picture.spans), default=0.0)
    spans = (
        replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s)
        for span in picture.spans
    )
    levels = (level._replace(at_s=max(0.0, level.at_s - start_s)) for level in picture.levels)
    return Picture(tuple(spans), tuple(levels))


def _curves(levels: Sequence[Level]) -> dict[str, tuple[list[float], list[int]]]:
    """Tells when each place begins to hold how many bytes, if it ever holds any.

    The host is the last.
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
    """Boxes; the first row is the top one."""
    bottoms = dict(zip(rows, -np.cumsum(list(rows.values())), strict=True))
    by_look: dict[tuple[str, str], list[tuple[_Corners, float]]] = {}
    for span in spans:
        low, high = bottoms[span.device] + _GAP, bottoms[span.device] + rows[span.device] - _GAP
        corners = [(span.start_s, low), (span.start_s, high), (span.end_s, high), (span.end_s, low)]
        width_pt = (span.end_s - span.start_s) / total_s * _WIDTH * 72 * 0.9
        by_look.setdefault(KINDS[span.kind].look, []).append((corners, width_pt))
    for device, label, start_s, end_s in _labels(spans):
        size = 7.5 if rows[device] > 0.3 else 5.5
        width_pt = (end_s - start_s) / total_s * _WIDTH * 72 * 0.9
        # A digit is some 0.6 of its height wide.
        if width_pt > size * (0.6 * len(label) + 0.3):
            middle = (start_s + end_s) / 2, bottoms[device] + rows[device] / 2
            axes.text(*middle, label, ha="center", va="center_baseline", size=size)
    for (_, colour), boxes in by_look.items():
        _draw_boxes(axes, colour, boxes)
    axes.set_ylim(min(bottoms.values(), default=-1.0), 0.0)
    axes.set_yticks([bottoms[row] + rows[row] / 2 for row in rows], list(rows))
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontsize(9 if rows[row] > 0.3 else 6.5)
    axes.tick_params(left=False, bottom=False)
    axes.spines[:].set_visible(False)
    kinds = [
        look for look in dict.fromkeys(info.look for info in KINDS.values()) if look in by_look
    ]
    _legend(axes, [Patch(color=colour, label=name) for name, colour in kinds])


def _labels(spans: Sequence[Span]) -> Iterator[tuple[str, str, float, float]]:
    """Yields each micro-batch's number and its row, start and end: that of boxes of one kind in a row.

    Measured boxes are of single layers, and simulated ones of whole stages.
    """
    order = sorted(spans, key=lambda span: (span.device, span.start_s))

    def task(span: Span) -> tuple[str, str, str]:
        return span.device, span.kind, str(span.args.get("microbatch", ""))

    for (device, _, label), boxes in groupby(order, task):
        first, *others = boxes
        if not label.startswith("-"):
            yield device, label, first.start_s, max(box.end_s for box in (first, *others))


def _draw_boxes(axes: Axes, colour: str, boxes: Sequence[tuple[_Corners, float]]) -> None:
    """Boxes with their widths in points; thin ones lie on top, since a neighbour's white edge may be wider."""
    wide = [corners for corners, width_pt in boxes if width_pt > _THIN_PT]
    axes.add_collection(PolyCollection(wide, facecolors=colour, edgecolors="white", linewidths=0.5))
    thin = [(corners, width_pt) for corners, width_pt in boxes if width_pt <= _THIN_PT]
    axes.add_collection(
        PolyCollection(
            [corners for corners, _ in thin],
            facecolors=colour,
            edgecolors=colour,
            linewidths=[max(0.0, _SEEN_PT - width_pt) for _, width_pt in thin],
            snap=False,  # to the nearest pixel's edge both sides of a narrow box are the same
            zorder=1.5,
        )
    )


def _draw_curves(
    axes: Axes,
    curves: Mapping[str, tuple[list[float], list[int]]],
    end_s: float,
    limits: Mapping[str, int],
) -> None:
    """Draws bytes as steps, the host's dotted.

    A limit that all share is black, others are as their places.
    """
    colours = {place: LINES[i % len(LINES)] for i, place in enumerate(curves)}
    colours |= {_HOST: "#777777"}
    for place, (times_s, sizes) in curves.items():
        axes.step(
            [*times_s, end_s],
            [*sizes, sizes[-1]],
            where="post",
            color=colours[place],
            linestyle=":" if place == _HOST else "-",
            linewidth=1.3,
            label=f"{place}: {format_bytes(max(sizes))}",
        )
    highest = max(max(sizes) for _, sizes in curves.values())
    # One line is enough where all have the same limit.
    alike = len(set(limits.values())) == 1
    for place, limit in list(limits.items())[: 1 if alike else None]:
        label = f"{'limit' if alike else f'limit of {place}'}: {format_bytes(limit)}"
        if limit > _MOST_ROOM * highest:
            axes.plot([], [], " ", label=f"{label}, above")
        else:
            colour = "black" if alike else colours.get(place, "black")
            axes.axhline(limit, color=colour, linestyle="--", linewidth=1, label=label)
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
