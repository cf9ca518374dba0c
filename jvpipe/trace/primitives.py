"""The classes of JAX's primitives: which cost little, which draw random bits, which XLA materialises."""

import math
from functools import cache

from jvpipe import _jax
from jvpipe._jax import JaxprEqn

# Elementwise operations, changes of shape, reductions, keys: recomputed rather than kept or sent.
_CHEAP = """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp clz complex concatenate conj convert_element_type copy copy_p cos cosh
    device_put digamma div dynamic_slice dynamic_update_slice empty empty2 eq eq_to erf erf_inv erfc exp exp2
    expand_dims expm1 floor from_edtype full ge gt imag integer_pow iota is_finite le le_to lgamma log log1p
    logistic lt lt_to max min mul mulhi name ne neg nextafter not optimization_barrier or pad population_count
    pow random_clone random_fold_in random_seed random_split random_unwrap random_wrap real reduce_and
    reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_xor rem reshape rev round
    rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    slice split sqrt square squeeze stack stop_gradient sub tan tanh threefry2x32 tie tile to_edtype transpose
    unstack xor
"""
_MOVES = """
    bitcast_convert_type broadcast_in_dim convert_element_type copy copy_p expand_dims iota optimization_barrier reshape
    rev slice squeeze stop_gradient transpose
"""
_RANDOM = frozenset({"random_bits", "rng_bit_generator", "rng_uniform", "random_gamma"})


def is_random(eqn: JaxprEqn) -> bool:
    """Tells whether an equation draws an array of random bits, which is not cheap."""
    return eqn.primitive.name in _RANDOM and _jax.aval(eqn.outvars[0]).shape != ()


@cache
def _cheap_names() -> frozenset[str]:
    return frozenset(_CHEAP.split())


def calls_host(eqn: JaxprEqn) -> bool:
    """Tells whether an equation runs code of the user's on the host, which can raise."""
    name = eqn.primitive.name
    return (
        "callback" in name
        or name in ("debug_print", "ffi_call")
        or any(calls_host(inner) for body in _jax.inner_jaxprs(eqn) for inner in body.eqns)
    )


def is_cheap(eqn: JaxprEqn) -> bool:
    """Tells whether recomputing an equation costs less than keeping or sending its result."""
    if eqn.primitive.name in _RANDOM:
        return not is_random(eqn)
    if bodies := _jax.inner_jaxprs(eqn):
        calls = eqn.primitive.name not in ("scan", "while")
        return calls and all(is_cheap(inner) for body in bodies for inner in body.eqns)
    return eqn.primitive.name in _cheap_names()


def is_move(eqn: JaxprEqn) -> bool:
    """Tells whether an equation only moves or casts values, which its readers do as part of their work."""
    return eqn.primitive.name in _move_names()


@cache
def _move_names() -> frozenset[str]:
    return frozenset(_MOVES.split())


def is_heavy(eqn: JaxprEqn) -> bool:
    """Tells whether an equation does real work: a product, a convolution, a scan, a gather, or an unknown call."""
    return not is_cheap(eqn) and eqn.primitive.name not in _RANDOM


def flops(eqn: JaxprEqn) -> int:
    """The floating-point operations of an equation's products and convolutions."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (lhs_contracting, _), _ = params["dimension_numbers"]
        lhs = _jax.aval(eqn.invars[0]).shape
        out = _jax.aval(eqn.outvars[0]).shape
        return 2 * math.prod(out) * math.prod(lhs[d] for d in lhs_contracting)
    if name == "conv_general_dilated":
        kernel = _jax.aval(eqn.invars[1]).shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        out = _jax.aval(eqn.outvars[0]).shape
        return 2 * math.prod(out) * math.prod(kernel) // max(out_features, 1)
    inner = sum(flops(e) for body in _jax.inner_jaxprs(eqn) for e in body.eqns)
    return inner * params.get("length", 1) if name == "scan" else inner
