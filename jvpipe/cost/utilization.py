"""Counts products for the model flops utilization (MFU): the share of peak rates that a step uses.

Peak rates are those of products. Only products that the model needs count as used. Products that
are recomputed do not count.
"""

from collections import Counter
from collections.abc import Iterable

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.cost.presets import known_accelerator, peak_per_s
from jvpipe.trace.graph import Traced
from jvpipe.trace.primitives import flops

BACKWARD = 2
"""The products in a backward per product in its forward: one for the cotangent of each operand."""


def product_flops(eqns: Iterable[JaxprEqn]) -> Counter[str]:
    """Counts the flops of products and convolutions, by the dtype of the first operand.

    Loops and branches count as in `flops`: a while loop has one round, a cond its largest branch.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    >>> dict(product_flops(jax.make_jaxpr(lambda x: jnp.sin(x @ x))(x).eqns))
    {'bfloat16': 128}
    """
    by_dtype: Counter[str] = Counter()
    for eqn in eqns:
        if bodies := _jax.inner_jaxprs(eqn):
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            counts = [product_flops(body.eqns) for body in bodies]
            if eqn.primitive.name == "cond":
                counts = [max(counts, key=Counter.total)]
            for of_body in counts:
                for dtype, count in of_body.items():
                    by_dtype[dtype] += times * count
        # An equation with bodies has no operations besides those of its bodies.
        elif count := flops(eqn):
            by_dtype[str(_jax.aval(eqn.invars[0]).dtype)] += count
    return by_dtype


def ideal_s(traced: Traced, microbatches: int, kinds: Iterable[str]) -> float | None:
    """Returns the seconds that a step's products would take at the makers' peak rates.

    The utilization is these seconds divided by the seconds that the step takes. Each product of
    the forward counts three times, because the backward has two products for it. Recomputation and
    elementwise operations do not count. A product with a frozen parameter has only one product in
    the backward, but it counts three times as well: if much is frozen, the utilization is too high.

    Args:
        traced: the model, traced for one micro-batch.
        microbatches: micro-batches of a step.
        kinds: for each device that shares the work, its kind.

    Returns:
        The seconds; None if the peak rate of a device is not known, as for CPUs.
    """
    accelerators = [known_accelerator(kind) for kind in kinds]
    if None in accelerators:
        return None
    work = product_flops(eqn for body in traced.bodies for eqn in body.eqns)
    seconds = 0.0
    for dtype, count in work.items():
        peak = sum(peak_per_s(device, dtype) for device in accelerators if device)
        seconds += (1 + BACKWARD) * microbatches * count / peak
    return seconds
