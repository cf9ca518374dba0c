"""The store of compiled programs, which compiles each program once per device.

Programs stay in the store, so a new plan or a migration compiles only programs that are new for a
device.
"""

import operator
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import chain, islice, repeat
from threading import Event, Semaphore
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr
from jvpipe.ir.layers import Spec
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms, differentiate
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body
from jvpipe.trace.keys import is_key
from jvpipe.trace.primitives import calls_host
from jvpipe.util.devices import Device, DeviceGroup, is_plain, sharding_on

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Program:
    """A function of flat arrays, ready to be compiled.

    Attributes:
        key: identifies the computation. Programs with equal keys share one executable, so a key
            must contain everything on which the function depends.
        fn: the function.
        inputs: the shapes and types of the inputs.
        donated: positions of inputs that the program may overwrite.
        calls_host: whether the program calls functions on the host, which can fail after dispatch.
        takes: how the first inputs are cut over a group of devices; other inputs are not cut.
        gives: how the first results are cut over the group; other results are not cut. If an entry
            is None, the compiler chooses how the result is cut.
    """

    key: Hashable
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    calls_host: bool = False
    takes: tuple[Spec, ...] = ()
    gives: tuple[Spec | None, ...] = ()

    def laid(self, takes: Sequence[Spec], gives: Sequence[Spec | None]) -> "Program":
        """Returns the same program, with inputs or results cut along the axes of a device group.

        Args:
            takes: how the first inputs are cut over the group.
            gives: how the first results are cut over the group.
        """
        if all(spec == () for spec in (*takes, *gives)):
            return self
        key = self.key, *takes, "gives", *gives
        return replace(
            self,
            key=key,
            takes=tuple(takes),
            gives=tuple(gives),
        )

    @staticmethod
    def of(
        closed: ClosedJaxpr,
        donated: Iterable[int] = (),
        *,
        key: Hashable,
    ) -> "Program":
        """Returns the program of a jaxpr.

        The program has an additional last result, its marker, which has four bytes and is never
        donated. A caller that waits for the marker waits for the program.

        Args:
            closed: the jaxpr.
            donated: positions of inputs that the program may overwrite.
            key: a value that is equal for jaxprs that are the same.
        """
        run = _jax.jaxpr_as_fun(closed)
        return Program(
            key,
            lambda *xs: (*run(*xs), jax.numpy.int32(0)),
            tuple(closed.in_avals),
            tuple(donated),
            any(map(calls_host, jaxprs.every(closed.jaxpr.eqns))),
        )


def types_of(arrays: Iterable[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Returns shapes and types of arrays, as a part of a program's key."""
    types = [(tuple(array.shape), str(array.dtype)) for array in arrays]
    return tuple(types)


def added_up(values: Sequence[Any]) -> Any:
    """Returns the sum of arrays of one shape, in their order.

    The arrays are added one after another and not with `jnp.sum`, for which the compiler may choose
    the order of summation.
    """
    return reduce(operator.add, values)


def weighted_sum(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Returns the sum of arrays of one shape, each times its weight, in their order."""
    return added_up([x * np.asarray(w, x.dtype) for x, w in zip(values, weights, strict=True)])


def added_weights(values: Sequence[Any]) -> Any:
    """Returns the sum of the losses' weights, in their order and in a type of at least 32 bits.

    >>> import jax.numpy as jnp
    >>> added_weights([jnp.float16(60000)] * 2).item(), added_weights([jnp.int8(100)] * 2).item()
    (120000.0, 200)
    """
    wide = jnp.float32 if jnp.issubdtype(values[0].dtype, jnp.inexact) else jnp.int32
    kept = jnp.issubdtype(values[0].dtype, wide) or values[0].dtype.itemsize >= 4
    return added_up(values if kept else [x.astype(wide) for x in values])


@dataclass(frozen=True)
class PackedCall:
    """An executable with inputs whose elements are smaller than a byte, such as int4.

    When an executable is called, JAX 0.10.2 checks the memory layout of its inputs, and the check
    fails for such inputs on an explicitly chosen device. `jax.jit` makes no such check. So calls go
    through `jax.jit`, which compiles the function a second time, at the first call.
    """

    executable: Any
    jitted: Callable[..., Any]

    def __call__(self, *arrays: jax.Array) -> Any:
        """Runs the program."""
        return self.jitted(*arrays)

    def memory_analysis(self) -> Any:
        """Returns the bytes that the program takes."""
        return self.executable.memory_analysis()


class ProgramStore:
    """A store that makes each layer's programs once, and compiles each program once per device."""

    def __init__(self) -> None:
        self._layers: dict[Hashable, LayerPrograms] = {}
        self._jitted: dict[Hashable, Any] = {}
        self._compiled: dict[tuple[Hashable, Device], Any] = {}
        self._compile_s: dict[tuple[Hashable, Device], float] = {}

    def layer(
        self,
        body: Body,
        kept: Collection[str],
        partial: Collection[int],
    ) -> LayerPrograms:
        """Returns a layer's forward and backward; layers of equal structure share programs.

        Args:
            body: the equations of the layer.
            kept: the names of the candidates that the layer's forward saves.
            partial: the ids of the inputs that later layers also read.
        """
        key = _layer_key(body, kept, partial)
        if key not in self._layers:
            programs = differentiate(body, kept, partial)
            # Different bodies may give equal programs. Then the first programs are used for both.
            self._layers[key] = self._layers.setdefault(programs.key, programs)
        return self._layers[key]

    def known_layer(
        self,
        body: Body,
        kept: Collection[str],
        partial: Collection[int],
    ) -> LayerPrograms | None:
        """Returns a layer's forward and backward if they were made before, otherwise None.

        Args:
            body: the equations of the layer.
            kept: the names of the candidates that its forward saves.
            partial: the tensors that later layers read, too.
        """
        return self._layers.get(_layer_key(body, kept, partial))

    def compile(self, programs: Sequence[tuple[Program, Device]]) -> list[Any]:
        """Returns the executables of programs; missing executables are compiled in parallel."""
        # The keys make sure that a program that several layers share is compiled once.
        missing: dict[tuple[Hashable, Device], tuple[Program, Device]] = {}
        for program, device in programs:
            key = program.key, device
            if key not in self._compiled:
                missing[key] = program, device
        if missing:
            # `jax_enable_x64` may be set for this thread only, so it is set in the pool's threads.
            wide = jax.config.read("jax_enable_x64")

            def compiled(item: tuple[Program, Device]) -> Any:
                program, device = item
                return self._compiled_for(program, device, wide=wide)

            done = in_parallel(compiled, missing.values())
            self._compiled.update(zip(missing, done, strict=True))
        return [self._compiled[p.key, d] for p, d in programs]

    def compile_s(self, programs: Iterable[tuple[Hashable, Device]]) -> float:
        """Returns the seconds that compiling took, summed over programs.

        Args:
            programs: pairs of a program's key and a device; unknown pairs count as 0.
        """
        seconds = [self._compile_s.get(pair, 0.0) for pair in programs]
        return sum(seconds, 0.0)

    def text(
        self,
        program: Program,
        device: Device,
        platform: str | None = None,
    ) -> str:
        """Returns the text of a lowered program, which is the same in every process.

        Args:
            program: the program.
            device: the device that the program is for.
            platform: the platform that the program is lowered for; None means the device's.
        """
        return self._lower(program, device, platform).as_text()

    def _compiled_for(
        self,
        program: Program,
        device: Device,
        *,
        wide: bool,
    ) -> Any:
        """Compiles a program, and records the seconds that this takes.

        Args:
            program: the program.
            device: the device that the program is for.
            wide: whether JAX has 64-bit types in the thread that called `compile`.
        """
        options: Any = _jax.exact(device.platform)
        start_s = time.perf_counter()
        with jax.enable_x64(wide):
            lowered = self._lower(program, device)
            executable = lowered.compile(compiler_options=options)
        self._compile_s[program.key, device] = time.perf_counter() - start_s
        if all(is_plain(x.dtype) or is_key(x) for x in program.inputs):
            return executable
        again = jax.jit(
            program.fn,
            donate_argnums=program.donated,
            keep_unused=True,
            compiler_options=options,
        )
        return PackedCall(executable, again)

    def _lower(
        self,
        program: Program,
        device: Device,
        platform: str | None = None,
    ) -> Any:
        """Lowers a program; `text` explains the arguments."""
        inputs = []
        specs = chain(program.takes, repeat(()))  # inputs without a spec are not cut
        for array, spec in zip(program.inputs, specs, strict=False):
            sharding = sharding_on(device, spec)
            inputs.append(
                jax.ShapeDtypeStruct(
                    array.shape,
                    array.dtype,
                    sharding=sharding,
                )
            )
        if isinstance(device, DeviceGroup):
            return _jax.lowered(_spread(program, device), inputs)
        if program.key not in self._jitted:
            laid = _laid(program)
            jitted = jax.jit(
                laid,
                donate_argnums=program.donated,
                keep_unused=True,
            )
            self._jitted.setdefault(program.key, jitted)
        jitted = self._jitted[program.key]
        with jax.default_device(device):  # for programs without inputs
            return _jax.lowered(jitted, inputs, platform)


def in_parallel(act: Callable[[T], U], items: Collection[T]) -> list[U]:
    """Calls a function on each item, in as many threads as the machine has processors.

    An item is submitted only when a thread is free, because a process that exits waits for all
    submitted items, even for items that no thread has begun. After an error no item is submitted.
    """
    count = os.cpu_count() or 1
    free, failed = Semaphore(count), Event()

    def act_and_free(item: T) -> U:
        try:
            return act(item)
        except BaseException:
            failed.set()
            raise
        finally:
            free.release()

    futures = []
    with ThreadPoolExecutor(count) as pool:
        for item in items:
            free.acquire()
            if failed.is_set():
                break
            futures.append(pool.submit(act_and_free, item))
    return [future.result() for future in futures]


def _laid(program: Program) -> Callable[..., Any]:
    """Returns the function of a program, with a fixed memory layout for its inputs."""
    return lambda *arrays: program.fn(*map(_jax.laid_out, arrays))


def _layer_key(
    body: Body,
    kept: Collection[str],
    partial: Collection[int],
) -> Hashable:
    """Returns a value that is equal for layers of equal structure that keep the same candidates."""
    # The key has the kinds of the values that a layer reads and writes, but not their numbers.
    are_partial = []
    for ref in body.reads:
        is_tensor = ref.kind is ValueKind.TENSOR
        are_partial.append(is_tensor and ref.index in partial)
    reads = tuple(ref.kind for ref in body.reads)
    writes = tuple(ref.kind for ref in body.writes)
    return (
        body.structure,
        tuple(are_partial),
        reads,
        writes,
        body.differentiable,
        body.active,
        body.returned,
        body.received,
        body.share,
        frozenset(kept),
    )


def _spread(program: Program, group: DeviceGroup) -> Any:
    """Returns a jitted program for a device group; the compiler divides its work over devices."""
    closed = jax.make_jaxpr(program.fn)(*program.inputs)
    gives = islice(chain(program.gives, repeat(())), len(closed.out_avals))
    results = [None if spec is None else sharding_on(group, spec) for spec in gives]
    return jax.jit(
        _jax.jaxpr_as_fun(closed),
        donate_argnums=program.donated,
        keep_unused=True,
        out_shardings=results,
    )


@cache
def shared_store() -> ProgramStore:
    """Returns the store of this process, through which pipelines share compiled programs."""
    return ProgramStore()
