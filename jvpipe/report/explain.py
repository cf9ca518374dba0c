"""Explains plans in words: the layers of each stage, the bytes on devices, and the reasons."""

from collections.abc import Mapping, Sequence
from typing import Any

from jvpipe.ir.buffers import Peak
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Fate, Plan, Stage
from jvpipe.ir.values import ValueKind
from jvpipe.util.columns import columns
from jvpipe.util.sizes import format_bytes


def explain(
    graph: LayerGraph,
    plan: Plan,
    peaks: Sequence[Peak | None],
    layer_s: Sequence[float] | None,
    devices: Sequence[Any],
    why: str = "",
    reasons: Sequence[str] = (),
) -> str:
    """Writes a text about a plan: a line for each stage and each layer, and the reasons.

    A layer's line lists the values that are swapped or recomputed.

    Args:
        graph: the model's layers.
        plan: says which layers run where.
        peaks: the most bytes on each device; None if only another process knows them.
        layer_s: the seconds of each layer for a micro-batch; None if they are unknown.
        devices: the devices, by their numbers in the plan.
        why: a sentence about how the planner decides.
        reasons: lines that say why each cut is where it is.
    """
    # The text describes the plan, then the stages with their layers, then the reasons, and last the
    # tied parameters and the tensors that skip layers.
    shape = f"{len(graph.layers)} layers on {len(plan.stages)} stages"
    lines = [f"{shape}, schedule {plan.schedule}, planner {plan.planner}: {why}."]
    for s, stage in enumerate(plan.stages):
        # Replicas of a stage usually have equal peaks, which are written once.
        stage_peaks = "\n  ".join(dict.fromkeys(_peak(peaks[d]) for d in stage.devices))
        place, load = _names(devices, stage), _load(graph, stage, layer_s)
        lines.append(f"\nstage {s} on {place}: layers {_range(stage)}, {load}; {stage_peaks}")
        for layer in stage.layers:
            fates = _fates(graph, layer, stage)
            lines.append(f"  {_layer_line(graph, layer, layer_s)}{fates}")
    if reasons:
        lines += ["", *reasons]
    for parameter in graph.tied():
        readers = ", ".join(map(str, parameter.readers))
        lines.append(
            f"\nparameter '{parameter.array.name}' is tied: layers {readers} read it, "
            f"layer {parameter.owner} owns it"
        )
    for tensor in graph.skips():
        readers = ", ".join(map(str, tensor.readers))
        lines.append(
            f"tensor '{tensor.array.name}' skips from layer {tensor.producer} to {readers}, "
            "sent straight"
        )
    return "\n".join(lines)


def stage_lines(
    graph: LayerGraph, plan: Plan, peaks: Sequence[Peak | None], devices: Sequence[Any]
) -> str:
    """Writes a line for each stage, with its devices, layers and bytes.

    Args:
        graph: the model's layers.
        plan: says which layers run where.
        peaks: the most bytes on each device; None if only another process knows them.
        devices: the devices, by their numbers in the plan.
    """
    rows: list[Sequence[object]] = [("stage", "on", "layers", "holds", "peak")]
    for s, stage in enumerate(plan.stages):
        peak_sizes = [peak.bytes for d in stage.devices if (peak := peaks[d])]
        largest = format_bytes(max(peak_sizes)) if peak_sizes else "known elsewhere"
        where, holds = _names(devices, stage), _parameters(graph, stage)
        rows.append((s, where, _range(stage), holds, largest))
    return columns(rows)


def _names(devices: Sequence[Any], stage: Stage) -> str:
    return ", ".join(str(devices[d]) for d in stage.devices)


def _range(stage: Stage) -> str:
    return f"{stage.layers[0]} to {stage.layers[-1]}"


def _load(graph: LayerGraph, stage: Stage, layer_s: Sequence[float] | None) -> str:
    """Returns a text about a stage's parameters, operations and, if known, seconds."""
    flops = sum(graph.layers[layer].flops for layer in stage.layers)
    text = f"{_parameters(graph, stage)}, {flops / 1e9:.3f} GFLOP forward"
    if not layer_s:
        return text
    seconds = sum(layer_s[layer] for layer in stage.layers)
    return f"{text}, {1e3 * seconds:.2f} ms per micro-batch"


def _parameters(graph: LayerGraph, stage: Stage) -> str:
    """Returns a text with the bytes of a stage's parameters, and of its frozen parameters."""
    owned = [graph.parameters[p] for layer in stage.layers for p in graph.owned(layer)]
    frozen = sum(parameter.array.bytes for parameter in owned if parameter.frozen)
    words = f"{format_bytes(sum(parameter.array.bytes for parameter in owned))} of parameters"
    return f"{words} ({format_bytes(frozen)} frozen)" if frozen else words


def _peak(peak: Peak | None) -> str:
    """Returns a text about a device's peak: its bytes, its row, and the owners of these bytes."""
    if peak is None:
        return "its peak is known to its process"
    text = f"peak {format_bytes(peak.bytes)}"
    if peak.row is None:
        return text
    holders = [f"{owner} {format_bytes(size)}" for owner, size in peak.holders]
    return f"{text}\n  peak at {peak.row}: {', '.join(holders)}"


def _layer_line(graph: LayerGraph, i: int, layer_s: Sequence[float] | None) -> str:
    """Returns a layer's name, bytes and, if known, seconds in columns."""
    layer = graph.layers[i]
    parameters = format_bytes(sum(graph.parameters[p].array.bytes for p in graph.owned(i)))
    candidates = format_bytes(sum(candidate.bytes for candidate in layer.candidates))
    line = (
        f"layer {i:>3} {graph.label(layer):<36} "
        f"{parameters:>11} parameters {candidates:>11} candidates"
    )
    return f"{line}  {1e3 * layer_s[i]:8.3f} ms" if layer_s else line


def _fates(graph: LayerGraph, i: int, stage: Stage) -> str:
    """Returns a text about a layer's values that are swapped or recomputed.

    A value that passes to other layers is listed at the layer that produces it.
    """
    layer = graph.layers[i]
    # A plan's fates have these names as keys.
    names = [f"{graph.label(layer)}/{candidate.name}" for candidate in layer.candidates]
    names += [graph.tensors[t].array.name for t in layer.writing(ValueKind.TENSOR)]
    states = [graph.parameters[p].array.name for p in graph.owned(i)]
    words = _fate_words("", names, stage.fates)
    return words + _fate_words("optimizer state of ", states, stage.state_fates)


def _fate_words(what: str, names: Sequence[str], fates: Mapping[str, Fate]) -> str:
    """Returns, for each fate but `keep`, a text with the names of the values that have it."""
    text = ""
    for fate in Fate:
        chosen = [name for name in names if fates.get(name) == fate]
        # Most values are kept, so kept values are not listed.
        if chosen and fate is not Fate.KEEP:
            text += f"; {fate} {what}{', '.join(chosen)}"
    return text
