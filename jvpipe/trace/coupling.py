"""Tells whether a batch's loss is the mean of the losses of its micro-batches, and if not, why.

The two are equal if the loss is a mean over examples. They differ if the loss is a sum, or
if examples meet in the loss, as in an in-batch softmax, a batch norm, a maximum, or a mean
over a varying number of items.

The loss is traced at two numbers of examples, and `jvpipe.trace.spread` follows its equations, as
it does for replicas. There, each replica may normalize by its own statistics; here, a batch norm
counts as coupling examples. Only the equations that make the loss's value are followed, because
metrics and model state may combine examples in any way.
"""

import logging

from jvpipe._jax import Atom, JaxprEqn
from jvpipe.ir.examples import Over
from jvpipe.ir.values import ValueKind
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.graph import Traced
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.slices import layer_namer
from jvpipe.trace.spread import Spreading, reaching
from jvpipe.trace.sums_and_means import Lies

_log = logging.getLogger("jvpipe")


def warn_of_splitting(traced: Traced, microbatches: int) -> None:
    """Warns if splitting a batch into micro-batches changes the loss of the batch.

    Args:
        traced: the layers, traced at the size of a micro-batch.
        microbatches: how many micro-batches a batch is split into.
    """
    reason = None if microbatches == 1 else why_splitting_matters(traced)
    if reason is None:
        return
    _log.warning(
        "each batch is split into %d micro-batches, because microbatches was not given, but the "
        "loss of a batch is not the mean of the losses of its micro-batches (%s). Set "
        "microbatches=1 for the loss of whole batches, or microbatches=%d if each micro-batch may "
        "count as a batch; for a sum, or a mean over a varying number of items, return "
        "jvpipe.Weighted(total, weight)",
        microbatches,
        reason,
        microbatches,
    )


def why_splitting_matters(traced: Traced) -> str | None:
    """Returns why the loss of a batch is not the mean of the losses of its parts, for a message.

    The loss is traced again at one or two other sizes; nothing is compiled.

    Args:
        traced: the layers, traced at the size of a micro-batch.

    Returns:
        The layer and the equation that couple examples, and how; None for a mean over examples and
        for a `jvpipe.Weighted` of two sums. The result is also None if the answer is unknown,
        because the loss cannot be traced at other numbers of examples or has other equations there.
    """
    loss, of_size = traced.loss, traced.loss.of_size
    assert of_size is not None, "a loss that was not traced from a function"
    # JAX traces some functions differently at a size of one than at all larger sizes.
    examples = max(traced.graph.examples, 2)
    try:
        loss = loss if examples == traced.graph.examples else of_size(examples)
        double = of_size(2 * examples)
    except Exception:  # whatever the user's function raises
        return None
    spreading = Spreading(
        examples,
        2 * examples,
        (),
        layer_namer(traced),
        flows=(),
    )
    batch = loss.inputs_of(ValueKind.BATCH)
    spreading.lies_of = dict.fromkeys(batch, Lies(Over.ALONG, 0))
    eqns, results = _loss_alone(loss)
    double_eqns, double_results = _loss_alone(double)
    try:
        spreading.run(eqns, double_eqns)
    except CoupledError as coupled:
        return coupled.where or None
    both = zip(results, double_results, strict=True)
    overs = {spreading.lies(*atoms).over for atoms in both}
    # A weighted loss is a quotient of two results, each of which is added up over the
    # micro-batches. The quotient is that of the whole batch if both are sums, or if each is a mean
    # or a constant. A plain loss must be a mean or a constant.
    if overs <= {Over.NONE, Over.MEAN} or (loss.weighted and overs == {Over.SUM}):
        return None
    kind = "a sum" if overs <= {Over.NONE, Over.SUM} else "neither a mean nor a sum"
    layer = traced.graph.layers[traced.graph.loss_layer]
    return f"layer {traced.graph.label(layer)}: the loss is {kind} over its examples"


def _loss_alone(loss: LossJaxpr) -> tuple[list[JaxprEqn], list[Atom]]:
    """Returns the equations that make a loss's value, and the value: two atoms if `Weighted`."""
    results = loss.outputs_of(ValueKind.LOSS)
    reached = reaching(loss.eqns, results)
    eqns = [eqn for eqn in loss.eqns if not reached.isdisjoint(eqn.outvars)]
    return eqns, results
