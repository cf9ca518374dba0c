"""A layer's programs under all fates, whole and in halves, as a target's compiler makes them.

A layer is computed alike if its sums are (products, convolutions, reductions, and what libraries
do):

    F    has those of the F that keeps everything, whatever it keeps
    B    has those of the B for which everything was kept, and beside these only what F has
    I, W have those of B between them, and no others
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import jax

from experiments.compiled_bits.kernels import Kernel, kernels
from jvpipe._jax import absent_device
from jvpipe.cost.targets import Target
from jvpipe.models import load
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import (
    Share,
    backward_program,
    forward_program,
    input_program,
    layer_programs,
    weight_program,
)
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced
from jvpipe.trace.model import trace_model

EXAMPLES = 4


@dataclass(frozen=True)
class Layer:
    """What was found of a layer: where its sums are not alike, and all its kernels and bytes.

    `other` says where kernels differ that only compute element by element.
    """

    name: str
    unlike: tuple[str, ...]
    other: tuple[str, ...]
    kernels: int
    bytes: int


@dataclass
class Asked:
    """A target's compiler; the kernels of what it has compiled lie in a folder."""

    target: Target
    folder: Path
    compiled: int = 0
    _store: ProgramStore = field(default_factory=ProgramStore)

    def kernels(self, program: Program) -> list[Kernel]:
        """The kernels of a program."""
        text = self._store.text(program, jax.devices("cpu")[0], self.target.platform)
        words = "\n".join((*self.target.identity, text))
        kept = self.folder / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.json"
        if not kept.exists():
            device = absent_device(self.target.platform, self.target.topology, self.target.config)
            (executable,) = self._store.compile([(program, device)])
            found = kernels(executable.as_text())
            self.compiled += 1
            self.folder.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([asdict(kernel) for kernel in found]))
        return [
            Kernel(tuple(x["results"]), tuple(x["sums"]), x["bytes"])
            for x in json.loads(kept.read_text())
        ]


def traced(model: str, size: str, dtype: str) -> Traced:
    """Traces a model of the command line, which computes in a type, and cuts it into layers."""
    workload = load(model, size, dtype=dtype)
    key = jax.random.key(0)
    return trace_model(
        workload.loss_fn,
        jax.eval_shape(workload.init, key),
        workload.abstract_batch(EXAMPLES),
        key,
        workload.initial_state(),
        None,
        has_aux=workload.has_aux,
        has_state=workload.has_state,
    ).traced


def layers(model: Traced, asked: Asked) -> Iterator[Layer]:
    """Compiles the layers of a model under all fates; those that are alike once."""
    store, known = ProgramStore(), dict[Any, Layer]()
    made = {share: layer_programs(store, model, share) for share in get_args(Share)}
    for number, layer in enumerate(model.graph.layers):
        each = {share: programs[number] for share, programs in made.items()}
        key = tuple(programs.key for programs in each.values())
        if key not in known:
            known[key] = _compared(layer.name, each, asked)
        yield known[key]


def _compared(name: str, each: dict[Share, LayerPrograms], asked: Asked) -> Layer:
    found = {
        (share, kind): asked.kernels(program)
        for share, programs in each.items()
        for kind, program in programs_of(programs)
    }
    whole = [x for (_, kind), x in found.items() if kind in "FB"]
    every = [kernel for program in whole for kernel in program]
    unlike, other = (tuple(differences(found, sums)) for sums in (True, False))
    return Layer(name, unlike, other, len(every), sum(kernel.bytes for kernel in every))


def programs_of(programs: LayerPrograms) -> Iterator[tuple[str, Program]]:
    """Yields a layer's programs."""
    yield "F", forward_program(programs)
    yield "B", backward_program(programs)
    if programs.halves is not None:
        yield "I", input_program(programs)
        yield "W", weight_program(programs)


def differences(found: Mapping[tuple[Any, str], Sequence[Kernel]], sums: bool) -> Iterator[str]:
    """Yields where a layer is not computed alike.

    Args:
        found: the kernels of each program, by what is kept and the kind of program.
        sums: whether what adds up is compared, or all else.
    """
    made = {key: Counter(results(program, sums=sums)) for key, program in found.items()}
    kept, kept_back = made["all", "F"], made["all", "B"]
    for (share, kind), own in made.items():
        if kind == "F":
            unlike = own != kept
        elif kind == "B":
            unlike = bool(kept_back - own) or not (own - kept_back).keys() <= kept.keys()
        elif kind == "I":
            back, halves = made[share, "B"], own + made[share, "W"]
            unlike = bool(back - halves) or not halves.keys() <= back.keys()
        else:
            continue
        if unlike:
            yield f"{kind if kind in 'FB' else 'I and W'} of {share}"


def results(program: Iterable[Kernel], *, sums: bool) -> Iterator[str]:
    """Yields the texts of what a program makes: of its sums, or of all else."""
    for kernel in program:
        for result, adds in zip(kernel.results, kernel.sums, strict=True):
            if adds == sums:
                yield result


def share_alike(found: Sequence[Layer], where: Callable[[Layer], Sequence[str]]) -> float:
    """Which part of layers differs nowhere.

    >>> share_alike([Layer("a", (), (), 1, 1), Layer("b", ("B of half",), (), 1, 1)], lambda x: x.unlike)
    0.5
    """
    return sum(not where(layer) for layer in found) / len(found)
