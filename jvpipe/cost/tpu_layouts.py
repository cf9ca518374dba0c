"""The layouts that a TPU's compiler gives to values, and the copies that these layouts need.

The docstring of `temporaries.py` states the rules: `halves`, `relaid`, `twice` and `images`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jvpipe import _jax
from jvpipe._jax import Var
from jvpipe.cost.kernel_steps import KernelProgram, KernelStep, Shape, dims_of, is_batched, loop_of
from jvpipe.cost.roofline import REDUCTIONS
from jvpipe.cost.tiles import COLUMNS, tiled_bytes
from jvpipe.trace import jaxprs
from jvpipe.trace.primitives import is_heavy

_PRODUCTS = ("dot_general", "conv_general_dilated")


class TpuLayouts:
    """The layouts of a program's values.

    Attributes:
        images: the values with the layout of convolutions, which takes more bytes than others.
        halves: the float32 values that are held as bfloat16.
        relaid: the inputs that are copied for the kernels that read them.
        apart: the values that need a temporary buffer in addition to the buffer of a result.
    """

    def __init__(self, program: KernelProgram) -> None:
        self.images = {*_images(program)}
        self.halves = _halves(program, self.images)
        self.relaid = {*_relaid(program)} | (self.images & program.inputs)
        self.apart = {*_laid_twice(program)} | self.images

    def nbytes(self, v: Var) -> int:
        """Counts the bytes of a value in tiles."""
        aval = _jax.aval(v)
        lanes = aval.ndim - 1 if v in self.images else None
        itemsize = aval.dtype.itemsize
        if v in self.halves:
            itemsize //= 2
        return tiled_bytes(aval.shape, itemsize, lanes)

    def with_copies(self, steps: Sequence[KernelStep]) -> list[KernelStep]:
        """Returns steps with their copies.

        A convolution also copies its result into a layout with examples along the rows of tiles.
        The first reader of a relaid input also writes the input's copy.
        """
        copying = []
        without_copy = self.relaid
        for step in steps:
            turned = step.writes & self.images if step.loop is None else ()
            own_bytes = step.own_bytes + sum(map(self.nbytes, turned))
            writes = step.writes | (step.reads & without_copy)
            copying.append(replace(step, writes=writes, own_bytes=own_bytes))
            without_copy = without_copy - step.reads
        return copying


def _images(program: KernelProgram) -> Iterator[Var]:
    """Yields the images: all values with the shape of a convolution's image operand or result.

    A value that takes no more bytes as an image is left out.
    """
    shapes: set[Shape] = set()
    for eqn in program.named("conv_general_dilated"):
        left, right, result = map(dims_of, (*eqn.invars, *eqn.outvars))
        # Both operands of a filter's gradient are images, and its result is a filter. In other
        # convolutions the right operand is the filter.
        is_gradient = eqn.params["dimension_numbers"].lhs_spec[0] != 0
        shapes |= {left, right if is_gradient else result}
    for v in program.inputs | jaxprs.defined(program.eqns):
        if dims_of(v) in shapes and _is_wider(_jax.aval(v)):
            yield v


def _is_wider(aval: Any) -> bool:
    """Tells whether an array takes more bytes with its last dimension along the columns of tiles
    than in its most compact layout.
    """
    itemsize = aval.dtype.itemsize
    along_columns = tiled_bytes(aval.shape, itemsize, aval.ndim - 1)
    return along_columns > tiled_bytes(aval.shape, itemsize)


def _halves(program: KernelProgram, images: set[Var]) -> set[Var]:
    """Finds the float32 values that elementwise kernels make and only unbatched products read.

    Reductions may read such a value, too, because they run in the kernel that makes it. Input
    images count as made by elementwise kernels, because they are copied.
    """
    made_in_loops = images & program.inputs
    read_by_others: set[Var] = set()
    for eqn, kernel in program.with_kernels():
        if loop_of(eqn) is not None:
            made_in_loops.update(eqn.outvars)
        if eqn.primitive.name not in (*_PRODUCTS, *REDUCTIONS) or is_batched(eqn):
            read_by_others.update(kernel.reads)
    return {v for v in made_in_loops - read_by_others if _jax.aval(v).dtype == "float32"}


def _relaid(program: KernelProgram) -> Iterator[Var]:
    """Yields the inputs that are copied for the kernels that loop over them.

    An input is copied in two cases. In the first, it has the shape of a batched product's result,
    and the copy has that result's layout. In the second, its rows are longer than a row of a tile,
    but between programs they do not lie along the columns of tiles, because another layout takes
    fewer bytes. An input that a heavy equation (such as a product) reads is never copied.
    """
    batched = {dims_of(eqn.outvars[0]) for eqn in program.eqns if is_batched(eqn)}
    loops = {loop_of(eqn) for eqn in program.eqns}
    heavy = (eqn for eqn in program.eqns if is_heavy(eqn))
    operands = {v for eqn in heavy for v in jaxprs.variables(eqn.invars)}
    for v in program.inputs - operands:
        aval = _jax.aval(v)
        is_looped_row = aval.shape[-1:] > (COLUMNS,) and aval.shape in loops
        if aval.shape in batched or (is_looped_row and _is_wider(aval)):
            yield v


def _laid_twice(program: KernelProgram) -> Iterator[Var]:
    """Yields products that need a buffer of their own: kernels read them in another layout."""
    transposed = jaxprs.defined(program.named("transpose"))
    for eqn in program.named("dot_general"):
        product = eqn.outvars[0]
        has_table = not transposed.isdisjoint(jaxprs.variables(eqn.invars))
        # In the other layout, the rows of the product lie along the 128 columns of tiles. A product
        # with fewer rows would not fill them.
        has_rows = dims_of(product)[-2:][:1] >= (COLUMNS,)
        if program.readers[product] and has_table and has_rows and not is_batched(eqn):
            yield product
