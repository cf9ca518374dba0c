"""The program of a group of consecutive layers, which calls the program of each layer.

One dispatch then serves several layers. Two forwards F0 and F1, with a tensor t0 between them and
residuals r0 and r1, become one program:

    two programs    F0: x -> t0, r0        F1: t0 -> t1, r1
    one group       x -> r0, t1, r1

The tensor t0 becomes temporary memory of the group, unless another program reads it. The compiler
does not optimize across the calls, so a layer's results in a group are bitwise identical to the
results of its separate program.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr
from jvpipe.ir.rows import Wire
from jvpipe.programs.convolutions import in_order
from jvpipe.programs.store import Program


def group_program(programs: Sequence[Program], wires: Sequence[Wire]) -> Program:
    """Returns a program that runs others one after another.

    Args:
        programs: the programs of the layers.
        wires: for each program, the numbers of the arrays that it takes, and the numbers of the
            arrays that it yields. The last pair is for the whole group. Equal numbers mean the
            same array.
    """
    *parts, (reads, writes) = wires
    inputs: dict[int, Any] = {}
    donated: set[int] = set()
    for program, (taken, _) in zip(programs, parts, strict=True):
        for i, array in zip(taken, program.inputs, strict=True):
            inputs.setdefault(i, array)
        donated.update(taken[i] for i in program.donated)

    def fn(*arrays: jax.Array) -> tuple[Any, ...]:
        traced: dict[Hashable, ClosedJaxpr] = {}  # programs of one key share a jaxpr
        values = dict(zip(reads, arrays, strict=True))
        for program, (taken, yielded) in zip(programs, parts, strict=True):
            if program.key not in traced:
                closed = jax.make_jaxpr(program.fn)(*program.inputs)
                traced[program.key] = in_order(closed)
            out = _apart(traced[program.key], [values[i] for i in taken])
            # The last result is the program's marker, which `zip` leaves out.
            values |= zip(yielded, out, strict=False)
        results = [values[i] for i in writes]
        return (*results, jax.numpy.int32(0))

    keys = (program.key for program in programs)
    taken_by_all = tuple(inputs[i] for i in reads)
    # The group may overwrite an input if one of its programs may.
    overwritten = tuple(i for i in reads if i in donated)
    return Program(
        ("group", *keys, tuple(wires)),
        fn,
        taken_by_all,
        overwritten,
    )


def _apart(closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Calls a jaxpr so that its results are bitwise identical to those of the jaxpr alone.

    The compiler does not fuse operations across the barriers around arguments and results. On
    CPUs, `outlined` also keeps the compiler from inlining the jaxpr.
    """
    barrier = jax.lax.optimization_barrier
    results = _jax.outlined(closed, barrier(list(values)))
    return list(barrier(results))
