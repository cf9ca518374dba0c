"""Pictures of timelines: who does what when, and under it who holds how much meanwhile."""

import math
from collections.abc import Mapping, Sequence
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
from jvpipe.ir.sizes import format_bytes
from jvpipe.ir.span import Span
from jvpipe.report.timeline import COMPUTE, in_order
from jvpipe.simulate.timeline import Curve, Timeline

_WIDTH, _GAP = 12.0, 0.03  # inches
_THIN_PT, _SEEN_PT = 3.0, 0.8
"""Boxes up to the first width have no white edge, and none is narrower than the second: it would vanish."""
_Corners = list[tuple[float, float]]
LINES = ("#2f6db3", "#c8691c", "#3f8f4f", "#8557a8", "#b0413e", "#4f9ea3", "#8a7440", "#6b7683")


def check_format(path: str | Path) -> None:
    """Raises ValueError unless a picture can have the suffix of a path.

    >>> check_format("plan.json")
    Traceback (most recent call last):
    ...
    ValueError: plan.json: no picture ends in '.json', use one of ...png...
    """
    known = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ValueError(
            f"{path}: no picture ends in {Path(path).suffix!r}, use one of {', '.join(sorted(known))}"
        )


def timeline_figure(
    timeline: Timeline | Sequence[Span],
    path: str | Path,
    limits: Sequence[int] = (),
    title: str = "",
) -> None:
    """Draws a timeline to `path` (the suffix says the format: png, svg, pdf).

    A row for each device, and a thinner one for each link with traffic; a box for each task, with the number of its
    micro-batch where it fits. Under it, if the timeline knows them, bytes over time per device, and their `limits`.

    Args:
        timeline: simulated, or measured spans.
        path: of the picture; its suffix says the format: png, svg, pdf.
        limits: lines in the curves of bytes.
        title: of the picture.
    """
    spans = list(timeline.spans() if isinstance(timeline, Timeline) else timeline)
    curves = timeline.curves if isinstance(timeline, Timeline) else ()
    working = {span.device for span in spans if span.kind in COMPUTE}
    rows = {row: 0.36 if row in working else 0.2 for row in in_order(span.device for span in spans)}
    parts = [0.2 + sum(rows.values()), *([2.0] if curves else [])]
    figure = Figure(figsize=(_WIDTH, 0.9 + sum(parts)), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=parts)[:, 0]
    start_s = min((span.start_s for span in spans), default=0.0)
    end_s = max((span.end_s for span in spans), default=1.0)
    _draw_rows(axes[0], spans, rows, (end_s - start_s) or 1.0)
    if curves:
        _draw_curves(axes[1], curves, end_s, limits)
    axes[-1].set_xlim(start_s, end_s)
    axes[-1].xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes[0].set_title(title, loc="left", fontsize=10)
    figure.savefig(path)


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
        label = str(span.args.get("microbatch", ""))
        size = 7.5 if rows[span.device] > 0.3 else 5.5
        if not label.startswith("-") and width_pt > size * (0.6 * len(label) + 0.3):
            axes.text(
                (span.start_s + span.end_s) / 2,
                (low + high) / 2,
                label,
                ha="center",
                va="center_baseline",
                size=size,
            )
    for (_, colour), boxes in by_look.items():
        _draw_boxes(axes, colour, boxes)
    axes.set_ylim(min(bottoms.values(), default=-1.0), 0.0)
    axes.set_yticks([bottoms[row] + rows[row] / 2 for row in rows], list(rows))
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontsize(9 if rows[row] > 0.3 else 6.5)
    axes.tick_params(left=False, bottom=False)
    axes.spines[:].set_visible(False)
    known = [
        look for look in dict.fromkeys(info.look for info in KINDS.values()) if look in by_look
    ]
    _legend(axes, [Patch(color=colour, label=name) for name, colour in known])


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


def _draw_curves(axes: Axes, curves: Sequence[Curve], end_s: float, limits: Sequence[int]) -> None:
    """Bytes as steps; what lies on the host is dotted."""
    for i, curve in enumerate(curves):
        if curve.space == "device" or curve.most_bytes:
            axes.step(
                np.append(curve.t_s, end_s),
                np.append(curve.bytes, curve.bytes[-1]),
                where="post",
                color=LINES[i % len(LINES)] if curve.space == "device" else "#777777",
                linestyle="-" if curve.space == "device" else ":",
                linewidth=1.3,
                label=f"{curve.place}: {format_bytes(curve.most_bytes)}",
            )
    for limit in sorted(set(limits), reverse=True):
        axes.axhline(
            limit, color="black", linestyle="--", linewidth=1, label=f"limit: {format_bytes(limit)}"
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(_binary_ticks(axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda size, _: format_bytes(int(size)).replace(".00", ""))
    )
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    _legend(axes, axes.get_legend_handles_labels()[0])


def _binary_ticks(most: float) -> MultipleLocator:
    """Four to eight ticks at round multiples of a power of two."""
    return MultipleLocator(2.0 ** max(0, math.floor(math.log2(max(most, 8.0) / 4))))


def _legend(axes: Axes, handles: Sequence[Artist]) -> None:
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
        handlelength=1.4,
    )
