"""The costs of a model on hardware that is not here, from its jaxprs alone: nothing is compiled or allocated."""

from dataclasses import replace
from functools import partial

from jvpipe.cost import roofline
from jvpipe.cost.costs import Costs
from jvpipe.cost.frontier import layer_options, recomputes
from jvpipe.cost.hardware import Accelerator, Cluster
from jvpipe.cost.model import Work, costs_of, own_inputs, split_costs, with_updates
from jvpipe.cost.said import Said, with_said_options, with_said_updates, with_said_work
from jvpipe.cost.temporaries import temporary_bytes
from jvpipe.cost.tiles import in_tiles
from jvpipe.cost.utilisation import product_flops
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model import layer_programs
from jvpipe.programs.optimizer import OptimizerCut
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
    """The costs of a model on a device of a cluster, by the roofline; layers alike are looked at once.

    Args:
        traced: the model; its arrays may be shapes alone.
        cluster: the hardware.
        optimizer: counts its state and its updates.
        microbatches: in a step.
        fates: whether layers have options other than keeping everything.
        split: whether backwards in halves are looked at too.
        store: where programs are kept.
        said: what the compiler of the device has said of programs, which counts where it is more.

    >>> import jax, jax.numpy as jnp
    >>> from jvpipe.cost.cluster_file import find_cluster
    >>> from jvpipe.trace.graph import build_graph
    >>> from jvpipe.trace.loss import trace_loss
    >>> def loss_fn(params, x, rng):
    ...     for w in params:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x**2)
    >>> weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 3
    >>> traced = build_graph(trace_loss(loss_fn, weights, jax.ShapeDtypeStruct((4096, 4096), jnp.float32), None))
    >>> costs = estimate(traced, find_cluster("v100-a"))
    >>> [round(1e3 * layer.forward_s) for layer in costs.layers]
    [11, 11, 11]
    """
    store, said = store or shared_store(), said or {}
    everything = layer_programs(store, traced)
    signatures = tuple(programs.signature for programs in everything)
    if cluster.device.platform == "tpu":
        traced, signatures = replace(traced, graph=in_tiles(traced.graph)), in_tiles(signatures)
        optimizer = optimizer and replace(optimizer, state=in_tiles(optimizer.state))
    distinct = {id(programs): programs for programs in everything}
    work_of = {
        key: with_said_work(_work(programs, cluster.device), programs, said)
        for key, programs in distinct.items()
    }
    works = [work_of[id(programs)] for programs in everything]
    if optimizer is not None:
        works = with_updates(
            works, traced.graph.loss_layer, optimizer, partial(_update_s, device=cluster.device)
        )
    if said and optimizer is not None:
        loss = traced.graph.loss_layer
        numbered = enumerate(works)
        works = [with_said_updates(work, i, loss, optimizer, said) for i, work in numbered]
    options = None
    if fates:
        recomputed = recomputes(traced, layer_programs(store, traced, "nothing"), cluster.device)
        options = layer_options(traced, own_inputs(traced.graph, signatures), recomputed)
        options = with_said_options(traced, works, options, store, said)
    splits = (
        split_costs(traced.graph, everything, partial(_halves_s, device=cluster.device))
        if split
        else None
    )
    return costs_of(traced.graph, signatures, works, options, optimizer, microbatches, splits)


def _halves_s(programs: LayerPrograms, device: Accelerator) -> tuple[float, float]:
    assert programs.halves is not None
    return roofline.seconds(programs.halves.input, device), roofline.seconds(
        programs.halves.weight, device
    )


def _update_s(piece: Piece, device: Accelerator) -> float:
    """What a piece of the optimizer reads and writes: without products the compiler makes one kernel of it."""
    if product_flops(piece.program.eqns):
        return roofline.seconds(piece.program, device)
    moved = (*piece.program.in_avals, *piece.program.out_avals)
    moved_bytes = sum(a.size * a.dtype.itemsize for a in moved)
    return device.launch_s + moved_bytes / device.memory_bytes_per_s


def _work(programs: LayerPrograms, device: Accelerator) -> Work:
    return Work(
        roofline.seconds(programs.forward, device),
        roofline.seconds(programs.backward, device),
        temporary_bytes(programs.forward, device),
        temporary_bytes(programs.backward, device),
    )
