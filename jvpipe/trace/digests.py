"""Digests of arrays and of what jaxprs compute: equal in every process that was given the same.

Nothing in them depends on the names of variables, on addresses or on the order of sets, so that
they may be compared between processes whatever PYTHONHASHSEED is.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
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
"""So many arrays are hashed at once: one thread hashes about 1 GB in a second, and hashing releases
Python's lock.
"""


def digest(content: str | bytes | memoryview) -> str:
    """Returns a digest of a text, or of the bytes of an array."""
    content = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def without_addresses(text: str) -> str:
    """Returns a text in which functions are named without their addresses in memory.

    >>> without_addresses("<function f at 0x7f00>")
    '<function f>'
    """
    return _ADDRESS.sub("", text)


def array_digest(value: Any) -> str:
    """Returns a digest of the bytes that an array has on a device.

    Typed keys count by the bytes of their words.
    """
    if isinstance(value, jax.Array) and is_key(value):
        value = jax.random.key_data(value)
    # As a device has it: a float64 array of NumPy and its float32 copy there are the same
    # parameter.
    array = np.asarray(value)
    like = np.ascontiguousarray(array, canonical(array.dtype))
    return digest(like.reshape(-1).view(np.uint8).data)


def leaf_lines(tree: Tree, role: Role = "parameter") -> list[str]:
    """Returns a line for each leaf of a tree: path, type and shape, and the digest of its bytes if
    it has any here.

    Each leaf is read once: gigabytes take as many seconds, divided by the cores that are free.

    Args:
        tree: of arrays or shapes.
        role: of its leaves, for messages.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    with ThreadPoolExecutor(_THREADS) as threads:
        arrays = (leaf for _, leaf in leaves)
        digests = list(threads.map(_digest_of_leaf, arrays))
    lines = zip(shape_lines(tree, role), digests, strict=True)
    return [f"{name} {of_leaf}".rstrip() for name, of_leaf in lines]


def _digest_of_leaf(leaf: Any) -> str:
    """Returns the digest of a leaf.

    Lazy arrays are read. Nothing for a shape, or an array of several processes.
    """
    if type(leaf) is jax.ShapeDtypeStruct or not getattr(leaf, "is_fully_addressable", True):
        return ""
    return array_digest(np.asarray(leaf) if isinstance(leaf, LazyArray) else leaf)


def made_lines(initialiser: Callable[[Any], Tree], rng: jax.Array) -> list[str]:
    """Returns a line for each leaf that a function makes of a key: its path, type and shape, and
    how it is computed.

    The digest of a value is that of the equation that makes it and of the digests of what this
    reads; so each equation is looked at once, however many leaves depend on it.

    Args:
        initialiser: makes a tree of a key.
        rng: the key.
    """
    shapes = jax.eval_shape(initialiser, rng)
    closed = flatten(initialiser, rng)
    digests: dict[Var, str] = {}
    for i, var in enumerate(closed.jaxpr.invars):
        digests[var] = f"key {i}"
    for var, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        digests[var] = array_digest(constant)
    for eqn in closed.jaxpr.eqns:
        read = jaxprs.variables(eqn.invars)
        inputs = list(dict.fromkeys(read))
        itself = _text(structure([eqn], inputs, eqn.outvars))
        operands = [digests[var] for var in read]
        of_all = digest("\n".join([itself, *operands]))
        digests |= {var: f"{of_all} {i}" for i, var in enumerate(eqn.outvars)}

    def text_of(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return _text(structure([], [], [atom]))
        return digests[atom]

    results = zip(shape_lines(shapes), closed.jaxpr.outvars, strict=True)
    return [f"{name} {digest(text_of(atom))}" for name, atom in results]


def shape_lines(tree: Tree, role: Role = "parameter") -> list[str]:
    """Returns a line for each leaf of a tree: its path, its type and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract(tree, role))
    names = path_names([path for path, _ in leaves])
    named = zip(names, (leaf for _, leaf in leaves), strict=True)
    return [f"{name} {leaf.dtype}{list(leaf.shape)}".strip() for name, leaf in named]


def jaxpr_lines(jaxpr: Jaxpr, constants: Sequence[Any]) -> list[str]:
    """Returns lines that are equal if two jaxprs compute the same in the same way from the same
    constants.

    First the constants, then the equations, each with what it reads: variables are compared by
    where they appear first, literals by their values.

    Args:
        jaxpr: with its constants among its inputs.
        constants: their values.
    """
    lines = []
    for i, constant in enumerate(constants):
        lines.append(f"closed-over array {i} {_shape_of(constant)} {array_digest(constant)}")
    compared = structure(
        jaxpr.eqns,
        [*jaxpr.constvars, *jaxpr.invars],
        jaxpr.outvars,
    )
    inputs, equations, outputs = compared.parts
    lines.append(f"inputs {digest(_text(inputs))}")
    pairs = zip(jaxpr.eqns, equations, strict=True)
    for i, (eqn, part) in enumerate(pairs):
        lines.append(f"equation {i}, {_shown(eqn)} {digest(_text(part))}")
    lines.append(f"outputs {digest(_text(outputs))}")
    return lines


def _shown(eqn: JaxprEqn) -> str:
    """Returns what an equation does and to which numbers, for people to find it."""
    numbers = [str(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
    results = ", ".join(str(var.aval) for var in eqn.outvars)
    return " ".join([eqn.primitive.name, *numbers, "to", results])


def closed_lines(closed: ClosedJaxpr) -> list[str]:
    """Returns these lines of a jaxpr that has its constants."""
    return jaxpr_lines(closed.jaxpr, closed.consts)


def _shape_of(value: Any) -> str:
    aval = jax.typeof(value)
    return f"{aval.dtype}{list(aval.shape)}"


def _text(comparable: Any) -> str:
    return without_addresses(repr(comparable))
