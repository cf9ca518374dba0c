"""Model flops utilisation: how much of what devices could multiply at their peak a step has put to use."""

from collections import Counter
from collections.abc import Iterable

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.cost.presets import known_accelerator, peak_per_s
from jvpipe.trace.graph import Traced
from jvpipe.trace.primitives import flops

BACKWARD = 2
"""For each product of a forward the backward has so many: one for either operand."""


def product_flops(eqns: Iterable[JaxprEqn]) -> Counter[str]:
    """The floating-point operations of products and convolutions, by the type of their operands.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    >>> dict(product_flops(jax.make_jaxpr(lambda x: jnp.sin(x @ x))(x).eqns))
    {'bfloat16': 128}
    """
    by_dtype: Counter[str] = Counter()
    for eqn in eqns:
        if bodies := _jax.inner_jaxprs(eqn):
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for body in bodies:
                by_dtype.update(
                    {dtype: times * count for dtype, count in product_flops(body.eqns).items()}
                )
        elif count := flops(eqn):
            by_dtype[str(_jax.aval(eqn.invars[0]).dtype)] += count
    return by_dtype


def ideal_s(traced: Traced, microbatches: int, kinds: Iterable[str]) -> float | None:
    """The seconds that a step's products would take if all devices did nothing else, at their makers' peaks.

    Products of the forward count three times, for the backward has two for each; what is computed again does not
    count, nor do elementwise operations. A step's utilisation is this over the seconds that it took.

    Args:
        traced: the model, for one micro-batch.
        microbatches: of a step.
        kinds: of the devices that share the work, one for each.

    Returns:
        None if the peak of a device is not known; that of a CPU is not.
    """
    accelerators = [known_accelerator(kind) for kind in kinds]
    if None in accelerators:
        return None
    work = product_flops(eqn for body in traced.bodies for eqn in body.eqns)
    seconds = 0.0
    for dtype, count in work.items():
        peak = sum(peak_per_s(device, dtype) for device in accelerators if device is not None)
        seconds += (1 + BACKWARD) * microbatches * count / peak
    return seconds
