"""Measures the costs of a model's layers on a device at hand: each distinct program is timed once.

A program that does not fit on the device is not run. Its seconds are estimated: they are the
roofline's seconds (`roofline.py`) times a pace. A program that ran has a pace, too: its measured
seconds divided by the roofline's. The median of these paces is used. Seconds that an earlier
process has measured come from the archive.
"""

import statistics
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jvpipe._jax import ClosedJaxpr
from jvpipe.cost import roofline
from jvpipe.cost.archive import Archive, surroundings
from jvpipe.cost.compiled import with_compiled_bytes
from jvpipe.cost.costs import Costs, Option
from jvpipe.cost.example_inputs import example_of
from jvpipe.cost.frontier import Calibration, layer_options, recomputes
from jvpipe.cost.measuring_effort import MEASURING
from jvpipe.cost.model_costs import Work, costs_of, own_inputs, split_costs, with_update_seconds
from jvpipe.cost.presets import accelerator_of
from jvpipe.cost.recompute import Recompute
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import (
    Share,
    backward_program,
    forward_program,
    input_program,
    kept_names,
    layer_programs,
    piece_program,
    weight_program,
)
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.pieces import Piece
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.trace.graph import Traced
from jvpipe.util.devices import Device


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of a program that runs alone on its device.

    Attributes:
        seconds: the time that the program takes.
        temporary_bytes: the bytes that it needs besides its inputs and results.
        processor_s: the processor time that it takes on all cores of the host together.
    """

    seconds: float
    temporary_bytes: int
    processor_s: float = 0.0

    def beside(self, devices_per_core: float) -> "Run":
        """Returns the run as it would be while all CPU devices of the process are busy.

        Each device then has 1 / `devices_per_core` cores, so a run takes at least
        `devices_per_core * processor_s`. For other devices, `devices_per_core` is 0.

        >>> Run(3.0, 0, processor_s=5.0).beside(0.5).seconds, Run(3.0, 0, processor_s=5.0).beside(1.0).seconds
        (3.0, 5.0)
        """
        return replace(self, seconds=max(self.seconds, devices_per_core * self.processor_s))


Runs = dict[Hashable, Run]
"""Runs by the keys of programs."""


def measure_programs(
    store: ProgramStore,
    programs: Sequence[Program],
    device: Device,
    earlier: Runs | None = None,
    room_bytes: int | None = None,
    archive: Archive | None = None,
) -> Runs:
    """Compiles programs side by side, then times each distinct program that fits on the device.

    Args:
        store: the store that compiles the programs.
        programs: the programs, some of which may be the same.
        device: the device that runs the programs.
        earlier: earlier measurements, which are not repeated. New ones are added to this dict.
        room_bytes: the bytes that the device has for a program; None if there is no limit.
        archive: the archive with the seconds of earlier processes; new seconds are kept there.
    """
    runs = {} if earlier is None else earlier
    distinct = {program.key: program for program in programs if program.key not in runs}
    executables = store.compile([(program, device) for program in distinct.values()])
    fitting: list[tuple[Program, Any]] = []
    temporary: list[int] = []
    for program, executable in zip(distinct.values(), executables, strict=True):
        needs = executable.memory_analysis()
        if room_bytes is None or _needed_bytes(needs) <= room_bytes:
            fitting.append((program, executable))
            temporary.append(needs.temp_size_in_bytes)

    def description(i: int) -> tuple[str, ...]:
        program, _ = fitting[i]
        return "seconds", surroundings(device), store.text(program, device)

    def measure(missing: Sequence[int]) -> list[list[float]]:
        return _in_turns([fitting[i] for i in missing], device)

    # Programs that an earlier process has timed are not run. They were compiled above
    # because only the compiler knows their temporary bytes.
    seconds = (archive or Archive()).each(
        description,
        len(fitting),
        2,
        measure,
    )
    for (program, _), (s, processor_s), size in zip(fitting, seconds, temporary, strict=True):
        runs[program.key] = Run(s, size, processor_s)
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
    devices_per_core: float = 0.0,
) -> Costs:
    """Measures the costs of a model on a device at hand.

    With `fates`, three backwards of each layer are measured. They keep all, half and none of
    the candidates, which are the values whose fates can be chosen. The modeled seconds of
    recomputation are made to agree with these measurements. The extra bytes of each option
    are those of its backward as compiled. If the model recomputes only whole layers, each
    layer has only the backward that keeps all candidates.

    Args:
        traced: the model.
        device: the device that runs the layers.
        store: the store of the layers' programs. Training with the same store does not compile the
            same programs again.
        optimizer: the optimizer, whose state is counted and whose updates are measured;
            None to leave both out.
        microbatches: micro-batches of a step.
        fates: whether layers have options other than keeping everything.
        split: whether to measure the halves of backwards, too.
        earlier: earlier measurements, to which new ones are added.
        room_bytes: the bytes that the device has for a program; programs that need more are
            estimated.
        archive: the archive with the seconds of earlier processes; new seconds are kept there.
        devices_per_core: the devices of the pipeline per core of the host, if they are
            CPUs. Layers are then timed as if all devices were busy.
    """
    shares: tuple[Share, ...] = ("all",)
    if fates and not traced.graph.whole_layers:
        shares = ("all", "half", "nothing")
    kept: dict[Share, list[LayerPrograms]] = {}
    for share in shares:
        kept[share] = [programs.on_trial for programs in layer_programs(store, traced, share)]
    keep_all = kept["all"]
    pairs = list(_to_measure(kept, optimizer, split=split))
    runs = _all_runs(store, pairs, device, earlier, room_bytes, archive, devices_per_core)
    graph = traced.graph
    works = [_work(runs, programs) for programs in keep_all]
    options = splits = None
    if optimizer is not None:
        update_s = partial(_update_s, runs)
        works = with_update_seconds(works, graph.loss_layer, optimizer, update_s)
    if fates:
        options = _measured_options(traced, kept, runs, works, store, device)
    if split:
        splits = split_costs(graph, keep_all, partial(_halves_s, runs))
    signatures = [programs.signature for programs in keep_all]
    return costs_of(graph, signatures, works, options, optimizer, microbatches, splits)


def _to_measure(
    kept: Mapping[Share, Sequence[LayerPrograms]],
    optimizer: OptimizerCut | None,
    *,
    split: bool,
) -> Iterator[tuple[Program, ClosedJaxpr]]:
    """Yields the programs to measure, each with its jaxpr.

    The jaxpr is for an estimate if the program does not fit on the device.

    Args:
        kept: by the share of candidates that is kept, the programs of each layer.
        optimizer: the optimizer whose updates are measured; None to measure none.
        split: whether to measure the halves of backwards, too.
    """
    for programs in kept["all"]:
        yield forward_program(programs, recompute=True), programs.forward
    for of_share in kept.values():
        for programs in of_share:
            yield backward_program(programs), programs.backward
    if split:
        yield from _halves(kept["all"])
    if optimizer is not None:
        for piece in optimizer.update:
            yield piece_program(piece), piece.program


def _work(runs: Runs, programs: LayerPrograms) -> Work:
    """Returns the measured work of a layer that keeps all candidates, without its update."""
    forward = runs[forward_program(programs, recompute=True).key]
    backward = runs[backward_program(programs).key]
    return Work(
        forward.seconds,
        backward.seconds,
        forward.temporary_bytes,
        backward.temporary_bytes,
    )


def _update_s(runs: Runs, piece: Piece) -> float:
    """Returns the measured seconds of a piece of the optimizer."""
    return runs[piece_program(piece).key].seconds


def _all_runs(
    store: ProgramStore,
    pairs: Iterable[tuple[Program, ClosedJaxpr]],
    device: Device,
    earlier: Runs | None,
    room_bytes: int | None,
    archive: Archive | None,
    devices_per_core: float,
) -> Runs:
    """Measures the programs that fit on the device, and estimates the others.

    Args:
        store: the store that compiles the programs.
        pairs: the programs with their jaxprs.
        device: the device that runs the programs.
        earlier: earlier measurements, to which new ones are added.
        room_bytes: the bytes that the device has for a program; None if there is no limit.
        archive: the archive with the seconds of earlier processes; new seconds are kept there.
        devices_per_core: see `Run.beside`.
    """
    # A program without results, such as the backward of a frozen layer, never runs.
    idle: Runs = {}
    busy: dict[Hashable, tuple[Program, ClosedJaxpr]] = {}
    for program, jaxpr in pairs:
        if jaxpr.jaxpr.outvars:
            busy[program.key] = program, jaxpr
        else:
            idle[program.key] = Run(0.0, 0)
    to_run = [program for program, _ in busy.values()]
    runs = measure_programs(
        store,
        to_run,
        device,
        earlier,
        room_bytes,
        archive,
    )
    # The pace of estimates is computed from these runs, so estimates are for busy devices, too.
    runs = {key: run.beside(devices_per_core) for key, run in runs.items()}
    return idle | runs | _estimated(store, device, runs, busy)


def _measured_options(
    traced: Traced,
    kept: Mapping[Share, Sequence[LayerPrograms]],
    runs: Runs,
    works: Sequence[Work],
    store: ProgramStore,
    device: Device,
) -> list[tuple[Option, ...]]:
    """Returns the options of each layer, with measured seconds, and with bytes as compiled.

    Args:
        traced: the model.
        kept: by the share of candidates that is kept, the programs of each layer.
        runs: the runs of all backwards of these programs.
        works: by layer, its work.
        store: the store that compiles backwards.
        device: the device for which backwards are compiled.
    """
    signatures = [programs.signature for programs in kept["all"]]
    inputs = own_inputs(traced.graph, signatures)
    nothing = kept.get("nothing") or layer_programs(store, traced, "nothing")
    recomputed = recomputes(traced, nothing, accelerator_of(device))
    forwards_s = [work.forward_s for work in works]
    if traced.graph.whole_layers:
        return layer_options(traced, inputs, recomputed, forwards_s)
    measured: list[dict[Share, Run]] = [{} for _ in nothing]
    for share, of_share in kept.items():
        for of_layer, programs in zip(measured, of_share, strict=True):
            of_layer[share] = runs[backward_program(programs).key]
    calibrations = list(map(_calibration, recomputed, measured))
    options = layer_options(traced, inputs, recomputed, forwards_s, calibrations)
    # Equal layers share a `LayerPrograms`, whose id is their key, so they are compiled once.
    alike = [id(programs) for programs in nothing]
    return with_compiled_bytes(traced, options, alike, store, device)


def _halves(programs: Iterable[LayerPrograms]) -> Iterator[tuple[Program, ClosedJaxpr]]:
    """Yields both halves of every backward that has them, each with its jaxpr."""
    for compiled in programs:
        if compiled.halves is not None:
            yield input_program(compiled), compiled.halves.input
            yield weight_program(compiled), compiled.halves.weight


def _halves_s(runs: Runs, programs: LayerPrograms) -> tuple[float, float]:
    """Returns the measured seconds of both halves of a layer's backward."""
    halves = input_program(programs), weight_program(programs)
    input_s, weight_s = (runs[half.key].seconds for half in halves)
    return input_s, weight_s


def _estimated(
    store: ProgramStore,
    device: Device,
    runs: Runs,
    programs: Mapping[Hashable, tuple[Program, ClosedJaxpr]],
) -> Runs:
    """Estimates the seconds of programs that were not run: the roofline's seconds times a pace.

    The module's docstring defines the pace.

    Args:
        store: the store that compiles the programs, which gives their temporary bytes.
        device: the device that would run them.
        runs: the programs that were run.
        programs: all programs with their jaxprs, by key.
    """
    missing = [key for key in programs if key not in runs]
    if not missing:
        return {}
    modeled_s = {
        key: roofline.seconds(jaxpr, accelerator_of(device)) for key, (_, jaxpr) in programs.items()
    }
    # One pace is enough: the roofline errs by about the same factor for all programs of a device.
    paces = [runs[key].seconds / s for key, s in modeled_s.items() if key in runs and s]
    pace = statistics.median(paces) if paces else 1.0
    executables = store.compile([(programs[key][0], device) for key in missing])
    estimates = {}
    for key, executable in zip(missing, executables, strict=True):
        temporary_bytes = executable.memory_analysis().temp_size_in_bytes
        estimates[key] = Run(pace * modeled_s[key], temporary_bytes)
    return estimates


def _calibration(recompute: Recompute, runs: Mapping[Share, Run]) -> Calibration:
    """Pairs the modeled extra seconds of a layer's backward with the measured ones.

    Args:
        recompute: the model of what dropping candidates costs.
        runs: the runs of the backward, by the share of candidates that is kept.
    """
    # The backward that keeps everything recomputes nothing. Extra seconds are counted beyond it.
    least_s = runs["all"].seconds
    points = []
    for share, run in runs.items():
        if share == "all":
            continue
        names = kept_names(recompute.candidates, share)
        kept = [i for i, name in enumerate(recompute.names) if name in names]
        _, recomputed = recompute.dropping(kept)
        measured_s = max(run.seconds - least_s, 0.0)
        points.append((recompute.extra_s(recomputed), measured_s))
    return points


def _needed_bytes(needs: Any) -> int:
    """Counts the bytes of a program while it runs: arguments, results and temporaries.

    A result that reuses an argument's memory counts once.
    """
    arrays_bytes = needs.argument_size_in_bytes + needs.output_size_in_bytes
    return arrays_bytes - needs.alias_size_in_bytes + needs.temp_size_in_bytes


def _in_turns(programs: Sequence[tuple[Program, Any]], device: Device) -> list[list[float]]:
    """Returns the least seconds and processor time of each program over several turns.

    In a turn all programs run one after another. So a slow moment of the machine spoils one
    turn of a program, and not all of its measurements.
    """
    # The first turn measures every program. Later turns measure short programs only, whose
    # seconds vary the most.
    least = [_seconds(executable, program, device) for program, executable in programs]
    for _ in range(MEASURING.turns - 1):
        for i, (program, executable) in enumerate(programs):
            if least[i][0] < MEASURING.long_s:
                again = _seconds(executable, program, device)
                least[i] = list(map(min, least[i], again))
    return least


def _seconds(executable: Any, program: Program, device: Device) -> list[float]:
    """Returns the median seconds of a few runs, and their median processor time.

    A first run warms up and does not count. A donated input, whose memory the program takes
    for its results, is put on the device again for each run.
    """
    examples = [example_of(a) for a in program.inputs]
    kept: dict[int, jax.Array] = {}
    for i, example in enumerate(examples):
        # An input that is not donated survives a run, so it is put on the device once.
        if i not in program.donated:
            kept[i] = jax.device_put(example, device)
    runs_s, processor_s = list[float](), list[float]()
    while len(runs_s) <= MEASURING.runs:
        # A long program is not run a fourth time: the warm-up and two more runs suffice.
        if len(runs_s) >= 3 and statistics.fmean(runs_s[1:]) >= MEASURING.long_s:
            break
        inputs = [
            kept[i] if i in kept else jax.device_put(example, device, may_alias=False)
            for i, example in enumerate(examples)
        ]
        jax.block_until_ready(inputs)
        start, processor_start = time.perf_counter(), time.process_time()
        jax.block_until_ready(executable(*inputs))
        runs_s.append(time.perf_counter() - start)
        processor_s.append(time.process_time() - processor_start)
    return [statistics.median(runs_s[1:]), statistics.median(processor_s[1:])]
