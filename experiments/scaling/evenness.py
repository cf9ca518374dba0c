"""How even 16 stages are, for every model: python -m experiments.scaling.evenness [MODEL ...]

The slowest stage, forward and backward, over the larger of the mean and the largest single
equation, which nothing divides: with whole layers and with layers cut inside. Models are those of
`experiments.scaling.run`, without a limit.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.scaling.run import SUBJECTS, Subject
from jvpipe.cost.hardware import INFINITE
from jvpipe.cost.presets import PRESETS
from jvpipe.cost.roofline import equation_seconds
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.session.forecast import Forecast, asked, with_splits
from jvpipe.trace.graph import Traced

STAGES = 16
CLUSTER = replace(PRESETS["v100-a"], peer=INFINITE, network=INFINITE)
ROOMY_BYTES = 10**13


def row(subject: Subject) -> str:
    """A line of the table."""
    question = subject.question(STAGES)
    start_s = time.perf_counter()
    whole = asked(question.problem(CLUSTER, ROOMY_BYTES), ["jvpipe"], "", question)
    planned_s = time.perf_counter()
    finer = with_splits(question, whole)
    split_s = time.perf_counter()
    floor_s = max(_mean_s(whole), max(_equations_s(question.trace().traced, whole)))
    shares = [_slowest_s(forecast) / floor_s for forecast in (whole, finer)]
    planning = (split_s - start_s) / (planned_s - start_s)
    splits = len(finer.answers[0].splits)
    gain = whole.step_s / finer.step_s
    cells = [f"{x:.3f}" for x in shares] + [str(splits), f"{gain:.3f}", f"{planning:.2f}"]
    return f"| {subject.model} {subject.size} | {' | '.join(cells)} |"


def _slowest_s(forecast: Forecast) -> float:
    decision = forecast.answers[0].decision
    assert decision is not None
    return max(stage.compute_s for stage in evaluate_decision(forecast.problem, decision).stages)


def _mean_s(forecast: Forecast) -> float:
    layers = forecast.problem.costs.layers
    return sum(layer.forward_s + layer.backward_s for layer in layers) / STAGES


def _equations_s(traced: Traced, forecast: Forecast) -> Iterator[float]:
    """The seconds, forward and backward, of the largest equation of each layer."""
    for body, cost in zip(traced.bodies, forecast.problem.costs.layers, strict=True):
        eqns_s = equation_seconds(body.eqns, body.outputs, CLUSTER.device)
        if total_s := sum(eqns_s):
            yield max(eqns_s) / total_s * (cost.forward_s + cost.backward_s)


def main(names: Sequence[str]) -> int:
    print("| model | whole layers | cut inside | places | gain | planning |")
    print("|---|---|---|---|---|---|", flush=True)
    for subject in SUBJECTS:
        if not names or subject.model in names:
            print(row(subject), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
