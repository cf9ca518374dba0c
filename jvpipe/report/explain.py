"""Explains plans in words: which layers run where, what devices hold, and the reasons."""

from collections.abc import Sequence
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
        why: how the planner decides, in a sentence.
        reasons: lines that say why each cut is where it is.
    """
    # The text has the whole plan first, then the stages with their layers, then the reasons.
    lines = [
        f"{len(graph.layers)} layers on {len(plan.stages)} stages, schedule {plan.schedule}, planner {plan.planner}: "
        f"{why}."
    ]
    for s, stage in enumerate(plan.stages):
        work = sum(graph.layers[layer].flops for layer in stage.layers)
        seconds = (
            f", {1e3 * sum(layer_s[i] for i in stage.layers):.2f} ms per micro-batch"
            if layer_s
            else ""
        )
        where = ", ".join(str(devices[d]) for d in stage.devices)
        lines.append(
            f"\nstage {s} on {where}: layers {stage.layers[0]} to {stage.layers[-1]}, "
            f"{_parameters(graph, stage)}, {work / 1e9:.3f} GFLOP forward{seconds}; "
            f"{'; '.join(dict.fromkeys(_peak(peaks[d]) for d in stage.devices))}"
        )
        for layer in stage.layers:
            lines.append(f"  {_layer_line(graph, layer, layer_s)}{_fates(graph, layer, stage)}")
    lines += ["", *reasons] if reasons else []
    for parameter in graph.tied():
        lines.append(
            f"\nparameter '{parameter.array.name}' is tied: layers {', '.join(map(str, parameter.readers))} read it, "
            f"layer {parameter.owner} owns it"
        )
    lines += [
        f"tensor '{tensor.array.name}' skips from layer {tensor.producer} to {', '.join(map(str, tensor.readers))}, "
        "sent straight"
        for tensor in graph.skips()
    ]
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
        where = ", ".join(str(devices[d]) for d in stage.devices)
        layers = f"{stage.layers[0]} to {stage.layers[-1]}"
        peak_sizes = [peak.bytes for d in stage.devices if (peak := peaks[d])]
        written = format_bytes(max(peak_sizes)) if peak_sizes else "known elsewhere"
        rows.append((s, where, layers, _parameters(graph, stage), written))
    return columns(rows)


def _parameters(graph: LayerGraph, stage: Stage) -> str:
    """Returns the bytes of a stage's own parameters, and of the frozen ones among them, as text."""
    parameters = [graph.parameters[p] for layer in stage.layers for p in graph.owned(layer)]
    frozen = sum(parameter.array.bytes for parameter in parameters if parameter.frozen)
    words = f"{format_bytes(sum(parameter.array.bytes for parameter in parameters))} of parameters"
    return f"{words} ({format_bytes(frozen)} frozen)" if frozen else words


def _peak(peak: Peak | None) -> str:
    """Returns a text about a device's peak: its bytes, the row that ran then, and the holders."""
    if peak is None:
        return "its peak is known to its process"
    text = f"peak {format_bytes(peak.bytes)}"
    if peak.row is None:
        return text
    return (
        text
        + f"\n  peak at {peak.row}: "
        + ", ".join(f"{owner} {format_bytes(size)}" for owner, size in peak.holders)
    )


def _layer_line(graph: LayerGraph, i: int, layer_s: Sequence[float] | None) -> str:
    layer = graph.layers[i]
    residual = sum(c.bytes for c in layer.candidates)
    parameter_bytes = sum(graph.parameters[p].array.bytes for p in graph.owned(i))
    seconds = f"  {1e3 * layer_s[i]:8.3f} ms" if layer_s else ""
    sizes = (
        f"{format_bytes(parameter_bytes):>11} parameters {format_bytes(residual):>11} candidates"
    )
    return f"layer {i:>3} {graph.label(layer):<36} {sizes}{seconds}"


def _fates(graph: LayerGraph, i: int, stage: Stage) -> str:
    """Returns a text about a layer's values that are swapped or recomputed.

    Values that pass to other layers are listed at the layer that makes them.
    """
    layer = graph.layers[i]
    # Plans have fates under these names.
    names = [f"{graph.label(layer)}/{c.name}" for c in layer.candidates]
    names += [graph.tensors[t].array.name for t in layer.writing(ValueKind.TENSOR)]
    states = [graph.parameters[p].array.name for p in graph.owned(i)]
    parts = [("", names, stage.fates), ("optimizer state of ", states, stage.state_fates)]
    return "".join(
        f"; {fate} {what}{', '.join(chosen)}"
        for what, those, fates in parts
        for fate in Fate
        if fate is not Fate.KEEP and (chosen := [n for n in those if fates.get(n) == fate])
    )
