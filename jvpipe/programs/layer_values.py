"""The values of a layer's candidates and outputs, bitwise identical in all programs.

The forward may keep a candidate, or the backward may recompute it, and both programs have to give
the same value. So the value comes from a call that is compiled the same way in all programs (see
`jvpipe.programs.outlining`), and only the derivative comes from the layer's own equations. A
candidate also goes through an optimization barrier, so the compiler never fuses it with equations
that read it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jvpipe import _jax
from jvpipe.programs.outlining import outline
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body


def run_layer(body: Body, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a layer.

    Each value is computed twice: by the layer's equations, through which gradients flow, and by
    calls, through which no gradient flows. A candidate or output takes its value from the call and
    its derivative from the equations. The compiler drops results that are not read.

    Args:
        body: the layer's equations.
        inputs: the values of its inputs.
    """
    env = dict(zip(body.inputs, inputs, strict=True))  # the values of the equations
    fixed = {v: jax.lax.stop_gradient(x) for v, x in env.items()}
    calls = outline(body)
    for position, eqn in enumerate(body.eqns):
        jaxprs.run_jaxpr([eqn], env)
        if eqn.effects:  # it runs only once, and calls read its results
            fixed |= {v: jax.lax.stop_gradient(env[v]) for v in eqn.outvars}
        elif position in calls:
            fixed |= calls[position](fixed)
        for v in eqn.outvars:
            if name := body.candidates.get(v):
                valued = _valued(env[v], fixed[v])
                env[v] = _candidate(valued, name)
                fixed[v] = jax.lax.stop_gradient(env[v])
    last = calls.get(len(body.eqns))
    if last:
        fixed |= last(fixed)
    results = []
    for v in body.outputs:
        if isinstance(v, _jax.Literal):
            results.append(v.val)
        else:
            results.append(_valued(env[v], fixed[v]))
    return results


# Returns the second argument, with the derivative of the first. The values of the two arguments
# differ only in how they are rounded.
_valued = jax.custom_jvp(lambda differentiable, value: value)
_valued.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def _candidate(x: jax.Array, name: str) -> jax.Array:
    """Returns a value that can be saved under a name.

    `jax.checkpoint` cannot save complex values, so their real and imaginary parts are saved.
    """
    if not jnp.iscomplexobj(x):
        return checkpoint_name(jax.lax.optimization_barrier(x), name)
    stacked = jnp.stack([x.real, x.imag])
    parts = checkpoint_name(jax.lax.optimization_barrier(stacked), name)
    return jax.lax.complex(parts[0], parts[1])
