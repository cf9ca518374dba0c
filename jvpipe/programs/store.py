"""Compiled programs: one per distinct layer and device, kept for as long as the process lives."""

import operator
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import chain, islice, repeat
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, Device, DeviceGroup
from jvpipe.ir.layers import Spec
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms, differentiate
from jvpipe.trace.graph import Body
from jvpipe.trace.keys import is_key
from jvpipe.trace.primitives import calls_host


@dataclass(frozen=True)
class Program:
    """A function of flat arrays, ready to be compiled.

    Attributes:
        key: names what it computes; equal keys, equal programs.
        fn: the function.
        inputs: the shapes and types that it takes.
        donated: positions of inputs that it may overwrite.
        calls_host: it can fail after its dispatch.
        takes: how the first inputs lie over a group of devices; all others are whole on each.
        gives: the same for results; one of which this says None lies as the compiler finds best.
    """

    key: Hashable
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    calls_host: bool = False
    takes: tuple[Spec, ...] = ()
    gives: tuple[Spec | None, ...] = ()

    def laid(self, takes: Sequence[Spec], gives: Sequence[Spec | None]) -> "Program":
        """Returns the same program, some of whose inputs or results are cut along the axes of a
        group of devices.

        Args:
            takes: of each input.
            gives: of each result, or of the first ones.
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
        marked: bool = False,
        key: Hashable = None,
    ) -> "Program":
        """Returns a program from a jaxpr.

        A marked one also yields four bytes that are never donated, to wait on.

        Args:
            closed: the jaxpr.
            donated: positions of inputs that it may overwrite.
            marked: whether somebody waits on it.
            key: equal for programs that are the same.
        """
        run = _jax.jaxpr_as_fun(closed)
        fn = (lambda *xs: (*run(*xs), jax.numpy.int32(0))) if marked else run
        can_fail = any(map(calls_host, closed.jaxpr.eqns))
        inputs = tuple(closed.in_avals)
        return Program(
            (key, marked),
            fn,
            inputs,
            tuple(donated),
            can_fail,
        )


def types_of(arrays: Iterable[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Returns shapes and types of arrays, as a part of a program's key."""
    types = [(tuple(array.shape), str(array.dtype)) for array in arrays]
    return tuple(types)


def added_up(values: Sequence[Any]) -> Any:
    """Returns the sum of arrays of one shape.

    One after another, not by `jnp.sum`: the order of summation is theirs, whatever the compiler
    does.
    """
    return reduce(operator.add, values)


@dataclass(frozen=True)
class PackedCall:
    """An executable that takes elements smaller than a byte, compiled once more by `jax.jit` when
    it is first called.

    JAX 0.10.2 checks how an executable's inputs lie in memory, and fails on such elements if they
    are on a device of one's choice; under `jit` it does not check.
    """

    executable: Any
    jitted: Callable[..., Any]

    def __call__(self, *arrays: jax.Array) -> Any:
        """Runs it."""
        return self.jitted(*arrays)

    def memory_analysis(self) -> Any:
        """Returns the bytes that it takes."""
        return self.executable.memory_analysis()


class ProgramStore:
    """Makes each layer's programs once and compiles each program once per device."""

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
        """Returns a layer's forward and backward; layers that are alike get the same ones.

        Args:
            body: of the layer.
            kept: the names of the candidates that its forward saves.
            partial: tensors that later layers read too.
        """
        key = _layer_key(body, kept, partial)
        if key not in self._layers:
            programs = differentiate(body, kept, partial)
            # Bodies that differ may still have equal programs: the first of these stands for all.
            self._layers[key] = self._layers.setdefault(programs.key, programs)
        return self._layers[key]

    def known_layer(
        self,
        body: Body,
        kept: Collection[str],
        partial: Collection[int],
    ) -> LayerPrograms | None:
        """Returns the same, if it has been asked for before; None if not."""
        return self._layers.get(
            _layer_key(
                body,
                kept,
                partial,
            )
        )

    def compile(self, programs: Sequence[tuple[Program, Device]]) -> list[Any]:
        """Returns the executables of programs on devices.

        The missing ones are compiled side by side.
        """
        # By key: a program that several layers share is compiled once.
        missing = {(p.key, d): (p, d) for p, d in programs if (p.key, d) not in self._compiled}
        if missing:
            # The setting may be this thread's own: the threads of the pool do not have it.
            wide = jax.config.read("jax_enable_x64")
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                done = pool.map(lambda item: self._compiled_for(*item, wide=wide), missing.values())
                self._compiled.update(zip(missing, done, strict=True))
        return [self._compiled[p.key, d] for p, d in programs]

    def compile_s(self, programs: Iterable[tuple[Hashable, Device]]) -> float:
        """Returns how long it took to compile programs, given by their keys and devices, one after
        another.
        """
        return sum(self._compile_s.get(each, 0.0) for each in programs)

    def text(
        self,
        program: Program,
        device: Device,
        platform: str | None = None,
    ) -> str:
        """Returns what a program is, in words that are the same in every process.

        Args:
            program: which.
            device: that it is for.
            platform: for which it is written; that of the device unless given.
        """
        return self._lower(program, device, platform).as_text()

    def _compiled_for(
        self,
        program: Program,
        device: Device,
        *,
        wide: bool,
    ) -> Any:
        options: Any = _jax.exact(device.platform)
        start_s = time.perf_counter()
        with jax.enable_x64(wide):
            executable = self._lower(program, device).compile(compiler_options=options)
        self._compile_s[program.key, device] = time.perf_counter() - start_s
        if all(_jax.is_plain(x.dtype) or is_key(x) for x in program.inputs):
            return executable
        fn, donated = program.fn, program.donated
        again = jax.jit(
            fn,
            donate_argnums=donated,
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
        inputs = []
        for array, spec in zip(program.inputs, chain(program.takes, repeat(())), strict=False):
            sharding = _jax.sharding_on(device, spec)
            inputs.append(
                jax.ShapeDtypeStruct(
                    array.shape,
                    array.dtype,
                    sharding=sharding,
                )
            )
        if isinstance(device, DeviceGroup):
            return _spread(program, device).lower(*inputs)
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
            if platform is not None:
                return jitted.trace(*inputs).lower(lowering_platforms=(platform,))
            return jitted.lower(*inputs)


def _laid(program: Program) -> Callable[..., Any]:
    """Returns the function of a program, in which readers of an input do not decide how it lies."""
    return lambda *arrays: program.fn(*map(_jax.laid_out, arrays))


def _layer_key(
    body: Body,
    kept: Collection[str],
    partial: Collection[int],
) -> Hashable:
    """Returns a value that is equal for layers that are alike and keep the same."""
    # Which tensors, parameters or keys a layer reads does not count, only what it does with them.
    places = tuple(ref.kind == ValueKind.TENSOR and ref.index in partial for ref in body.reads)
    reads = tuple(ref.kind for ref in body.reads)
    writes = tuple(ref.kind for ref in body.writes)
    return (
        body.structure,
        places,
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
    """Returns a program over the devices of a group: the compiler decides which part is computed
    where.
    """
    closed = jax.make_jaxpr(program.fn)(*program.inputs)
    gives = islice(chain(program.gives, repeat(())), len(closed.out_avals))
    results = [None if spec is None else _jax.sharding_on(group, spec) for spec in gives]
    return jax.jit(
        _jax.jaxpr_as_fun(closed),
        donate_argnums=program.donated,
        keep_unused=True,
        out_shardings=results,
    )


@cache
def shared_store() -> ProgramStore:
    """Returns the store of this process: pipelines of the same model share what they compile."""
    return ProgramStore()
