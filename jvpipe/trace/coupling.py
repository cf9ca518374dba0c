"""Where the examples of a micro-batch meet in a loss, so that splitting a batch makes it another loss.

The loss is followed at two sizes, as replicas need it (`jvpipe.trace.spread`), but nothing is excused: a batch norm is
coupled here, although replicas may normalise by statistics of their own. Only what the loss itself is made of counts,
for metrics and model state may look at all examples as they like.
"""

from jvpipe._jax import Atom, JaxprEqn
from jvpipe.ir.examples import Over
from jvpipe.ir.values import ValueKind
from jvpipe.trace.graph import Traced
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.reductions import Lies
from jvpipe.trace.slices import places
from jvpipe.trace.spread import CoupledError, Spreading, reaching


def where_examples_meet(traced: Traced) -> str | None:
    """Returns the first place where examples of a micro-batch meet.

    A mean or a sum over examples is the same however a batch is split; an in-batch softmax, statistics of a batch norm,
    a maximum, or a mean over a varying number of items are not. The loss is traced once or twice more, at other sizes;
    nothing is compiled.

    Args:
        traced: the layers on a whole micro-batch.

    Returns:
        The layer and the equation there, and what it does; None for a mean or a sum over examples, and where the loss
        does not take other numbers of examples or is another program on them, so that nothing can be said.
    """
    loss, place_of = traced.loss, places(traced)
    assert loss.of_size is not None, "a loss that was not traced from a function"
    # JAX traces some functions differently at a size of one, and larger sizes are always alike.
    examples = max(traced.graph.examples, 2)
    try:
        loss = loss if examples == traced.graph.examples else loss.of_size(examples)
        double = loss.of_size(2 * examples) if loss.of_size else loss
    except Exception:  # whatever the user's function raises
        return None
    spreading = Spreading(examples, 2 * examples, (), place_of, flows=())
    batch = [v for v, ref in loss.inputs.items() if ref.kind is ValueKind.BATCH]
    spreading.lies_of = dict.fromkeys(batch, Lies(Over.ALONG, 0))
    eqns, results = _loss_alone(loss)
    double_eqns, double_results = _loss_alone(double)
    try:
        spreading.run(eqns, double_eqns)
    except CoupledError as coupled:
        return coupled.where or None
    fitting = {Over.NONE, Over.SUM} if loss.weighted else {Over.NONE, Over.SUM, Over.MEAN}
    both = zip(results, double_results, strict=True)
    if all(spreading.lies(*atoms).over in fitting for atoms in both):
        return None
    layer = traced.graph.layers[traced.graph.loss_layer]
    return (
        f"layer {traced.graph.label(layer)}: the loss is neither a mean nor a sum over its examples"
    )


def _loss_alone(loss: LossJaxpr) -> tuple[list[JaxprEqn], list[Atom]]:
    """Returns the equations that the value of a loss is made of, and the value: a `Weighted` has two."""
    results = [atom for atom, ref in loss.outputs if ref.kind is ValueKind.LOSS]
    reached = reaching(loss.eqns, results)
    return [eqn for eqn in loss.eqns if not reached.isdisjoint(eqn.outvars)], results
