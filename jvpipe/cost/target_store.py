"""Programs for a target that is not here: its compiler tells their bytes, and nothing can run them.

A plan's programs are compiled through a store. This one asks the target's compiler instead, so the
check of a plan against memory limits is the same code for absent devices and for present ones.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from jvpipe._jax import Device
from jvpipe.cost.compiling import Compiler, Refusal, Sizes
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Body


@dataclass(frozen=True)
class AbsentProgram:
    """A program that was compiled for a device that is not here; it stands for an executable."""

    sizes: Sizes

    def memory_analysis(self) -> "AbsentProgram":
        """Returns the object that has the bytes, as executables do."""
        return self

    @property
    def temp_size_in_bytes(self) -> int:
        """The bytes of its temporaries."""
        return self.sizes.temporary


class RefusedProgram(ValueError):  # noqa: N818 - it is the compiler's word
    """The compiler of a target refuses a program."""

    def __init__(self, program: Program, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.program = program


class TargetStore(ProgramStore):
    """Programs as a target's compiler makes them.

    The devices at hand stand for those of the target.

    Args:
        compiler: of the target.
        store: where layers are made into programs.
    """

    def __init__(self, compiler: Compiler, store: ProgramStore) -> None:
        super().__init__()
        self.compiler, self._store = compiler, store
        self.sizes: dict[Hashable, Sizes] = {}

    def layer(self, body: Body, kept: Collection[str], partial: Collection[int]) -> LayerPrograms:
        """Returns a layer's forward and backward from the other store."""
        return self._store.layer(body, kept, partial)

    def compile(self, programs: Sequence[tuple[Program, Device]]) -> list[AbsentProgram]:
        """Returns what programs take.

        Equal ones are compiled once, whatever device stands for the target.

        Raises:
            RefusedProgram: the compiler refuses one of them.
            ValueError: the compiler cannot be asked; the message says why.
        """
        platform = self.compiler.target.platform
        missing = {pair[0].key: pair for pair in programs if pair[0].key not in self.sizes}
        texts = [self._store.text(*pair, platform) for pair in missing.values()]
        try:
            # Answers come in the order of the texts.
            self.sizes.update(zip(missing, self.compiler.sizes(texts), strict=True))
        except Refusal as refusal:
            refused = list(missing)[texts.index(refusal.text)]
            raise RefusedProgram(missing[refused][0], refusal) from None
        return [AbsentProgram(self.sizes[program.key]) for program, _ in programs]
