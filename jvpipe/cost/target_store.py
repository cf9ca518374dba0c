"""Programs for a target: its compiler says what they take, and nothing can run them here."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from jvpipe._jax import Device
from jvpipe.cost.compiling import Compiler, Refusal, Sizes
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Body


@dataclass(frozen=True)
class AbsentProgram:
    """A program that was compiled for a device that is not here."""

    sizes: Sizes

    def memory_analysis(self) -> "AbsentProgram":
        """Returns the bytes that it takes, as an executable reports them."""
        return self

    @property
    def temp_size_in_bytes(self) -> int:
        """The bytes of its temporaries."""
        return self.sizes.temporary


class RefusedProgram(ValueError):  # noqa: N818 - it is the compiler's word
    """The compiler of a target does not take a program."""

    def __init__(self, program: Program, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.program = program


class TargetStore(ProgramStore):
    """Programs as a target's compiler makes them; the devices at hand stand for those of the target.

    Args:
        compiler: of the target.
        store: where layers are made into programs.
    """

    def __init__(self, compiler: Compiler, store: ProgramStore) -> None:
        super().__init__()
        self.compiler, self._store = compiler, store
        self.sizes: dict[Hashable, Sizes] = {}

    def layer(self, body: Body, kept: Collection[str], partial: Collection[int]) -> LayerPrograms:
        """A layer's forward and backward: those of the other store."""
        return self._store.layer(body, kept, partial)

    def compile(self, programs: Sequence[tuple[Program, Device]]) -> list[AbsentProgram]:
        """What programs take; those that are alike are compiled once, whatever device stands for the target.

        Raises:
            RefusedProgram: the compiler does not take one of them.
            ValueError: the compiler cannot be asked, and why.
        """
        platform = self.compiler.target.platform
        missing = {p.key: (p, d) for p, d in programs if p.key not in self.sizes}
        texts = [self._store.text(p, d, platform) for p, d in missing.values()]
        try:
            self.sizes.update(zip(missing, self.compiler.sizes(texts), strict=True))
        except Refusal as refusal:
            refused = list(missing)[texts.index(refusal.text)]
            raise RefusedProgram(missing[refused][0], refusal) from None
        return [AbsentProgram(self.sizes[program.key]) for program, _ in programs]
