"""Changes a plan as its user asks: torchgpipe's checkpoint modes, fates by name, or new cuts.

A fate says what happens to a value between its forward and its backward: `keep`, `swap` (to host
memory) or `recompute`. A candidate is a value inside a layer whose fate can be chosen. An edge is a
tensor between layers. The optimizer's state has fates, too: it is kept or swapped between updates.

Under a synchronous schedule, fates and cuts decide where and when a value is computed, and never
change the value. So a user may choose them freely.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Literal

from jvpipe.ir.layers import Layer, LayerGraph
from jvpipe.ir.plan import FATES, STATE_FATES, Fate, Plan, Stage
from jvpipe.util.names import did_you_mean, nearest

MODES = ("always", "except_last", "never")
_log = logging.getLogger("jvpipe")


def checkpointed(graph: LayerGraph, plan: Plan, mode: str) -> Plan:
    """Applies one of torchgpipe's checkpoint modes, which recompute whole stages from their inputs.

    Args:
        graph: the model's layers.
        plan: the plan whose fates are replaced.
        mode: which micro-batches are recomputed: `always` all, `except_last` all but the last one
            of a step, `never` none.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(did_you_mean("checkpoint mode", mode, MODES))
    if mode == "never":
        return plan.without_fates()
    # The tensors that a stage makes for other stages are recomputed too. This makes the
    # forward of the stage's last layer run again before cotangents arrive, and not within
    # that layer's backward.
    again = Fate.RECOMPUTE
    stages = tuple(
        replace(stage, fates=dict.fromkeys(_names(graph, stage, again), again))
        for stage in plan.stages
    )
    return replace(plan, stages=stages, keep_last=mode == "except_last")


def with_fates(
    graph: LayerGraph,
    plan: Plan,
    patterns: Mapping[str, str],
) -> Plan:
    """Changes the fates of tensors by name, such as `{"*/attention/*": "swap"}`.

    A tensor's name is its layer's name, a slash, and the operation that makes the tensor; `explain`
    lists all names. If several patterns match, the last one wins. If a pattern matches no
    name, but the part before its last slash matches a layer's name, all candidates of that
    layer get the fate, and a warning says so.

    Args:
        graph: the model's layers.
        plan: the plan whose fates are changed.
        patterns: fates by pattern, with the wildcards of `fnmatch`.

    Raises:
        ValueError: an unknown fate, or a pattern that matches nothing.
    """
    return _changed(plan, "fates", patterns, partial(_names, graph), partial(_nearest, graph))


def with_state_fates(
    graph: LayerGraph,
    plan: Plan,
    patterns: Mapping[str, str],
) -> Plan:
    """Changes the fates of the optimizer's state between updates, by the paths of parameters.

    For example, `{"*": "swap"}` swaps the state of all parameters. If several patterns match a
    path, the last one wins.

    Args:
        graph: the model's layers.
        plan: the plan whose fates are changed.
        patterns: fates by pattern, with the wildcards of `fnmatch`.

    Raises:
        ValueError: a fate that state cannot have, or a pattern that matches no trained parameter.
    """
    return _changed(plan, "state_fates", patterns, lambda stage, _: _trained(graph, stage))


def _changed(
    plan: Plan,
    field: Literal["fates", "state_fates"],
    patterns: Mapping[str, str],
    names_of: Callable[[Stage, Fate], list[str]],
    nearest_of: Callable[[Stage, str], list[str]] = lambda *_: [],
) -> Plan:
    """Gives each pattern's fate to the tensors or parameters that it matches; later patterns win.

    Args:
        plan: the plan whose fates are changed.
        field: which fates of its stages are changed.
        patterns: fates by pattern.
        names_of: lists the names that can have a fate on a stage.
        nearest_of: lists the names of a stage that a pattern stands for if it matches no name.
    """
    of_state = field == "state_fates"
    known = STATE_FATES if of_state else FATES
    unknown = set(patterns.values()) - set(known)
    if unknown:
        where = " in state_fates" if of_state else ""
        raise ValueError(f"unknown fates {sorted(unknown)}{where}: there are {', '.join(known)}")
    every_fate = [dict(getattr(stage, field)) for stage in plan.stages]
    for pattern, fate in patterns.items():
        names = [names_of(stage, Fate(fate)) for stage in plan.stages]
        matched = [[name for name in some if fnmatchcase(name, pattern)] for some in names]
        # The pattern may name a value that is not a candidate. Then all candidates of the
        # value's layer are taken instead.
        if not any(matched):
            matched = [nearest_of(stage, pattern) for stage in plan.stages]
            if not any(matched):
                what, kind = ("parameter", "path") if of_state else ("tensor", "name")
                close = ", ".join(nearest(pattern, list(chain(*names)))) or "none"
                raise ValueError(
                    f"unknown {what} '{pattern}' in {field}: no {kind} matches, "
                    f"the nearest are {close}"
                )
            taken = ", ".join(chain(*matched))
            _log.warning("'%s' is not a candidate: the nearest are taken: %s", pattern, taken)
        for fates, some in zip(every_fate, matched, strict=True):
            fates.update(dict.fromkeys(some, Fate(fate)))
    changed = zip(plan.stages, every_fate, strict=True)
    stages = tuple(replace(stage, **{field: fates}) for stage, fates in changed)
    return replace(plan, stages=stages)


def recut(graph: LayerGraph, plan: Plan, cuts: Sequence[int]) -> Plan:
    """Changes a plan's layers per stage, on the same devices; values keep their fates if possible.

    Args:
        graph: the model's layers.
        plan: the plan whose cuts are changed.
        cuts: the number of layers of each stage, in order.
    """
    every_fate = {name: fate for stage in plan.stages for name, fate in stage.fates.items()}
    state = {name: fate for stage in plan.stages for name, fate in stage.state_fates.items()}
    stages = []
    spans = pairwise(accumulate(cuts, initial=0))
    for old, (i, j) in zip(plan.stages, spans, strict=True):
        stage = replace(old, layers=tuple(range(i, j)), fates={})
        possible = {fate: set(_names(graph, stage, fate)) for fate in FATES}
        # If two stages hold a value, each of them has a fate for it. The fate that this
        # stage had before wins.
        carried = every_fate | dict(old.fates)
        fates = {name: fate for name, fate in carried.items() if name in possible[fate]}
        state_fates = {name: state[name] for name in _trained(graph, stage) if name in state}
        stages.append(replace(stage, fates=fates, state_fates=state_fates))
    return replace(plan, stages=tuple(stages))


def _names(
    graph: LayerGraph,
    stage: Stage,
    fate: Fate,
) -> list[str]:
    """Lists the tensors that can have a fate on a stage: candidates of its layers, and edges.

    An edge can be recomputed on the stage that makes it, and kept or swapped on a stage that reads
    it.
    """
    inside = set(stage.layers)
    names = _candidates(graph, [graph.layers[i] for i in stage.layers])
    for tensor in graph.tensors:
        ends = [tensor.producer] if FATES[fate].again else tensor.readers
        if not inside.isdisjoint(ends):
            names.append(tensor.array.name)
    return names


def _trained(graph: LayerGraph, stage: Stage) -> list[str]:
    """Lists the paths of the parameters that a stage updates."""
    owned = map(graph.owned, stage.layers)
    trained = chain.from_iterable(map(graph.trained, owned))
    return [graph.parameters[p].array.name for p in trained]


def _nearest(
    graph: LayerGraph,
    stage: Stage,
    pattern: str,
) -> list[str]:
    """Lists all candidates of the layers that a pattern names before its last slash.

    The list is empty if the pattern has only wildcards there.
    """
    start = pattern.rpartition("/")[0]
    if not start.strip("*?/"):
        return []
    every = (graph.layers[i] for i in stage.layers)
    named = [layer for layer in every if fnmatchcase(graph.label(layer), start)]
    return _candidates(graph, named)


def _candidates(graph: LayerGraph, layers: Sequence[Layer]) -> list[str]:
    """Lists the names of all candidates of some layers."""
    return [f"{graph.label(layer)}/{c.name}" for layer in layers for c in layer.candidates]
