"""The costs of a model on hardware that is not here, estimated from the model's jaxprs alone.

Nothing is compiled or allocated. Seconds come from the roofline (`roofline.py`), and temporary
bytes from rules about what compilers do (`temporaries.py`). If the device's compiler was asked
about a program and reports more temporary bytes than the rules give, its number counts
(`reported_temporaries.py`). Layers with equal programs are estimated once.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from jvpipe.cost import roofline
from jvpipe.cost.costs import Costs, Option
from jvpipe.cost.frontier import layer_options, recomputes
from jvpipe.cost.hardware import Accelerator, Cluster
from jvpipe.cost.model_costs import Work, costs_of, own_inputs, split_costs, with_update_seconds
from jvpipe.cost.reported_temporaries import (
    Said,
    with_said_options,
    with_said_updates,
    with_said_work,
)
from jvpipe.cost.temporaries import temporary_bytes
from jvpipe.cost.tiles import in_tiles
from jvpipe.cost.utilization import product_flops
from jvpipe.ir.layers import LayerGraph, Signature
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.pieces import Piece
from jvpipe.programs.store import ProgramStore, shared_store
from jvpipe.trace.graph import Traced


def estimate(
    traced: Traced,
    cluster: Cluster,
    optimizer: OptimizerCut | None = None,
    microbatches: int = 1,
    *,
    fates: bool = True,
    split: bool = False,
    store: ProgramStore | None = None,
    said: Said | None = None,
) -> Costs:
    """Estimates the costs of a model on a device of a cluster.

    Args:
        traced: the model, whose arrays may be shapes without values.
        cluster: the cluster; costs are estimated for its first device.
        optimizer: the optimizer, whose state and updates are added to the costs; None to leave
            them out.
        microbatches: micro-batches of a step.
        fates: whether layers get options that swap or recompute residuals (values that a forward
            leaves for its backward); if not, each layer has one option, which keeps all of them.
        split: whether to estimate backwards in halves, too.
        store: the store that keeps programs; None for the one store of this process.
        said: the answers of the device's compiler, by the keys of programs.

    >>> import jax, jax.numpy as jnp
    >>> from jvpipe.cost.cluster_file import find_cluster
    >>> from jvpipe.trace.graph import build_graph
    >>> from jvpipe.trace.loss import trace_loss
    >>> def loss_fn(params, x, rng):
    ...     for w in params:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x**2)
    >>> square = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    >>> traced = build_graph(trace_loss(loss_fn, [square] * 3, square, None))
    >>> costs = estimate(traced, find_cluster("v100-a"))
    >>> [round(1e3 * layer.forward_s) for layer in costs.layers]
    [11, 11, 11]
    """
    device = cluster.device
    store = store or shared_store()
    said = said or {}
    programs = layer_programs(store, traced)
    signatures = tuple(of_layer.signature for of_layer in programs)
    if device.platform == "tpu":
        # TPUs store arrays in tiles, so from here on the bytes of arrays include padding. But
        # `programs` keeps the plain shapes, because `temporary_bytes` counts tiles itself.
        traced = replace(traced, graph=in_tiles(traced.graph))
        signatures = in_tiles(signatures)
        optimizer = optimizer and replace(optimizer, state=in_tiles(optimizer.state))
    graph = traced.graph
    works = _works(programs, graph, optimizer, device, said)
    options = splits = None
    if fates:
        options = _options(traced, signatures, works, device, store, said)
    if split:
        splits = split_costs(graph, programs, partial(_halves_s, device=device))
    return costs_of(graph, signatures, works, options, optimizer, microbatches, splits)


def _works(
    programs: Sequence[LayerPrograms],
    graph: LayerGraph,
    optimizer: OptimizerCut | None,
    device: Accelerator,
    said: Said,
) -> list[Work]:
    """Estimates the work of each layer.

    Args:
        programs: by layer, the programs that keep all candidates.
        graph: the layers.
        optimizer: the optimizer whose updates count; None to leave updates out.
        device: the device that would run the programs.
        said: the answers of the device's compiler.
    """

    @cache  # because equal layers share an object of programs
    def work_of(of_layer: LayerPrograms) -> Work:
        work = Work(
            roofline.seconds(of_layer.forward, device),
            roofline.seconds(of_layer.backward, device),
            temporary_bytes(of_layer.forward, device),
            temporary_bytes(of_layer.backward, device),
        )
        return with_said_work(work, of_layer, said)

    works = list(map(work_of, programs))
    if optimizer is None:
        return works
    update_s = partial(_update_s, device=device)
    works = with_update_seconds(works, graph.loss_layer, optimizer, update_s)
    if not said:
        return works
    return [with_said_updates(work, graph, i, optimizer, said) for i, work in enumerate(works)]


def _options(
    traced: Traced,
    signatures: Sequence[Signature],
    works: Sequence[Work],
    device: Accelerator,
    store: ProgramStore,
    said: Said,
) -> list[tuple[Option, ...]]:
    """Estimates the options of each layer.

    Args:
        traced: the model.
        signatures: by layer, the interface of the programs that keep all candidates.
        works: by layer, its work.
        device: the device that would run the layers.
        store: the store of the layers' programs.
        said: the answers of the device's compiler.
    """
    # The seconds of recomputation come from the roofline, because nothing is measured here.
    recomputed = recomputes(traced, layer_programs(store, traced, "nothing"), device)
    inputs = own_inputs(traced.graph, signatures)
    forwards_s = [work.forward_s for work in works]
    options = layer_options(traced, inputs, recomputed, forwards_s)
    return with_said_options(traced, works, options, store, said)


def _halves_s(programs: LayerPrograms, device: Accelerator) -> tuple[float, float]:
    """Estimates the seconds of both halves of a layer's backward."""
    halves = programs.halves
    assert halves is not None
    return roofline.seconds(halves.input, device), roofline.seconds(halves.weight, device)


def _update_s(piece: Piece, device: Accelerator) -> float:
    """Estimates the seconds of a piece of the optimizer.

    A piece without products is assumed to become one kernel that reads each input once and writes
    each result once. So it takes one launch, and the time to move these bytes. The roofline would
    count several kernels. A piece with products gets the roofline's seconds.
    """
    if product_flops(piece.program.eqns):
        return roofline.seconds(piece.program, device)
    moved = (*piece.program.in_avals, *piece.program.out_avals)
    moved_bytes = sum(a.size * a.dtype.itemsize for a in moved)
    return device.launch_s + moved_bytes / device.memory_bytes_per_s
