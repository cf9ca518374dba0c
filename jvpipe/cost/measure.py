"""Measures the costs of a model's layers on a device at hand: each distinct program is timed once.

A program that does not fit on the device is not run. Its seconds are estimated: they are the
roofline's seconds (`roofline.py`) times a pace. A program that ran has a pace, too: its measured
seconds divided by the roofline's. The median of these paces is used. Seconds that an earlier
process has measured come from the archive.
"""

import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
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
    fitting = list(zip(distinct.values(), executables, strict=True))
    if room_bytes is not None:
        fitting = [compiled for compiled in fitting if _needed_bytes(compiled[1]) <= room_bytes]
    # Programs that an earlier process has timed are not run. They were compiled above
    # because only the compiler knows their temporary bytes.
    seconds = (archive or Archive()).each(
        fitting,
        lambda compiled: ("seconds", surroundings(device), store.text(compiled[0], device)),
        2,
        partial(_in_turns, device=device),
    )
    for (program, executable), (s, processor_s) in zip(fitting, seconds, strict=True):
        runs[program.key] = Run(s, _temporary_bytes(executable), processor_s)
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
        optimizer: the optimizer, whose state counts and whose updates are measured, or None.
        microbatches: micro-batches of a step.
        fates: whether layers have options other than keeping everything.
        split: whether to measure the halves of backwards, too.
        earlier: earlier measurements, to which new ones are added.
        room_bytes: the bytes that the device has for a program; larger programs are estimated.
        archive: the archive with the seconds of earlier processes; new seconds are kept there.
        devices_per_core: the devices of the pipeline per core of the host, if they are
            CPUs. Layers are then timed as if all devices were busy.
    """
    graph = traced.graph
    shares: tuple[Share, ...] = ("all",)
    if fates and not graph.whole_layers:
        shares = ("all", "half", "nothing")
    kept: dict[Share, list[LayerPrograms]] = {}
    for share in shares:
        kept[share] = [programs.on_trial for programs in layer_programs(store, traced, share)]
    keep_all = kept["all"]
    pairs = list(_to_measure(kept, optimizer, split=split))
    runs = _all_runs(store, pairs, device, earlier, room_bytes, archive, devices_per_core)

    works = [_work(runs, programs) for programs in keep_all]
    options = splits = None
    if optimizer is not None:
        works = with_update_seconds(
            works, graph.loss_layer, optimizer, lambda piece: runs[piece_program(piece).key].seconds
        )
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
        if split and programs.halves is not None:
            yield input_program(programs), programs.halves.input
            yield weight_program(programs), programs.halves.weight
    for programs in chain.from_iterable(kept.values()):
        yield backward_program(programs), programs.backward
    if optimizer is not None:
        for piece in optimizer.update:
            yield piece_program(piece), piece.program


def _halves_s(runs: Runs, programs: LayerPrograms) -> list[float]:
    """Returns the measured seconds of both halves of a layer's backward."""
    halves = input_program(programs), weight_program(programs)
    return [runs[half.key].seconds for half in halves]


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


def _all_runs(
    store: ProgramStore,
    pairs: Sequence[tuple[Program, ClosedJaxpr]],
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
    idle = {program.key: Run(0.0, 0) for program, _ in pairs}
    busy = [(program, jaxpr) for program, jaxpr in pairs if jaxpr.jaxpr.outvars]
    to_run = [program for program, _ in busy]
    runs = measure_programs(store, to_run, device, earlier, room_bytes, archive)
    # The pace of estimates is computed from these runs, so estimates are for busy devices, too.
    runs = {key: run.beside(devices_per_core) for key, run in runs.items()}
    return idle | runs | _estimated(store, device, runs, busy)


def _estimated(
    store: ProgramStore,
    device: Device,
    runs: Runs,
    pairs: Sequence[tuple[Program, ClosedJaxpr]],
) -> Runs:
    """Estimates the programs that were not run: the roofline's seconds times a pace.

    The module's docstring defines the pace.

    Args:
        store: the store that compiles the programs, which gives their temporary bytes.
        device: the device that would run them.
        runs: the programs that were run.
        pairs: all programs with their jaxprs.
    """
    missing = {program.key: program for program, _ in pairs if program.key not in runs}
    if not missing:
        return {}
    accelerator = accelerator_of(device)
    modeled_s = {program.key: roofline.seconds(jaxpr, accelerator) for program, jaxpr in pairs}
    # One pace is enough: the roofline errs by about the same factor for all programs of a device.
    paces = [runs[key].seconds / s for key, s in modeled_s.items() if key in runs and s]
    pace = statistics.median(paces or [1.0])
    executables = store.compile([(program, device) for program in missing.values()])
    return {
        key: Run(pace * modeled_s[key], _temporary_bytes(executable))
        for key, executable in zip(missing, executables, strict=True)
    }


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
    calibrations = []
    for layer, recompute in enumerate(recomputed):
        backwards_s: dict[Share, float] = {}
        for share, programs in kept.items():
            backwards_s[share] = runs[backward_program(programs[layer]).key].seconds
        calibrations.append(_calibration(recompute, backwards_s))
    options = layer_options(traced, inputs, recomputed, forwards_s, calibrations)
    return with_compiled_bytes(traced, options, store, device)


def _calibration(recompute: Recompute, backwards_s: Mapping[Share, float]) -> Calibration:
    """Pairs the modeled extra seconds of a layer's backward with the measured ones.

    Args:
        recompute: the model of what dropping candidates costs.
        backwards_s: the seconds of the backward, by the share of candidates that is kept.
    """
    points = []
    for share, backward_s in backwards_s.items():
        names = kept_names(recompute.candidates, share)
        kept = [i for i, name in enumerate(recompute.names) if name in names]
        _, recomputed = recompute.dropping(kept)
        # Extra seconds are those beyond the backward that keeps everything.
        measured_s = max(backward_s - backwards_s["all"], 0.0)
        points.append((recompute.extra_s(recomputed), measured_s))
    return points


def _temporary_bytes(executable: Any) -> int:
    return executable.memory_analysis().temp_size_in_bytes


def _needed_bytes(executable: Any) -> int:
    """Counts the bytes of a program while it runs: arguments, results and temporaries.

    A result that reuses an argument's memory counts once.
    """
    needs = executable.memory_analysis()
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
    # An input that is not donated survives a run, so it is put on the device once.
    lasting = [i for i in range(len(examples)) if i not in program.donated]
    kept = {i: jax.device_put(examples[i], device) for i in lasting}
    taken: list[tuple[float, float]] = []
    for _ in range(1 + MEASURING.runs):
        inputs = [
            kept[i] if i in kept else jax.device_put(example, device, may_alias=False)
            for i, example in enumerate(examples)
        ]
        jax.block_until_ready(inputs)
        start, processor_start = time.perf_counter(), time.process_time()
        jax.block_until_ready(executable(*inputs))
        taken.append((time.perf_counter() - start, time.process_time() - processor_start))
        # A long program is not run a fourth time: the warm-up and two more runs suffice.
        if len(taken) >= 3 and statistics.fmean(s for s, _ in taken[1:]) >= MEASURING.long_s:
            break
    return [statistics.median(numbers) for numbers in zip(*taken[1:], strict=True)]
