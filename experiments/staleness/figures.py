"""Held-out loss against examples, updates and simulated seconds, a row of panels for each number of
stages.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.staleness.subjects import Subject
from experiments.staleness.table import row
from experiments.staleness.train import Curve, simulated_s

COLORS = {
    "one device, per batch": "#888888",
    "one device, per micro-batch": "#222222",
    "gpipe": "#4f9ea3",
    "1f1b": "#2f6db3",
    "2bw": "#3f8f4f",
    "pipedream": "#c8691c",
    "pipemare": "#8557a8",
    "xpipe": "#b0413e",
}
_ALONE = [name for name in COLORS if name.startswith("one device")]


def draw(subject: Subject, curves: Sequence[Curve], folder: Path) -> None:
    """Means over seeds, and between the least and the most of them a shade; to
    FOLDER/<subject>.svg.
    """
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 3, sharey=True)
    for stages, line in zip((2, 4, 8), panels, strict=True):
        for name, color in COLORS.items():
            found = row(subject, curves, name, 1 if name in _ALONE else stages)
            if found is None:
                continue
            for axes, x in zip(
                line, (found.steps * subject.batch_size, found.updates, found.seconds), strict=True
            ):
                style = {"gpipe": (0, (4, 4)), "one device, per batch": (0, (1, 3))}.get(name, "-")
                axes.plot(x, found.mean, color=color, linewidth=1.3, linestyle=style, label=name)
                axes.fill_between(
                    x,
                    found.losses.min(0),
                    found.losses.max(0),
                    color=color,
                    alpha=0.12,
                    linewidth=0,
                )
        for axes, word in zip(line, ("examples", "updates", "simulated seconds"), strict=True):
            axes.set_xlabel(word, fontsize=8)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        line[1].set_xscale("log", base=2)
        line[2].set_xlim(0, 1.05 * simulated_s("1f1b", stages, subject.steps)[-1])
        line[0].set_ylabel(f"{stages} stages: held-out loss, nats", fontsize=8)
    panels[0][0].set_title(subject.name, loc="left", fontsize=10)
    panels[0][2].legend(frameon=False, fontsize=7)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "staleness"}):
        figure.savefig(
            folder / f"{subject.name.lower().replace(' ', '_')}.svg", metadata={"Date": None}
        )
