"""Throughput over a stream: its table, and its picture with a panel for each upper layer.

Rates are micro-batches per second; a step has `MICRO_BATCHES`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.nas.variants import NAMES

MICRO_BATCHES = 16
BOUNDS = {"ideal": 0.93, "static": 1.25}
COLOURS = {"static": "#b0413e", "swap/recompute": "#c8691c", "full": "#2f6db3", "ideal": "#222222"}


def report(title: str, step_s: Mapping[str, Sequence[float]], layers: Sequence[int]) -> None:
    """Prints the table of a stream, given seconds per step by variant and architecture, and the ratios of its means.

    Every architecture is trained for as many steps: the mean is that of the seconds.
    """
    rows = [[*map(str, (n, count))] for n, count in enumerate(layers)]
    print(f"\n### {title}\n\n| architecture | layers | {' | '.join(NAMES)} |\n{'|---' * (2 + len(NAMES))}|")
    for n, row in enumerate(rows):
        print(f"| {' | '.join([*row, *(f'{MICRO_BATCHES / step_s[name][n]:.1f}' for name in NAMES)])} |")
    total = {name: sum(step_s[name]) for name in NAMES}
    means = (f"{MICRO_BATCHES * len(layers) / total[name]:.1f}" for name in NAMES)
    print(f"| mean | | {' | '.join(means)} |")
    over = {name: total[name] / total["full"] for name in NAMES}
    print(
        f"\nfull over ideal {over['ideal']:.3f} (bound {BOUNDS['ideal']}), over static {over['static']:.2f} (bound "
        f"{BOUNDS['static']}), over swap and recompute alone {over['swap/recompute']:.2f}",
        flush=True,
    )


def draw(name: str, rates: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Micro-batches per second by schedule, variant and architecture; to <name>.svg beside this file."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, (schedule, found) in zip(panels, rates.items(), strict=True):
        for variant, colour in COLOURS.items():
            style = ":" if variant == "ideal" else "-"
            values = found[variant]
            axes.stairs(values, range(1, len(values) + 2), color=colour, linestyle=style, label=variant, baseline=None)
        axes.set_title(f"{name}, {schedule}", loc="left", fontsize=10)
        axes.set_xlabel("architecture", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("micro-batches per second", fontsize=8)
    panels[-1].legend(frameon=False, fontsize=7)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None})
