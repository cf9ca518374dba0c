"""The costs of layers on the device at hand: each distinct layer is run and timed once."""

import statistics
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe._jax import ClosedJaxpr, Device
from jvpipe.cost import roofline
from jvpipe.cost.archive import Archive, surroundings
from jvpipe.cost.compiled import with_compiled_bytes
from jvpipe.cost.costs import Costs
from jvpipe.cost.effort import MEASURING
from jvpipe.cost.frontier import Calibration, layer_options, recomputes
from jvpipe.cost.model import Work, costs_of, own_inputs, split_costs, with_updates
from jvpipe.cost.presets import accelerator_of
from jvpipe.cost.recompute import Recompute
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model import (
    Share,
    backward_program,
    forward_program,
    input_program,
    kept_names,
    layer_programs,
    piece_program,
    weight_program,
)
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.pieces import Piece
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced


@dataclass(frozen=True, slots=True)
class Run:
    """A program's run: its seconds, and the bytes beside its inputs and results."""

    seconds: float
    temporary_bytes: int


Runs = dict[Hashable, Run]
"""What programs took, by their keys."""


def measure_programs(
    store: ProgramStore,
    programs: Sequence[Program],
    device: Device,
    earlier: Runs | None = None,
    room_bytes: int | None = None,
    archive: Archive | None = None,
) -> Runs:
    """Compiles programs side by side, and runs and times each distinct one that there is room for.

    Args:
        store: where they are compiled.
        programs: which.
        device: where they run.
        earlier: what was measured before and is not measured again; the others are added.
        room_bytes: that the device has for a program.
        archive: where seconds that earlier processes have measured are found, and others are kept.
    """
    runs = {} if earlier is None else earlier
    distinct = {program.key: program for program in programs if program.key not in runs}
    executables = store.compile([(program, device) for program in distinct.values()])
    needs = [executable.memory_analysis() for executable in executables]
    fitting = [
        (program, executable, need.temp_size_in_bytes)
        for program, executable, need in zip(distinct.values(), executables, needs, strict=True)
        if room_bytes is None or _needed_bytes(need) <= room_bytes
    ]
    seconds = (archive or Archive()).each(
        lambda i: ("seconds", surroundings(device), store.text(fitting[i][0], device)),
        len(fitting),
        1,
        lambda missing: [[s] for s in _in_turns([fitting[i][:2] for i in missing], device)],
    )
    runs.update(
        {
            program.key: Run(s, size)
            for (program, _, size), (s,) in zip(fitting, seconds, strict=True)
        }
    )
    return runs


def measured_costs(
    traced: Traced,
    device: Device,
    store: ProgramStore,
    optimizer: OptimizerCut | None = None,
    microbatches: int = 1,
    *,
    fates: bool = True,
    split: bool = False,
    earlier: Runs | None = None,
    room_bytes: int | None = None,
    archive: Archive | None = None,
) -> Costs:
    """The costs of a model on a device at hand; layers alike are measured once.

    Args:
        traced: the model.
        device: where its layers run.
        store: where their programs are kept; those with everything kept are those of a run.
        optimizer: counts its state, and its updates are measured.
        microbatches: in a step.
        fates: whether layers have options other than keeping everything. Then their backwards are also measured with
            half of the candidates kept and with none, and the modelled seconds of recomputation are made to agree; how
            many bytes each option needs more is what its backward needs as compiled.
        split: whether the halves of backwards are measured too.
        earlier: what programs took that were measured before; those measured now are added.
        room_bytes: that the device has for a program; what needs more is estimated by the roofline, at the pace of what
            was measured.
        archive: where seconds are found that were measured before, and kept.
    """
    shares: tuple[Share, ...] = ("all", "half", "nothing") if fates else ("all",)
    kept = {share: [p.on_trial for p in layer_programs(store, traced, share)] for share in shares}
    forwards = [forward_program(programs, recompute=True) for programs in kept["all"]]
    backwards = {
        share: [backward_program(programs) for programs in kept[share]] for share in shares
    }
    pairs = list(zip(forwards, (p.forward for p in kept["all"]), strict=True))
    for share in shares:
        pairs += zip(backwards[share], (p.backward for p in kept[share]), strict=True)
    pairs += _halves(kept["all"]) if split else ()
    updates = optimizer.update if optimizer is not None else ()
    pairs += ((piece_program(piece), piece.program) for piece in updates)
    idle = {program.key: Run(0.0, 0) for program, jaxpr in pairs if not jaxpr.jaxpr.outvars}
    busy = {program.key: (program, jaxpr) for program, jaxpr in pairs if program.key not in idle}
    runs = measure_programs(
        store, [program for program, _ in busy.values()], device, earlier, room_bytes, archive
    )
    runs = idle | runs | _estimated(store, device, runs, busy)
    works = []
    for forward, backward in zip(forwards, backwards["all"], strict=True):
        f, b = runs[forward.key], runs[backward.key]
        works.append(Work(f.seconds, b.seconds, f.temporary_bytes, b.temporary_bytes))
    if optimizer is not None:
        works = with_updates(works, traced.graph.loss_layer, optimizer, partial(_update_s, runs))
    signatures = [programs.signature for programs in kept["all"]]
    options = None
    if fates:
        recomputed = recomputes(traced, kept["nothing"], accelerator_of(device))
        measured = []
        for layer, recompute in enumerate(recomputed):
            by_share: dict[Share, Run] = {
                share: runs[backwards[share][layer].key] for share in shares
            }
            measured.append(_calibration(recompute, by_share))
        options = layer_options(traced, own_inputs(traced.graph, signatures), recomputed, measured)
        options = with_compiled_bytes(
            traced, options, [id(p) for p in kept["nothing"]], store, device
        )
    splits = split_costs(traced.graph, kept["all"], partial(_halves_s, runs)) if split else None
    return costs_of(traced.graph, signatures, works, options, optimizer, microbatches, splits)


def _halves(programs: Iterable[LayerPrograms]) -> Iterator[tuple[Program, ClosedJaxpr]]:
    """Yields both halves of every backward that has them."""
    for compiled in programs:
        if compiled.halves is not None:
            yield input_program(compiled), compiled.halves.input
            yield weight_program(compiled), compiled.halves.weight


def _halves_s(runs: Runs, programs: LayerPrograms) -> tuple[float, float]:
    return runs[input_program(programs).key].seconds, runs[weight_program(programs).key].seconds


def _update_s(runs: Runs, piece: Piece) -> float:
    return runs[piece_program(piece).key].seconds


def _estimated(
    store: ProgramStore,
    device: Device,
    runs: Runs,
    programs: Mapping[Hashable, tuple[Program, ClosedJaxpr]],
) -> Runs:
    """Estimates what the programs that were not run would have taken."""
    missing = [key for key in programs if key not in runs]
    if not missing:
        return {}
    modelled_s = {
        key: roofline.seconds(jaxpr, accelerator_of(device)) for key, (_, jaxpr) in programs.items()
    }
    paces = [runs[key].seconds / s for key, s in modelled_s.items() if key in runs and s]
    pace = statistics.median(paces) if paces else 1.0
    executables = store.compile([(programs[key][0], device) for key in missing])
    temporary = [executable.memory_analysis().temp_size_in_bytes for executable in executables]
    return {
        key: Run(pace * modelled_s[key], size) for key, size in zip(missing, temporary, strict=True)
    }


def _calibration(recompute: Recompute, runs: Mapping[Share, Run]) -> Calibration:
    """Pairs the seconds that recomputing takes a layer's backward by the roofline with those that it took."""
    least = runs["all"]
    points = []
    for share, run in runs.items():
        if share != "all":
            kept = kept_names(recompute.candidates, share)
            modelled = recompute.extra_s(
                recompute.dropping([i for i, n in enumerate(recompute.names) if n in kept])[1]
            )
            points.append((modelled, max(run.seconds - least.seconds, 0.0)))
    return Calibration(tuple(points))


def _needed_bytes(needs: Any) -> int:
    held_bytes = (
        needs.argument_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
    )
    return held_bytes + needs.temp_size_in_bytes


def _in_turns(programs: Sequence[tuple[Program, Any]], device: Device) -> list[float]:
    """The least seconds of each program in several turns, in which all run one after another."""
    least = [_seconds(executable, program, device) for program, executable in programs]
    for _ in range(MEASURING.turns - 1):
        least = [
            min(s, _seconds(executable, program, device)) if s < MEASURING.long_s else s
            for s, (program, executable) in zip(least, programs, strict=True)
        ]
    return least


def _seconds(executable: Any, program: Program, device: Device) -> float:
    """The median of a few runs after one to warm up; what the program overwrites is put there again for each."""
    examples = [example_of(a) for a in program.inputs]
    kept = {
        i: jax.device_put(x, device) for i, x in enumerate(examples) if i not in program.donated
    }
    taken: list[float] = []
    while len(taken) <= MEASURING.runs and (
        len(taken) < 3 or sum(taken) < MEASURING.runs * MEASURING.long_s
    ):
        inputs = [
            kept[i] if i in kept else jax.device_put(x, device, may_alias=False)
            for i, x in enumerate(examples)
        ]
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        jax.block_until_ready(executable(*inputs))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def example_of(shape: Any) -> Any:
    """Makes values of no consequence, but no zeros: these are faster than real ones on some devices."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return _keys(shape)
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return np.zeros(shape.shape, shape.dtype)
    return np.random.default_rng(0).uniform(-1, 1, shape.shape).astype(shape.dtype)


def _keys(shape: Any) -> jax.Array:
    """Keys of a shape and kind."""
    impl: list[Any] = []
    words = jax.eval_shape(
        lambda keys: [impl.append(jax.random.key_impl(keys)), jax.random.key_data(keys)][1], shape
    )
    return jax.random.wrap_key_data(jnp.ones(words.shape, words.dtype), impl=impl[0])
