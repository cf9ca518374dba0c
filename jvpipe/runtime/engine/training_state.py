"""The state of a training run, and what puts or makes each of its arrays on a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Device, Tracer
from jvpipe.ir.layers import Spec
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.keys import is_key
from jvpipe.trace.structure import structure
from jvpipe.util.brief import brief
from jvpipe.util.columns import columns
from jvpipe.util.given import is_whole
from jvpipe.util.sizes import format_bytes

Name = tuple[str, int]
"""The name of an array that no cut changes: its kind and the index of its leaf.

Copies share a name.
"""
FEW = 64
"""The most integers that are worth no program of their own."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "words"],
    meta_fields=["step", "stream_steps", "updates", "model"],
)
@dataclass(frozen=True)
class State:
    """The arrays of a run between two steps, and how far it is.

    Attributes:
        arrays: in the order of the buffer table's persistent buffers; None for what another process
            holds. In a stream there are also those of the micro-batches in flight.
        words: of the run's key.
        step: the steps so far.
        stream_steps: the steps of an asynchronous stream so far; 0 when nothing is in flight.
        updates: how often parameters were updated.
        model: the same for all states of one pipeline's model.
    """

    arrays: tuple[jax.Array, ...]
    words: np.ndarray | None
    step: int
    stream_steps: int = 0
    updates: int = 0
    model: object = None

    def __repr__(self) -> str:
        flying = f", {self.stream_steps} steps in flight" if self.stream_steps else ""
        title = f"State(step={self.step}, updates={self.updates}{flying})"
        # A state may hold anything where JAX maps over it: leaves that are not arrays are left out.
        here = [x for x in self.arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
        if any(x.is_deleted() for x in here):
            return f"{title}, consumed by a later step"
        sizes: dict[str, list[int]] = {}
        for x in here:
            sizes.setdefault(_place_in_words(x), []).append(x.nbytes)
        rows = [(on, len(of_one), format_bytes(sum(of_one))) for on, of_one in sizes.items()]
        table = columns([("on", "arrays", "bytes"), *sorted(rows)])
        return f"{title}\n{table}" if rows else title

    def check(self, count: int) -> None:
        """Checks that a step can begin from this state.

        Args:
            count: of the arrays that the plan in use has.

        Raises:
            ValueError: a later step has taken the arrays, or they are another pipeline's, or
                copies.
        """
        if not is_whole(self.step) or self.step < 0:
            step = f"the state is of step {brief(self.step)}"
            raise ValueError(f"{step}: use the one that init, step or restore returned")
        if len(self.arrays) != count:
            raise ValueError(
                "this state belongs to another pipeline or plan: use the one that init or restore gave"
            )
        # There are few types of arrays and many arrays, and every step asks.
        types = {type(x) for x in self.arrays if x is not None}
        if any(issubclass(kind, Tracer) for kind in types):
            raise ValueError(
                "this state is being traced: call the pipeline's members outside of jax.jit and its like, for they "
                "compile all that they run"
            )
        others = [kind for kind in types if not issubclass(kind, jax.Array)]
        if others:
            raise ValueError(
                f"this state is a copy, of {others[0].__name__}: use the one that the step returned"
            )
        if any(x is not None and x.is_deleted() for x in self.arrays):
            raise ValueError(
                "this state was consumed by an earlier step: use the state that the step returned, or save it before "
                "with pipe.save; if that step failed, go on from the last checkpoint with pipe.restore"
            )


def _place_in_words(array: jax.Array) -> str:
    devices = ", ".join(sorted(map(str, array.devices())))
    is_on_device = array.sharding.memory_kind in (None, "device")
    return devices if is_on_device else f"{devices}, on the host"


def _nothing(device: Device, spec: Spec) -> int:
    return 0


@dataclass(frozen=True)
class Leaf:
    """A way to get one array onto a device, or over a group of devices as a spec says.

    Attributes:
        make: puts or makes the array.
        needs: returns the bytes that this takes on the device beside the array.
        program: what makes it, if a program does, so that many can be compiled side by side.
    """

    make: Callable[[Device, Spec], jax.Array]
    needs: Callable[[Device, Spec], int] = _nothing
    program: Program | None = None


def given_leaves(values: Sequence[Any]) -> list[Leaf]:
    """Returns leaves that copy arrays.

    The caller's own are never taken, and lazy ones are read one by one.
    """

    def put(value: Any, device: Device, spec: Spec) -> jax.Array:
        sharding = _jax.sharding_on(device, spec)
        if not isinstance(value, LazyArray):
            return jax.device_put(value, sharding, may_alias=False)
        array = jax.device_put(np.asarray(value), sharding, may_alias=False)
        # The next one is read only when this one has left the host: it never holds two.
        return array.block_until_ready()

    return [Leaf(partial(put, value)) for value in values]


def made_leaves(store: ProgramStore, fn: Callable[..., Any], rng: jax.Array) -> list[Leaf]:
    """Returns each leaf of `fn(rng)` as something to be made on its own device.

    The function is traced as a whole and cut into a program per leaf, by dropping the equations
    that the leaf does not need. So no device ever holds more than it owns, and leaves that are
    alike share a program. Keys, and other few integers, are computed here and now: programs that
    each derived their own from `rng` would seldom be alike.

    Args:
        store: compiles the programs.
        fn: makes the whole tree from a key.
        rng: that key.
    """
    closed = flatten(fn, rng)
    inputs = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    env = dict(zip(inputs, [rng, *closed.consts], strict=True))
    eqns: list[_jax.JaxprEqn] = []
    for eqn in closed.jaxpr.eqns:
        has_inputs = all(v in env for v in jaxprs.variables(eqn.invars))
        # In order, so a derived key is known to the equations that derive others from it.
        if has_inputs and all(map(_is_few_integers, eqn.outvars)):
            jaxprs.run_jaxpr([eqn], env)
        else:
            eqns.append(eqn)
    return [_made_leaf(store, eqns, out, env) for out in closed.jaxpr.outvars]


def _made_leaf(
    store: ProgramStore, eqns: Sequence[_jax.JaxprEqn], out: _jax.Atom, env: dict[_jax.Atom, Any]
) -> Leaf:
    """Returns what makes one leaf.

    Args:
        store: compiles its program.
        eqns: make all leaves.
        out: the leaf.
        env: the values that are known already.
    """
    needed = jaxprs.prune(eqns, [out])
    # A leaf without equations is a value that is known: its program passes it on.
    inputs = list(jaxprs.free_variables(needed)) or [v for v in jaxprs.variables([out]) if v in env]

    def run(*values: Any) -> list[Any]:
        inner = dict(zip(inputs, values, strict=True))
        jaxprs.run_jaxpr(needed, inner)
        return jaxprs.read_by([out], inner)

    key = "init", structure(needed, inputs, [out], rules=False)
    program = Program(key, run, tuple(map(_jax.aval, inputs)))

    def compiled(device: Device, spec: Spec) -> Any:
        (executable,) = store.compile([(program.laid((), [spec]), device)])
        return executable

    def make(device: Device, spec: Spec) -> jax.Array:
        whole = _jax.sharding_on(device)
        arguments = [jax.device_put(env[v], whole) for v in inputs]
        return compiled(device, spec)(*arguments)[0]

    def needs(device: Device, spec: Spec) -> int:
        analysis = compiled(device, spec).memory_analysis()
        return analysis.temp_size_in_bytes + analysis.argument_size_in_bytes

    return Leaf(make, needs, program)


def _is_few_integers(atom: _jax.Atom) -> bool:
    """Tells whether a value is of few keys or integers, which are the same whoever computes them."""
    aval = _jax.aval(atom)
    return (is_key(aval) or np.issubdtype(aval.dtype, np.integer)) and aval.size <= FEW
