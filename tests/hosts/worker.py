"""One process of a run over several, given PROCESS COUNT PORT CASE ...: prints what it saw of each
case.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvpipe
from jvpipe.cost.estimate import estimate
from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link
from jvpipe.cost.links import Links
from jvpipe.ir.plan import Fate
from jvpipe.planners.replanning import Seen
from jvpipe.planners.user_fates import recut
from jvpipe.runtime.engine import dispatch
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.monitor import Measured
from jvpipe.runtime.state import migrate
from jvpipe.schedules import PipeDream
from jvpipe.session import adapt, measuring, model_planner
from jvpipe.session.evaluation import weighed
from tests import sharded
from tests.bits import MICRO, batches_of, digest
from tests.runtime import test_model_change as models
from tests.session import tiny
from tests.zoo import CASES, Case

STAGES = 3
LOCAL = optax.adamw(1e-2)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), LOCAL)
MODELS = (
    models.A,
    ("d", "x", "c", "y"),
    ("x", "d", "b"),
)  # what stays or comes back is wanted elsewhere


def pipeline(
    m: Case, schedule: str, stages: int | jvpipe.Plan = STAGES, **options: Any
) -> jvpipe.Pipeline:
    optimizer = OPTIMIZER if schedule in ("gpipe", "1f1b") else LOCAL
    kinds = {"has_aux": m.has_aux, "has_state": m.has_state}
    return jvpipe.Pipeline(m.loss_fn, optimizer, stages, MICRO, schedule, **kinds, **options)


def asked_to_move(pipe: jvpipe.Pipeline, state: jvpipe.State, moments: str) -> jvpipe.State:
    """All layers leave their devices, and come back: at moments such as 1.2+2.0, of a step and a
    micro-batch.
    """
    home, layers = pipe.plan, len(pipe.session.graph.layers)
    away = recut(pipe.session.graph, home, [1, layers - 2, 1])
    stages = zip(away.stages, (2, 0, 1), strict=True)
    away = replace(away, stages=tuple(replace(stage, devices=(place,)) for stage, place in stages))
    for plan, moment in zip((away, home, away), moments.split("+"), strict=False):
        step, microbatch = map(int, moment.split("."))
        state = pipe.migrate(state, plan, (step, microbatch))
    return state


def trained(
    name: str, schedule: str, fate: str, planner: str = "even", path: str = "", moments: str = ""
) -> dict[str, Any]:
    """What a run yields: bits of losses and parameters, bytes by device. A path is restored from if
    it is there, else the state after the second step is saved to it, in flight if the schedule
    keeps it so.
    """
    m = CASES[name]()
    there = bool(path) and Path(path).exists()
    plan = jvpipe.checkpoint_plan(path) if there else None
    placed = {"stages": plan, "devices": jax.devices()[:STAGES]} if plan else {}
    fates = {} if plan else {"*": Fate(fate)}
    placed |= {"state_fates": fates} if fate == Fate.SWAP else {}  # the optimizer's state goes too
    pipe = pipeline(m, schedule, planner=planner, fates=fates, **placed)
    batches = batches_of(m)
    first = batches[0]
    state = pipe.restore(path) if there else pipe.init(m.params, first, m.rng, m.state)
    if moments and not there:
        state = asked_to_move(pipe, state, moments)
    losses, seen = [], [looked_at(pipe, state, first)] if there else []
    for now, metrics in pipe.run(state, batches[state.step :]):
        state = now
        losses.append(float(metrics["loss"]).hex())
        if state.step == 2:
            seen.append(looked_at(pipe, state, first))
        if state.step == 2 and path:
            pipe.save(path, state)
    state = pipe.wait(pipe.drain(state))
    return {
        "losses": losses,
        "looked at": [*seen, looked_at(pipe, state, first)],
        "moves": [str(change) for change in pipe.session.history],
        "live": {
            str(i): held
            for i, (device, held) in enumerate(pipe.ledger.live_bytes.items())
            if own(device)
        },
        "peaks": {
            str(i): peak
            for i, (device, peak) in enumerate(pipe.ledger.peak_bytes.items())
            if own(device)
        },
    }


def adapted(name: str, schedule: str, grouped_step: str = "") -> dict[str, Any]:
    """The same of a run in which the first device becomes slow, as far as anybody is told.

    At a step the first process alone takes over groups, and the others have their layers apart.
    """
    m, slowness = CASES[name](), {0: 1.0}

    def seen(measured: Measured, compiled: CompiledPlan) -> Seen:
        places = [stage.devices[0] for stage in compiled.plan.stages for _ in stage.layers]
        layer_s = [slowness.get(place, 1.0) * own(compiled.devices[place]) for place in places]
        assert [s > 0 for s in measured.layer_s(len(layer_s))] == [s > 0 for s in layer_s], (
            "own layers were seen"
        )
        return Seen(layer_s, [0.0] * len(compiled.plan.stages))

    adapt.seen = seen
    pipe = pipeline(m, schedule, planner="even", group=False)
    batches = batches_of(m, 20)
    state = pipe.init(m.params, batches[0], m.rng, m.state)
    pipe.adapt()
    losses = []
    for step, (now, metrics) in enumerate(pipe.run(state, batches)):
        state = now
        losses.append(float(metrics["loss"]).hex())
        pipe.session.adapter.wait()
        if str(step) == grouped_step:
            take_over(pipe)
        slowness[0] = 2.5 if step >= 4 else 1.0
    params = pipe.params(pipe.drain(state))
    moves = [f"step {c.step}: {list(c.new.cuts)}, {c.why}" for c in pipe.session.history]
    return {
        "losses": losses,
        "parameters": None if params is None else digest(params),
        "moves": moves,
    }


def unlike() -> dict[str, Any]:
    """The same of a stream in which the first process alone has the memory to move layers while it
    flows.
    """
    plain = migrate._ways

    def ways(old: CompiledPlan, new: CompiledPlan, *, starts_inside: bool) -> list[str]:
        beside = current_thread() is not main_thread()
        is_tight = beside and not own(jax.devices()[0])
        return plain(old, new, starts_inside=starts_inside)[is_tight:]

    with mock.patch.object(migrate, "_ways", ways):
        return adapted("mlp", "pipedream")


def tight() -> dict[str, Any]:
    """What is said of an evaluation that only the last device has no memory for, and a loss after
    it.
    """
    m, places = CASES["mlp"](), [jax.devices()[0], jax.devices()[-1]]
    many = jax.tree.map(lambda x: np.resize(x, (256, *x.shape[1:])), m.batch)
    pipe = pipeline(m, "1f1b", 2, planner="even", devices=places, memory_limit=[10**6, 4000])
    state = pipe.init(m.params, batches_of(m)[0], m.rng)
    refused = ""
    try:
        pipe.evaluate(state, many)
    except jvpipe.MemoryLimitExceeded as error:
        refused = str(error)
    _, metrics = pipe.step(state, batches_of(m)[0])
    return {"refused": refused, "loss": float(metrics["loss"]).hex()}


def closed_over() -> dict[str, Any]:
    """What a function yields that closes over an array at the first stage, and the loss at the
    last.
    """
    of_loss, of_function = np.full(2, 100.0, np.float32), np.full(2, 0.25, np.float32)

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params[0]) @ params[1] + jnp.asarray(of_loss))

    def function(params: Any, batch: Any) -> jax.Array:
        return jnp.sum((batch["x"] @ params[0] + jnp.asarray(of_function)) @ params[1])

    places, params = [jax.devices()[0], jax.devices()[-1]], tiny.PARAMS[:2]
    plan = jvpipe.Plan.from_cuts([1, 1])
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.5), plan, tiny.MICRO, devices=places)
    state = pipe.init(params, tiny.BATCH, None)
    found, expected = pipe.predict(state, tiny.BATCH, function), function(params, tiny.BATCH)
    return {"found": float(found), "expected": float(expected)}


def switched() -> dict[str, Any]:
    """The same of a run in which other models take over: layers move, leave, come back and are
    new.
    """
    first, batches = MODELS[0], models.batches()
    pipe = jvpipe.Pipeline(models.loss_of(first), models.OPTIMIZER, STAGES, MICRO, planner="even")
    state = pipe.init(models.params_of(first), next(batches), None)
    losses, parameters = [], []
    for names in MODELS:
        if names == MODELS[-1]:
            pipe.precompile(models.loss_of(names), models.params_of(names))
        if names != first:
            state = pipe.update_model(state, models.loss_of(names), models.params_of(names))
        for now, metrics in pipe.run(state, batches, 1):
            state = now
            losses.append(float(metrics["loss"]).hex())
        params = pipe.params(state)
        parameters.append(None if params is None else digest(params))
    return {
        "losses": losses,
        "parameters": parameters,
        "moves": [str(change) for change in pipe.session.model_history],
        "live": {
            str(i): held
            for i, (device, held) in enumerate(pipe.ledger.live_bytes.items())
            if own(device)
        },
        "parked": pipe.ledger.host_bytes,
    }


def take_over(pipe: jvpipe.Pipeline) -> None:
    """Lets the first process alone have its layers in groups."""
    plans = pipe.session.compiled_plans
    if own(jax.devices()[0]):
        plans.adopt(plans.in_groups(plans.current))


def uneven(path: str) -> dict[str, Any]:
    """The same where the first process has groups; the others still have what they evaluated
    with.
    """
    first, batches = MODELS[0], models.batches()
    loss_fns = [models.loss_of(names) for names in MODELS[:2]]
    options: dict[str, Any] = {"planner": "even", "group": False}
    pipe = jvpipe.Pipeline(loss_fns[0], models.OPTIMIZER, STAGES, MICRO, **options)
    state = pipe.init(models.params_of(first), next(batches), None)
    losses = [pipe.evaluate(state, next(batches))["loss"]]
    take_over(pipe)
    pipe.save(path, state)
    state, metrics = pipe.step(pipe.restore(path), next(batches))
    losses += [metrics["loss"], pipe.evaluate(state, next(batches))["loss"]]
    for names, loss_fn in ((MODELS[1], loss_fns[1]), (first, loss_fns[0])):
        state = pipe.update_model(state, loss_fn, models.params_of(names))
        state, metrics = pipe.step(state, next(batches))
        losses.append(metrics["loss"])
    return {"losses": [float(loss).hex() for loss in losses]}


def grouped(schedule: str, group: str) -> dict[str, Any]:
    """The same with layers in groups, or not; all layers leave their devices inside a step, and
    come back.
    """
    m, batches = CASES["mlp"](), batches_of(CASES["mlp"](), 8)
    pipe = pipeline(m, schedule, planner="even", group=bool(group))
    state = asked_to_move(pipe, pipe.init(m.params, batches[0], m.rng, m.state), "1.2+3.0")
    losses, is_grouped = [], []
    for now, metrics in pipe.run(state, batches):
        state = now
        losses.append(float(metrics["loss"]).hex())
        is_grouped.append(pipe.session.compiled.grouped)
        pipe.session.grouping.wait()
    params = pipe.params(pipe.drain(state))
    return {
        "losses": losses,
        "parameters": None if params is None else digest(params),
        "grouped": is_grouped,
    }


def centered(params: Any, mean: jax.Array, batch: Any, rng: Any) -> tuple[jax.Array, jax.Array]:
    """The tiny loss of what is left of a batch without the mean of those before."""
    x = batch["x"] @ params[0]
    after = 0.5 * mean + 0.5 * jax.lax.stop_gradient(x.mean(0))
    return tiny.loss_fn(params[1:], {"x": x - mean[None]}, rng), after


def replicated(schedule: str) -> dict[str, Any]:
    """The same of a stage with replicas in both processes; with a flush, layers move to others
    after a step.

    There the loss reads a moving mean, too, of which each replica makes its part.
    """
    plans = [
        jvpipe.Plan.from_cuts(cuts, devices=d)
        for cuts, d in (([2, 1], [(0, 2), 1]), ([1, 2], [1, (2, 0)]))
    ]
    batch = {"x": np.linspace(-1, 1, 48, dtype=np.float32).reshape(24, 2)}
    order, optimizer = (
        (PipeDream(update_every=2), LOCAL) if schedule == "pipedream" else (schedule, OPTIMIZER)
    )
    has_state = schedule == "1f1b"
    loss, model_state = (centered, np.zeros(2, np.float32)) if has_state else (tiny.loss_fn, None)
    options: dict[str, Any] = {"devices": jax.devices()[:STAGES], "has_state": has_state}
    pipe = jvpipe.Pipeline(loss, optimizer, plans[0], 4, order, **options)
    state, losses = pipe.init(tiny.PARAMS, batch, None, model_state), []
    if schedule == "1f1b":
        state = pipe.migrate(state, plans[1], at=(1, 0))
    for now, metrics in pipe.run(state, [batch] * 3):
        state = now
        losses.append(float(metrics["loss"]).hex())
    state = pipe.wait(pipe.drain(state))
    params = pipe.params(state)
    return {
        "losses": losses,
        "parameters": None if params is None else digest(params),
        "live": {
            str(i): held
            for i, (device, held) in enumerate(pipe.ledger.live_bytes.items())
            if own(device)
        },
    }


def shared(bytes_per_s: str) -> dict[str, Any]:
    """The same where the number of devices of each stage is decided, on links of such a rate."""
    link = Link(float(bytes_per_s))
    links = Links(INFINITE, INFINITE, link, send_uses_host=False)
    device = Accelerator("slow", 10**9, 1e9, {"float32": 1e6}, launch_s=0.0)
    batch = {"x": np.linspace(-1, 1, 48, dtype=np.float32).reshape(24, 2)}
    with (
        mock.patch.object(
            measuring,
            "measured_costs",
            lambda traced, *_, **__: estimate(traced, Cluster("", device, 1)),
        ),
        mock.patch.object(model_planner, "link_between", return_value=link),
        mock.patch.object(measuring, "links_between", return_value=links),
    ):
        options: dict[str, Any] = {"devices": jax.devices()[:STAGES], "replicas": "auto"}
        pipe = jvpipe.Pipeline(tiny.loss_fn, OPTIMIZER, microbatches=4, **options)
        state = pipe.init(tiny.PARAMS, batch, None)
    losses = []
    for now, metrics in pipe.run(state, [batch] * 3):
        state = now
        losses.append(float(metrics["loss"]).hex())
    return {"losses": losses, "replicas": pipe.plan.replicas}


def in_meshes(path: str) -> dict[str, Any]:
    """What a run yields whose places are meshes of two devices, in several processes; in one plain
    devices.
    """
    alone, optimizer = jax.process_count() == 1, OPTIMIZER
    meshes = {"devices": sharded.meshes(), "sharding": sharded.TENSOR_PARALLEL}
    options: dict[str, Any] = {"devices": jax.devices()[:2]} if alone else meshes
    pipe = jvpipe.Pipeline(sharded.loss_fn, optimizer, 2, sharded.MICRO, planner="even", **options)
    state = pipe.init(sharded.parameters(), sharded.ROWS, jax.random.key(3))
    for now, _ in pipe.run(state, [sharded.ROWS] * 2):
        state = now
    pipe.save(path, state)
    layers = len(pipe.session.graph.layers)
    state, metrics = pipe.step(
        pipe.migrate(state, jvpipe.Plan.from_cuts([1, layers - 1])), sharded.ROWS
    )
    params = pipe.params(state)
    again = pipe.evaluate(pipe.restore(path), sharded.ROWS)
    leaves = [leaf.tolist() for leaf in jax.tree.leaves(params)]
    across = jax.sharding.Mesh(np.array(jax.devices()[1:3]), ("model",))
    refused = ""
    try:
        jvpipe.Pipeline(
            sharded.loss_fn, optimizer, 1, devices=[across], sharding=sharded.TENSOR_PARALLEL
        )
    except ValueError as error:
        refused = str(error)
    return {
        "losses": [float(metrics["loss"]), float(again["loss"])],
        "parameters": leaves,
        "refused": refused,
    }


def squares(params: Any, *_: Any) -> jax.Array:
    """A sum over the parameters of all stages."""
    leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves), jnp.zeros(()))


def looked_at(pipe: jvpipe.Pipeline, state: jvpipe.State, batch: Any) -> dict[str, Any]:
    """What a state holds; the first process alone has its trees."""
    trees = {"parameters": pipe.params(state), "model state": pipe.model_state(state)}
    metrics, weight = weighed(pipe.session, state, batch)
    told = {
        "evaluated": [float(metrics["loss"]).hex(), float(weight).hex()],
        "predicted": float(pipe.predict(state, batch, squares)).hex(),
    }
    return told | {
        name: None if trees["parameters"] is None else digest(tree) for name, tree in trees.items()
    }


def own(device: Any) -> bool:
    return device.process_index == jax.process_index()


def begun(process: int, count: int, port: int) -> None:
    """Makes the process's devices, and joins it to the others."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", -(-STAGES // count))
    if count > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            count,
            process,
            cluster_detection_method="deactivate",
            initialization_timeout=40,
            heartbeat_timeout_seconds=20,
            shutdown_timeout_seconds=10,
        )


KINDS = {
    "adapt": adapted,
    "unlike": unlike,
    "tight": tight,
    "closed": closed_over,
    "models": switched,
    "replicas": replicated,
    "groups": grouped,
    "uneven": uneven,
    "shared": shared,
    "meshes": in_meshes,
}
NEVER_LATE = SimpleNamespace(is_ready=lambda array: array.block_until_ready() is array)
"""Of copies: peaks are those of the lists then. On a busy machine one may be late, and then less is
held.
"""


def main(arguments: Sequence[str]) -> None:
    process, count, port = map(int, arguments[:3])
    begun(process, count, port)
    with mock.patch.object(dispatch, "_jax", NEVER_LATE):
        for case in arguments[3:]:
            what, *options = case.split(",")
            told = KINDS[what](*options) if what in KINDS else trained(what, *options)
            print(json.dumps(told), flush=True)
    if count > 1:
        jax.distributed.shutdown()
