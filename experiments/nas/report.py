"""Throughput over a stream: its table, and its picture with a panel for each upper layer.

Rates are micro-batches per second; a step has `MICRO_BATCHES`.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.nas.variants import NAMES

MICRO_BATCHES, STEPS = 16, 8
"""Of a step; of an architecture."""
COLORS = {
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
    """Prints the table of a stream, given seconds per step by variant and architecture, and the
    ratios of its means.

    Every architecture is trained for as many steps: means are those of the seconds, of all and of
    those that are `counted`. The first one is number `first`.
    """
    counted = counted or [True] * len(layers)
    print(
        f"\n### {title}\n\n| architecture | layers | {' | '.join(NAMES)} "
        f"|\n{'|---' * (2 + len(NAMES))}|"
    )
    for n, count in enumerate(layers):
        rates = (f"{MICRO_BATCHES / step_s[name][n]:.1f}" for name in NAMES)
        print(f"| {n + first}{'' if counted[n] else ' *'} | {count} | {' | '.join(rates)} |")
    means = {"all": {name: statistics.mean(step_s[name]) for name in NAMES}}
    if not all(counted):
        print("\nWhile those with a * ran, other machines on the host were busy.")
    if any(counted) and not all(counted):
        means["those without a *"] = {
            name: statistics.mean(compress(step_s[name], counted)) for name in NAMES
        }
    print(f"\n| mean of | {' | '.join(NAMES)} |\n{'|---' * (1 + len(NAMES))}|")
    for those, mean_s in means.items():
        print(
            f"| {those} | {' | '.join(f'{MICRO_BATCHES / mean_s[name]:.1f}' for name in NAMES)} |"
        )
    for those, mean_s in means.items():
        over = {name: mean_s[name] / mean_s["full"] for name in NAMES}
        lost = STEPS * (mean_s["full"] - mean_s["ideal"]) / mean_s["ideal"]
        print(
            f"\nOf {those}: full over ideal {over['ideal']:.3f} (bound 0.93), over static "
            f"{over['static']:.2f} (bound 1.25), over that of the first architecture "
            f"{over['static, first']:.2f}, over swap and recompute alone "
            f"{over['swap/recompute']:.2f}; a switch costs {lost:.2f} of a step, tracing and "
            "planning included (bound 1)",
            flush=True,
        )


def keep(name: str, schedule: str, step_s: Mapping[str, Sequence[float]]) -> None:
    """Adds rates to <name>.json beside this file, and draws what is there to <name>.svg."""
    path = Path(__file__).with_name(f"{name}.json")
    rates = json.loads(path.read_text()) if path.exists() else {}
    rates[schedule] = {
        variant: [round(MICRO_BATCHES / s, 2) for s in step_s[variant]] for variant in NAMES
    }
    path.write_text(json.dumps(rates, indent=1) + "\n")
    draw(name, rates)


def draw(name: str, rates: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draws rates to <name>.svg beside this file."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        picture(name, rates).savefig(
            Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None}
        )


def picture(name: str, rates: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Micro-batches per second by schedule, variant and architecture."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    most = max(rate for variants in rates.values() for found in variants.values() for rate in found)
    for axes, (schedule, variants) in zip(panels, sorted(rates.items()), strict=True):
        for variant, color in COLORS.items():
            if values := variants.get(variant):
                edges, style = range(1, len(values) + 2), ":" if variant == "ideal" else "-"
                axes.stairs(
                    values, edges, color=color, linestyle=style, label=variant, baseline=None
                )
        axes.set_title(f"{name.replace('_', ', ')}, {schedule}", loc="left", fontsize=10)
        axes.set_xlabel("architecture", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.04 * most)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("micro-batches per second", fontsize=8)
    panels[-1].legend(frameon=False, fontsize=7, loc="lower right")
    return figure
