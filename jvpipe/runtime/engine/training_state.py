"""The state of a training run, and leaves: ways to make its arrays or put them on devices.

A leaf either copies a given array (`given_leaves`), or runs a program that makes one array of a
function's result (`made_leaves`). With programs, a model may be larger than any one device, because
each array is made where it will lie.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Tracer
from jvpipe.ir.layers import Spec
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.keys import is_key
from jvpipe.trace.structure import structure
from jvpipe.util.brief import brief
from jvpipe.util.columns import columns
from jvpipe.util.devices import Device, sharding_on, unshared
from jvpipe.util.given import is_whole
from jvpipe.util.sizes import format_bytes

Name = tuple[str, int]
"""The name of an array: its kind and the index of its leaf.

The name does not depend on the cuts or on the array's place, so all copies of an array share it.
"""
FEW = 64
"""The most elements of an array of keys or integers that `made_leaves` computes itself.

Larger arrays are made by programs.
"""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "words"],
    meta_fields=["step", "stream_steps", "updates", "model"],
)
@dataclass(frozen=True)
class State:
    """The arrays of a run between two steps, and the run's counts so far.

    Attributes:
        arrays: the arrays, in the order of the buffer table's persistent buffers; None for an array
            of another process. In a stream (a run without flushes), they include the arrays of the
            micro-batches in flight.
        words: the integers of the run's random key; None if the run has no key.
        step: how many steps the run has had.
        stream_steps: how many steps the stream has had; 0 if nothing is in flight.
        updates: how many updates the parameters have had.
        model: an object that stands for the pipeline's model; only states of this model have it.
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
        # `jax.tree.map` over a state may put other things in place of arrays. Those are left out.
        here = [x for x in self.arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
        if any(x.is_deleted() for x in here):
            return f"{title}, consumed by a later step"
        sizes: dict[str, list[int]] = {}
        for x in here:
            sizes.setdefault(_place_in_words(x), []).append(x.nbytes)
        rows = []
        for on, of_one in sizes.items():
            rows.append((on, len(of_one), format_bytes(sum(of_one))))
        table = columns([("on", "arrays", "bytes"), *sorted(rows)])
        return f"{title}\n{table}" if rows else title

    def check(self, count: int) -> None:
        """Checks that a step can begin from this state.

        Args:
            count: how many arrays a state has under the plan in use.

        Raises:
            ValueError: an earlier step has consumed the arrays, the state belongs to another
                pipeline, or its arrays were replaced by others that are not JAX arrays.
        """
        if not is_whole(self.step) or self.step < 0:
            step = f"the state is of step {brief(self.step)}"
            raise ValueError(f"{step}: use the one that init, step or restore returned")
        if len(self.arrays) != count:
            raise ValueError(
                "this state belongs to another pipeline or plan: "
                "use the one that init or restore gave"
            )
        # Every step makes these checks, so they must be fast. There are many arrays, but of few
        # types, so the types are checked.
        types = {type(x) for x in self.arrays if x is not None}
        if any(issubclass(kind, Tracer) for kind in types):
            raise ValueError(
                "this state is being traced: call the pipeline's members outside of "
                "jax.jit and its like, because they compile all that they run"
            )
        others = [kind for kind in types if not issubclass(kind, jax.Array)]
        if others:
            raise ValueError(
                f"this state is a copy, of {others[0].__name__}: use the one that the step returned"
            )
        if any(x is not None and x.is_deleted() for x in self.arrays):
            raise ValueError(
                "this state was consumed by an earlier step: "
                "use the state that the step returned, or save it before with pipe.save; "
                "if that step failed, go on from the last checkpoint with pipe.restore"
            )


def _place_in_words(array: jax.Array) -> str:
    devices = ", ".join(sorted(map(str, array.devices())))
    is_on_device = array.sharding.memory_kind in (None, "device")
    return devices if is_on_device else f"{devices}, on the host"


def _nothing(device: Device, spec: Spec) -> int:
    return 0


@dataclass(frozen=True)
class Leaf:
    """A way to get an array onto a device, or over the devices of a mesh as a spec says.

    Attributes:
        make: makes the array there, or copies a given one.
        needs: returns the bytes that `make` takes on the device besides the array.
        program: the program with which `make` makes the array, so that the programs of many leaves
            can be compiled at the same time; None if the array is given.
    """

    make: Callable[[Device, Spec], jax.Array]
    needs: Callable[[Device, Spec], int] = _nothing
    program: Program | None = None


def given_leaves(values: Sequence[Any]) -> list[Leaf]:
    """Returns leaves that copy given arrays; lazy arrays are read one at a time.

    The caller's arrays are always copied, because a step may overwrite the arrays of a state.
    """

    def put(value: Any, device: Device, spec: Spec) -> jax.Array:
        """Copies an array to a device.

        Args:
            value: the array of the caller, or a lazy one.
            device: the device, or a mesh.
            spec: how the array lies over the mesh.
        """
        sharding = sharding_on(device, spec)
        if not isinstance(value, LazyArray):
            return jax.device_put(unshared(value), sharding, may_alias=False)
        array = jax.device_put(np.asarray(value), sharding, may_alias=False)
        # Because of this wait, the host holds at most one array that was read from its file.
        return array.block_until_ready()

    return [Leaf(partial(put, value)) for value in values]


def made_leaves(store: ProgramStore, fn: Callable[..., Any], rng: jax.Array) -> list[Leaf]:
    """Returns a leaf for each array of `fn(rng)`, which makes the array on its own device.

    The function is traced as a whole. The program of a leaf has only the equations that the leaf
    needs. So no device holds arrays of other devices. Leaves with equal equations share a program.

    Random keys and other small arrays of integers are computed here and passed to the programs. If
    each program derived its own key from `rng`, the keys would have different equations, and few
    programs would be equal.

    Args:
        store: compiles the programs.
        fn: makes the whole tree from a key.
        rng: the key.
    """
    closed = flatten(fn, rng)
    inputs = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    env = dict(zip(inputs, [rng, *closed.consts], strict=True))
    eqns: list[_jax.JaxprEqn] = []
    for eqn in closed.jaxpr.eqns:
        has_inputs = all(v in env for v in jaxprs.variables(eqn.invars))
        # `env` grows with what is computed here. So keys made from other keys are computed, too.
        if has_inputs and all(map(_is_few_integers, eqn.outvars)):
            jaxprs.run_jaxpr([eqn], env)
        else:
            eqns.append(eqn)
    return [_made_leaf(store, eqns, out, env) for out in closed.jaxpr.outvars]


def _made_leaf(
    store: ProgramStore,
    eqns: Sequence[_jax.JaxprEqn],
    out: _jax.Atom,
    env: dict[_jax.Atom, Any],
) -> Leaf:
    """Returns the leaf that makes one array.

    Args:
        store: compiles the program.
        eqns: the equations of all leaves, except those that were computed before.
        out: the variable of the array.
        env: the values that were computed before, by variable.
    """
    needed = jaxprs.prune(eqns, [out])
    # An array that needs no equations has been computed before. Its program only returns it.
    inputs = list(jaxprs.free_variables(needed))
    if not inputs:
        inputs = [v for v in jaxprs.variables([out]) if v in env]

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
        whole = sharding_on(device)
        arguments = [jax.device_put(env[v], whole) for v in inputs]
        return compiled(device, spec)(*arguments)[0]

    def needs(device: Device, spec: Spec) -> int:
        analysis = compiled(device, spec).memory_analysis()
        return analysis.temp_size_in_bytes + analysis.argument_size_in_bytes

    return Leaf(make, needs, program)


def _is_few_integers(atom: _jax.Atom) -> bool:
    """Tells whether a value is a few keys or integers; these are bitwise equal on all devices."""
    aval = _jax.aval(atom)
    return (is_key(aval) or np.issubdtype(aval.dtype, np.integer)) and aval.size <= FEW
