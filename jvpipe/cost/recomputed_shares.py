"""Estimates which share of each backward's time goes to recomputing values that were not kept.

A forward that runs again as a task of its own is measured by itself. But a backward that recomputes
values inside is measured as a whole. So the share is estimated from two backwards by the roofline:

    backward that keeps everything    [ cotangents and gradients ]
    backward of the plan              [ recomputed | cotangents and gradients ]
"""

from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.roofline import seconds
from jvpipe.ir.fates import Fates
from jvpipe.ir.plan import Plan
from jvpipe.programs.model_programs import programs_of
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.graph import Traced


def recomputed_shares(
    store: ProgramStore,
    traced: Traced,
    plan: Plan,
    device: Accelerator,
) -> list[float]:
    """Estimates, for each layer, which share of its backward's time goes to recomputing values.

    Args:
        store: the store of the layers' programs.
        traced: the model.
        plan: the plan with the fates of values.
        device: the device whose seconds the roofline estimates.
    """
    fates = Fates.of(traced.graph, plan)
    shares = []
    for layer in traced.graph.layers:
        share = 0.0
        if len(fates.kept[layer.id]) < len(layer.candidates):
            here_s, least_s = (
                seconds(programs_of(store, traced, layer.id, kept).backward, device)
                for kept in (fates, "all")
            )
            share = max(0.0, 1.0 - least_s / here_s) if here_s else 0.0
        shares.append(share)
    return shares
