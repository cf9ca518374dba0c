"""Sorts JAX's primitives into cheap ones, moves, ones that draw random bits, and heavy ones.

A primitive in none of the lists below counts as heavy: it is computed by one layer only, and its
results are recomputed only if a plan says so. A new cheap primitive of JAX must be added here.
"""

import math
from itertools import chain

from jvpipe import _jax
from jvpipe._jax import JaxprEqn

# The results of cheap operations are recomputed rather than kept or sent. `_CHEAP` has elementwise
# operations, changes of shape, reductions, and the derivation of keys.
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv
    erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma log log1p logistic
    lt lt_to max min mul mulhi name ne neg nextafter not or population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905 - read as a table
)
_CHEAP = _ELEMENTWISE | frozenset(
    """
    argmax argmin broadcast_in_dim concatenate device_put dynamic_slice dynamic_update_slice empty
    empty2 expand_dims from_edtype full iota optimization_barrier pad random_clone random_fold_in
    random_seed random_split random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_sum reduce_xor reshape rev sharding_constraint slice split squeeze stack
    threefry2x32 tie tile to_edtype transpose unstack
    """.split()  # noqa: SIM905 - read as a table
)
_MOVES = frozenset(
    """
    bitcast_convert_type broadcast_in_dim convert_element_type copy copy_p expand_dims iota
    optimization_barrier reshape rev slice squeeze stop_gradient transpose
    """.split()  # noqa: SIM905 - read as a table
)
_RANDOM = frozenset({"random_bits", "rng_bit_generator", "rng_uniform", "random_gamma"})


def is_random(eqn: JaxprEqn) -> bool:
    """Tells whether an equation draws an array of random bits or numbers, and not just a scalar."""
    return eqn.primitive.name in _RANDOM and _jax.aval(eqn.outvars[0]).shape != ()


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Tells whether each element of a result is made of the operands' elements at its position.

    An operand may also be a scalar, or have size one along an axis. It is then broadcast.
    """
    if eqn.primitive.name not in _ELEMENTWISE:
        return False
    result = _jax.aval(eqn.outvars[0]).shape

    def fits(shape: tuple[int, ...]) -> bool:
        if len(shape) != len(result):
            return False
        return all(n in (1, m) for n, m in zip(shape, result, strict=True))

    shapes = {_jax.aval(atom).shape for atom in eqn.invars}
    return all(map(fits, shapes - {()}))


def calls_host(eqn: JaxprEqn) -> bool:
    """Tells whether an equation runs the user's code on the host, except in an inner jaxpr."""
    name = eqn.primitive.name
    return "callback" in name or name in ("debug_print", "ffi_call")


def is_cheap(eqn: JaxprEqn) -> bool:
    """Tells whether recomputing an equation costs less than keeping or sending its result."""
    if eqn.primitive.name in _RANDOM:
        return not is_random(eqn)
    bodies = _jax.inner_jaxprs(eqn)
    if bodies:
        is_loop = eqn.primitive.name in ("scan", "while")
        inner = chain.from_iterable(body.eqns for body in bodies)
        return not is_loop and all(map(is_cheap, inner))
    return eqn.primitive.name in _CHEAP


def is_move(eqn: JaxprEqn) -> bool:
    """Tells whether an equation only moves or casts values; XLA fuses it into its readers."""
    return eqn.primitive.name in _MOVES


def is_heavy(eqn: JaxprEqn) -> bool:
    """Tells whether an equation does heavy work: a product, a convolution, a loop, a gather, or any
    primitive that is not in the lists above.
    """
    return not is_cheap(eqn) and eqn.primitive.name not in _RANDOM


def flops(eqn: JaxprEqn) -> int:
    """Returns the floating-point operations of the products and convolutions in an equation.

    The body of a scan counts once per iteration. The bodies of a while loop count once, because its
    number of iterations is not known. Only the largest branch of a cond counts.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (lhs_contracting, _), _ = params["dimension_numbers"]
        lhs = _jax.aval(eqn.invars[0]).shape
        out = _jax.aval(eqn.outvars[0]).shape
        terms = math.prod(lhs[d] for d in lhs_contracting)
        return 2 * math.prod(out) * terms
    if name == "conv_general_dilated":
        kernel = _jax.aval(eqn.invars[1]).shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        out = _jax.aval(eqn.outvars[0]).shape
        return 2 * math.prod(out) * math.prod(kernel) // max(out_features, 1)
    bodies = [sum(map(flops, body.eqns)) for body in _jax.inner_jaxprs(eqn)]
    if name == "cond":
        return max(bodies)
    return sum(bodies) * (params["length"] if name == "scan" else 1)
