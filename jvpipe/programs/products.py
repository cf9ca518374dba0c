"""Exchanges the operands of products whose result is only read transposed.

The derivative of `x @ w` by `w` is traced as a product of the cotangent and `x`, which is then
transposed. XLA on CPUs takes up to twice as long for the transposed product as for the product of
`x` and the cotangent. So the second product replaces the first:

    (cotangent^T @ x)^T  ->  x^T @ cotangent
"""

from collections import Counter
from collections.abc import Mapping

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from jvpipe.trace import jaxprs


def upright(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same function; a product and its transpose become the exchanged product.

    >>> import jax
    >>> x, dy = jax.numpy.ones((4, 2)), jax.numpy.ones((4, 3))
    >>> eqns = upright(jax.make_jaxpr(lambda x, dy: (dy.T @ x).T)(x, dy)).jaxpr.eqns
    >>> [(str(eqn.primitive), eqn.outvars[0].aval.shape) for eqn in eqns]
    [('transpose', (3, 4)), ('dot_general', (2, 3))]
    """
    jaxpr = closed.jaxpr
    read = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
    readings = Counter(jaxprs.variables([*read, *jaxpr.outvars]))
    products: dict[Var, JaxprEqn] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        product = _transposed(eqn, products)
        # If others read the product as it is, exchanging its operands would compute it twice.
        if eqn.primitive.name == "dot_general" and readings[eqn.outvars[0]] == 1:
            products[eqn.outvars[0]] = eqn
        eqns.append(_turned(product, eqn.outvars[0]) if product else eqn)
    needed = jaxprs.prune(eqns, jaxpr.outvars)
    return ClosedJaxpr(jaxpr.replace(eqns=needed), closed.consts)


def _transposed(eqn: JaxprEqn, products: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """Returns the product that an equation transposes; None if the equation does something else."""
    if eqn.primitive.name != "transpose" or isinstance(eqn.invars[0], Literal):
        return None
    product = products.get(eqn.invars[0])
    return product if product and eqn.params["permutation"] == _exchange(product) else None


def _exchange(product: JaxprEqn) -> tuple[int, ...]:
    """Returns the permutation of a product's result that exchanges the axes of its two operands."""
    (contracting, _), (batch, _) = product.params["dimension_numbers"]
    rank = len(_jax.aval(product.outvars[0]).shape)
    # A product's axes are those of the batch, then those of the first operand, up to `first`, and
    # then those of the second one.
    first = len(_jax.aval(product.invars[0]).shape) - len(contracting)
    of_batch = range(len(batch))
    of_first = range(len(batch), first)
    of_second = range(first, rank)
    return (*of_batch, *of_second, *of_first)


def _turned(product: JaxprEqn, result: Var) -> JaxprEqn:
    """Returns a product with its operands exchanged, whose result is the variable `result`."""
    contracting, batch = product.params["dimension_numbers"]
    precision = product.params["precision"]
    if isinstance(precision, tuple):  # one for each operand
        precision = precision[::-1]
    params = product.params | {
        "dimension_numbers": (contracting[::-1], batch[::-1]),
        "precision": precision,
    }
    return product.replace(
        invars=product.invars[::-1],
        outvars=[result],
        params=params,
    )
