"""Digests of arrays and of jaxprs, by which processes check that they have the same model.

Digests do not depend on names of variables, on addresses in memory or on the order of sets. So
processes with different values of PYTHONHASHSEED can compare their digests.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jvpipe._jax import Atom, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.keys import is_key
from jvpipe.trace.leaves import Role, abstract, canonical
from jvpipe.trace.structure import structure
from jvpipe.util.paths import path_names

Tree = Any
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_THREADS = 8
"""How many arrays are hashed in parallel. A thread hashes about 1 GB per second, and hashing
releases Python's global lock.
"""


def digest(content: str | bytes | memoryview) -> str:
    """Returns a digest of a text, or of the bytes of an array."""
    content = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def without_addresses(text: str) -> str:
    """Returns a text without the addresses that Python writes into the names of functions.

    >>> without_addresses("<function f at 0x7f00>")
    '<function f>'
    """
    return _ADDRESS.sub("", text)


def array_digest(value: Any) -> str:
    """Returns a digest of the bytes of an array on a device, or of the words of typed keys."""
    if isinstance(value, jax.Array) and is_key(value):
        value = jax.random.key_data(value)
    # The array is cast to the type that it has on a device, because a float64 array of NumPy and
    # its float32 copy on a device are the same parameter.
    array = np.asarray(value)
    like = np.ascontiguousarray(array, canonical(array.dtype))
    return digest(like.reshape(-1).view(np.uint8).data)


def leaf_lines(tree: Tree, role: Role = "parameter") -> list[str]:
    """Returns a line for each leaf of a tree: path, type, shape, and a digest of the leaf's bytes.

    A shape, or an array of which this process has only a part, has no digest. Each leaf is read
    once; this takes about one second per gigabyte, divided by the number of free cores.

    Args:
        tree: a tree of arrays or shapes.
        role: what its leaves are, for messages.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    with ThreadPoolExecutor(_THREADS) as threads:
        arrays = (leaf for _, leaf in leaves)
        digests = list(threads.map(_digest_of_leaf, arrays))
    lines = zip(shape_lines(tree, role), digests, strict=True)
    return [f"{name} {of_leaf}".rstrip() for name, of_leaf in lines]


def _digest_of_leaf(leaf: Any) -> str:
    """Returns the digest of a leaf, and reads it if it is lazy.

    The digest is empty for a shape, and for an array of which this process has only a part.
    """
    is_here = getattr(leaf, "is_fully_addressable", True)
    if type(leaf) is jax.ShapeDtypeStruct or not is_here:
        return ""
    if isinstance(leaf, LazyArray):
        leaf = np.asarray(leaf)
    return array_digest(leaf)


def made_lines(initializer: Callable[[Any], Tree], rng: jax.Array) -> list[str]:
    """Returns a line for each leaf that a function makes from a key: path, type, shape and digest.

    The leaves are not computed. A leaf's digest covers the equation that makes the leaf, and the
    digests of the equation's operands. Each equation is digested once, even if many leaves depend
    on it.

    Args:
        initializer: makes a tree of arrays from a key.
        rng: the key.
    """
    shapes = jax.eval_shape(initializer, rng)
    closed = flatten(initializer, rng)
    digests: dict[Var, str] = {}
    for i, var in enumerate(closed.jaxpr.invars):
        digests[var] = f"key {i}"
    for var, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        digests[var] = array_digest(constant)
    for eqn in closed.jaxpr.eqns:
        read = jaxprs.variables(eqn.invars)
        inputs = list(dict.fromkeys(read))
        # The text of an equation has no names of variables, so equal equations have equal texts.
        # The digests of its operands, which cover the equations that made them, distinguish it from
        # equations with other operands.
        itself = _text(structure([eqn], inputs, eqn.outvars))
        operands = [digests[var] for var in read]
        of_all = digest("\n".join([itself, *operands]))
        for i, var in enumerate(eqn.outvars):
            digests[var] = f"{of_all} {i}"

    def text_of(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return _text(structure([], [], [atom]))
        return digests[atom]

    results = zip(shape_lines(shapes), closed.jaxpr.outvars, strict=True)
    return [f"{name} {digest(text_of(atom))}" for name, atom in results]


def shape_lines(tree: Tree, role: Role = "parameter") -> list[str]:
    """Returns a line for each leaf of a tree: its path, type and shape.

    Args:
        tree: a tree of arrays or shapes.
        role: what its leaves are, for messages.
    """
    tree = abstract(tree, role)
    lines = []
    for name, leaf in zip(path_names(tree), jax.tree.leaves(tree), strict=True):
        shape = f"{leaf.dtype}{list(leaf.shape)}"
        lines.append(f"{name} {shape}".strip())  # the path of a tree that is one leaf is empty
    return lines


def jaxpr_lines(jaxpr: Jaxpr, constants: Sequence[Any]) -> list[str]:
    """Returns lines that are equal for two jaxprs with the same equations and the same constants.

    A line for each constant comes first, then one for the inputs, one for each equation, and one
    for the outputs. Variables are compared by the order of their first appearance, literals by
    their values.

    Args:
        jaxpr: the jaxpr.
        constants: the values of its constants.
    """
    lines = []
    for i, constant in enumerate(constants):
        shape = _shape_of(constant)
        lines.append(f"closed-over array {i} {shape} {array_digest(constant)}")
    compared = structure(
        jaxpr.eqns,
        [*jaxpr.constvars, *jaxpr.invars],
        jaxpr.outvars,
    )
    inputs, equations, outputs = compared.parts
    lines.append(f"inputs {digest(_text(inputs))}")
    pairs = zip(jaxpr.eqns, equations, strict=True)
    for i, (eqn, part) in enumerate(pairs):
        of_eqn = digest(_text(part))
        lines.append(f"equation {i}, {_shown(eqn)} {of_eqn}")
    lines.append(f"outputs {digest(_text(outputs))}")
    return lines


def _shown(eqn: JaxprEqn) -> str:
    """Returns a description that helps a person find an equation: primitive, literals, results."""
    numbers = [str(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
    results = ", ".join(str(var.aval) for var in eqn.outvars)
    return " ".join([eqn.primitive.name, *numbers, "to", results])


def _shape_of(value: Any) -> str:
    aval = jax.typeof(value)
    return f"{aval.dtype}{list(aval.shape)}"


def _text(comparable: Any) -> str:
    return without_addresses(repr(comparable))
