"""Batch norm, told from whatever else gives single examples what was made of several of them.

    m = mean(x)           a statistic of several examples
    c = x - m             open: examples depend on m, and nothing has been divided by their spread yet
    v = mean(c**2)        a statistic of what is open; sqrt and rsqrt of it are a scale
    c * rsqrt(v + e)      closed: the scale was made of all that was open

Each replica may normalise its own examples, for that is what batch norm does on fewer of them. A
centre alone, or any other function of examples, would be another loss: what is open must be closed
before anything but a product, a sum or a square is made of it, and before the loss.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, Literal, Var
from jvpipe.ir.examples import Over
from jvpipe.trace.reductions import Lies, open_of, roots_of
from jvpipe.trace.structure import comparable

_SHAPING = frozenset(
    """
    neg convert_element_type copy copy_p reshape broadcast_in_dim squeeze expand_dims transpose reduce_precision name
    stop_gradient optimization_barrier slice rev pad reduce_sum dot_general conv_general_dilated select_n concatenate
    sharding_constraint
    """.split()  # noqa: SIM905 - read as a table
)
"""Primitives that are linear in what is open."""
_SUMS = ("add", "sub", "add_any")
_PRODUCTS = ("mul", "div")
_ROOTS = ("sqrt", "rsqrt")


def first_of_same(eqns: Iterable[JaxprEqn]) -> dict[Var, Var]:
    """Returns for each result that of the first equation which computes the same.

    So the mean that `jnp.var` takes once more is recognised as a repetition.

    Args:
        eqns: in their order.
    """
    first: dict[Var, Var] = {}
    seen: dict[Hashable, JaxprEqn] = {}
    for eqn in eqns:
        if eqn.effects or _jax.inner_jaxprs(eqn):
            continue
        operands = tuple(str(x) if isinstance(x, Literal) else first.get(x, x) for x in eqn.invars)
        before = seen.setdefault((eqn.primitive.name, comparable(eqn.params), operands), eqn)
        first.update(zip(eqn.outvars, before.outvars, strict=True))
    return first


def normalised(
    eqn: JaxprEqn,
    ins: Sequence[Lies],
    out: Lies,
) -> Lies | None:
    """Returns how a result lies, with what is open in it, and whether it is a scale.

    Args:
        eqn: no loop or call.
        ins: how its operands lie.
        out: how its result lies otherwise.

    Returns:
        None if no batch norm makes such a result.
    """
    name = eqn.primitive.name
    moving = [x for x in ins if x.over is not Over.NONE]
    scales = [x for x in moving if x.is_scale]
    opened = open_of(moving)
    if out.over is not Over.ALONG:
        is_root = name in _ROOTS and out.reduced
        return replace(
            out,
            open=opened,
            is_scale=bool(scales) or is_root,
        )
    # A statistic that meets single examples is open from here on.
    entering = [x for x in moving if x.reduced and not x.is_scale]
    opened |= roots_of(entering)
    if scales and len(scales) == len(moving):  # the scale, once for each example
        roots = roots_of(scales)
        return replace(out, open=opened, is_scale=True, roots=roots)
    # Times a scale: what the scale was made of is closed.
    if scales and name in _PRODUCTS:
        return replace(out, open=opened.difference(*(x.roots for x in scales)))
    opened |= roots_of(scales)
    return replace(out, open=opened) if not opened or _keeps(eqn, ins) else None


def _keeps(eqn: JaxprEqn, ins: Sequence[Lies]) -> bool:
    """Tells whether a batch norm may make this of what is open: what is linear in it, or its
    square.
    """
    name = eqn.primitive.name
    if name in _SHAPING or name in _SUMS or name == "square":
        return True
    if name == "integer_pow":
        return eqn.params["y"] == 2
    operands = zip(eqn.invars, ins, strict=True)
    others = {id(atom) for atom, lies in operands if lies.over is not Over.NONE}
    return name in _PRODUCTS and len(others) == 1
