"""The optimizer in pieces, for the updates of a schedule."""

from typing import Any

import optax

from jvpipe.ir.layers import LayerGraph
from jvpipe.programs.optimizer import OptimizerCut, cut_optimizer
from jvpipe.schedules import Schedule
from jvpipe.trace.leaves import abstract


def cut_for(
    optimizer: optax.GradientTransformation,
    graph: LayerGraph,
    params: Any,
    microbatches: int,
    schedule: Schedule,
    *,
    grad_norm: bool,
) -> OptimizerCut:
    """Cuts the optimizer into pieces, for the updates of a schedule.

    Args:
        optimizer: any optax transformation.
        graph: the layers that own the parameters.
        params: their tree, split into layers.
        microbatches: of a step.
        schedule: says how many of them an update takes.
        grad_norm: also compute the gradient's norm.

    Raises:
        ValueError: it needs a value of all layers at once, and the schedule updates them at different times.
    """
    cut = cut_optimizer(
        optimizer,
        abstract(params),
        [p.owner for p in graph.parameters],
        [len(p.readers) for p in graph.parameters],
        microbatches=None if graph.weighted else schedule.period(microbatches),
        grad_norm=grad_norm,
    )
    if not schedule.synchronous and (cut.cross_layer or grad_norm):
        name = " and ".join(cut.cross_layer) or "grad_norm=True"
        raise ValueError(
            f"{name} needs a value of all layers at once, which {schedule.name} does not have: its layers are updated "
            "at different times. Use a synchronous schedule (1f1b), or what looks at one parameter at a time, such as "
            "optax.adaptive_grad_clip or optax.clip"
        )
    return cut
