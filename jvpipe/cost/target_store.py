"""A store of programs for absent devices: a compiler reports their bytes, and nothing runs them.

To check a plan against memory limits, a store compiles the plan's programs. The store of this file
asks the compiler of a target, which is the kind of the absent devices. So the same code checks
plans for absent devices and for devices at hand.
"""

from collections.abc import Collection, Hashable, Sequence

from jvpipe.cost.compiling import Compiler, Refusal, Sizes
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.body import Body
from jvpipe.util.devices import Device


class RefusedProgram(ValueError):  # noqa: N818 - it is the compiler's word
    """The refusal of a program by the compiler of a target."""

    def __init__(self, program: Program, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.program = program


class TargetStore(ProgramStore):
    """A store whose programs are compiled by a target's compiler.

    Its methods take devices at hand, which stand for devices of the target.

    Args:
        compiler: the compiler of the target.
        store: the store that makes the programs of layers, and their texts for the compiler.

    Attributes:
        sizes: by the keys of programs, the compiler's answers so far.
    """

    def __init__(self, compiler: Compiler, store: ProgramStore) -> None:
        super().__init__()
        self.compiler = compiler
        self._store = store
        self.sizes: dict[Hashable, Sizes] = {}

    def layer(self, body: Body, kept: Collection[str], partial: Collection[int]) -> LayerPrograms:
        """Returns a layer's forward and backward from the store that makes programs.

        Args:
            body: the equations of the layer.
            kept: the names of the candidates that its forward saves.
            partial: the tensors that later layers read, too.
        """
        return self._store.layer(body, kept, partial)

    def compile(self, programs: Sequence[tuple[Program, Device]]) -> list[Sizes]:
        """Returns the bytes of programs.

        Equal programs are compiled once, even if they come with different devices.

        Raises:
            RefusedProgram: the compiler refuses one of the programs.
            ValueError: the compiler cannot be asked; the message says why.
        """
        platform = self.compiler.target.platform
        missing = {pair[0].key: pair for pair in programs if pair[0].key not in self.sizes}
        texts = [self._store.text(*pair, platform) for pair in missing.values()]
        try:
            # `sizes` returns its answers in the order of the texts.
            self.sizes.update(zip(missing, self.compiler.sizes(texts), strict=True))
        except Refusal as refusal:
            refused = list(missing)[texts.index(refusal.text)]
            raise RefusedProgram(missing[refused][0], refusal) from None
        return [self.sizes[program.key] for program, _ in programs]
