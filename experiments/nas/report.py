"""Throughput over a stream: its table, and its picture with a panel for each upper layer.

Rates are micro-batches per second; a step has `MICRO_BATCHES`.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.nas.variants import NAMES

MICRO_BATCHES, STEPS = 16, 8
"""Of a step; of an architecture."""
COLOURS = {
    "static, first": "#8557a8",
    "static": "#b0413e",
    "swap/recompute": "#c8691c",
    "full": "#2f6db3",
    "ideal": "#222222",
}


def report(
    title: str,
    step_s: Mapping[str, Sequence[float]],
    layers: Sequence[int],
    counted: Sequence[bool] | None = None,
    first: int = 0,
) -> None:
    """Prints the table of a stream, given seconds per step by variant and architecture, and the ratios of its means.

    Every architecture is trained for as many steps: the mean is that of the seconds, of those that are `counted`. The
    first one is number `first`.
    """
    counted = counted or [True] * len(layers)
    print(f"\n### {title}\n\n| architecture | layers | {' | '.join(NAMES)} |\n{'|---' * (2 + len(NAMES))}|")
    for n, count in enumerate(layers):
        rates = (f"{MICRO_BATCHES / step_s[name][n]:.1f}" for name in NAMES)
        print(f"| {n + first}{'' if counted[n] else ' *'} | {count} | {' | '.join(rates)} |")
    total = {name: sum(compress(step_s[name], counted)) for name in NAMES}
    if not any(counted):
        print("\nthe machine was never quiet")
        return
    means = (f"{MICRO_BATCHES * sum(counted) / total[name]:.1f}" for name in NAMES)
    print(f"| mean | | {' | '.join(means)} |")
    over = {name: total[name] / total["full"] for name in NAMES}
    lost = STEPS * (total["full"] - total["ideal"]) / total["ideal"]
    print(
        f"\nfull over ideal {over['ideal']:.3f} (bound 0.93), full over static {over['static']:.2f} (bound 1.25), over "
        f"that of the first architecture {over['static, first']:.2f}, over swap and recompute alone "
        f"{over['swap/recompute']:.2f}"
    )
    if not all(counted):
        print(f"of {sum(counted)} architectures; while those with a * ran, other machines on the host were busy")
    print(f"a switch costs {lost:.2f} of a step, tracing and planning included (bound 1)", flush=True)


def keep(name: str, schedule: str, step_s: Mapping[str, Sequence[float]]) -> None:
    """Adds rates to <name>.json beside this file, and draws what is there to <name>.svg."""
    path = Path(__file__).with_name(f"{name}.json")
    rates = json.loads(path.read_text()) if path.exists() else {}
    rates[schedule] = {variant: [round(MICRO_BATCHES / s, 2) for s in step_s[variant]] for variant in NAMES}
    path.write_text(json.dumps(rates, indent=1) + "\n")
    draw(name, rates)


def draw(name: str, rates: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Micro-batches per second by schedule, variant and architecture."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, (schedule, found) in zip(panels, sorted(rates.items()), strict=True):
        for variant, colour in COLOURS.items():
            style = ":" if variant == "ideal" else "-"
            values = found.get(variant)
            if values is None:
                continue
            axes.stairs(values, range(1, len(values) + 2), color=colour, linestyle=style, label=variant, baseline=None)
        axes.set_title(f"{name.replace('_', ', ')}, {schedule}", loc="left", fontsize=10)
        axes.set_xlabel("architecture", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("micro-batches per second", fontsize=8)
    panels[-1].legend(frameon=False, fontsize=7)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None})
