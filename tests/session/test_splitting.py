"""Plans with finer layers: when they are made, that they are faster as counted by hand, and that no
bit changes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe import Pipeline, Plan
from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.cost.presets import CORE
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.planned_problem import Planned
from jvpipe.planners.splitting import SPLITTING, CutCandidate, Splitter, _cuts, even_places
from jvpipe.programs.bit_equality import same_bits, same_update
from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer
from jvpipe.programs.store import shared_store
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.schedules import find_schedule
from jvpipe.trace.batches import micro_batch_shapes
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.layer_split import CutPlace, split_at, split_layers, split_points
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.model import trace_model
from jvpipe.trace.sorted_equations import Sorted
from tests.zoo import transformer

WIDTH, ROWS = 8, 16
SGD = optax.sgd(0.1)


def feed_forward(params: Any, batch: Any, rng: Any) -> jax.Array:
    """Blocks of two products each, with a skip around them."""
    x = batch["x"]
    for p in params:
        x = x + (jax.nn.gelu(x @ p["in"] + p["in_bias"][None]) @ p["out"] + p["out_bias"][None])
    return jnp.mean((x - batch["y"]) ** 2)


def parameters(*hidden: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = [
        {"in": (WIDTH, h), "in_bias": (h,), "out": (h, WIDTH), "out_bias": (WIDTH,)} for h in hidden
    ]
    return [
        {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in each.items()}
        for each in shapes
    ]


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


def optimizer_of(traced: Traced, params: Any, optimizer: Any = SGD) -> OptimizerCut:
    owners, readers = zip(
        *((p.owner, len(p.readers)) for p in traced.graph.parameters), strict=True
    )
    return cut_optimizer(optimizer, params, owners, readers, microbatches=4)


def three_blocks() -> Traced:
    """Three layers, the second of which does five times the work of the others."""
    loss = trace_loss(feed_forward, parameters(8, 40, 8), batch(), None)
    eqns = [eqn.primitive.name for eqn in Sorted.of(loss).main]
    products, adds = (
        [i for i, found in enumerate(eqns) if found == name] for name in ("dot_general", "add")
    )
    biases = [next(i for i in adds if i > p) for p in products[1::2]]
    return build_graph(loss, [next(i for i in adds if i > bias) + 1 for bias in biases[:2]])


def by_flops(traced: Traced, stages: int = 3, worth: float = 1.0) -> CutCandidate:
    """The plan of a model on devices for which the lightest layer's forward takes a second."""
    unit = worth / (2 * 2 * ROWS * WIDTH * 8)
    layers = (
        LayerCost(x.name, x.flops * unit, 2 * x.flops * unit, (Option(0),))
        for x in traced.graph.layers
    )
    problem = Problem(Costs(tuple(layers)), stages, find_schedule("1f1b"), microbatches=8)
    decision = jvpipe(problem)
    planned = Planned(decision.plan(problem, "jvpipe"), problem, decision)
    return CutCandidate(traced, planned)


def always(whole: Traced, layer: int, halves: Traced) -> bool:
    return True


def test_a_lone_layer_that_is_the_slowest_stage_is_cut() -> None:
    begin = by_flops(three_blocks())
    assert [x.flops for x in begin.traced.graph.layers] == [4096, 20480, 4096]
    assert begin.planned.step_s == pytest.approx(
        1 + 8 * (5 + 10) + 2
    )  # the first F, eight F and B of the slowest, the last B
    found = Splitter(CORE, always).better(begin, by_flops)
    assert [x.flops for x in found.traced.graph.layers] == [4096, 10240, 10240, 4096]
    assert found.planned.plan.cuts == (2, 1, 1)
    # Eight F and B of the first stage, which makes three F, then waits until 14.5 for the second to
    # have made F F B, and near the end 0.5 more: there the second takes 7.5 for the last F and a B,
    # the first 7 for a B.
    assert found.planned.step_s == pytest.approx(8 * 3 * (1 + 2.5) + (14.5 - 3 * 3.5) + (7.5 - 7))


@pytest.mark.parametrize("seed", range(8))
def test_stages_are_as_even_as_any_places_make_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layer_s, stages = rng.integers(1, 20, 5).astype(float), 3
    inside = {
        layer: [CutPlace(9 - p, share, int(rng.integers(10))) for p, share in enumerate(shares)]
        for layer in range(5)
        if (shares := sorted(rng.choice(9, int(rng.integers(3)), replace=False) / 10 + 0.1))
    }
    costs = Costs(tuple(LayerCost("", t / 3, 2 * t / 3, (Option(0),)) for t in layer_s))
    problem = Problem(costs, stages, find_schedule("1f1b"), microbatches=8)
    decision = jvpipe(problem)
    planned = Planned(decision.plan(problem, "jvpipe"), problem, decision)
    ends = np.cumsum(layer_s)
    all_places = [(float(end), None) for end in ends[:-1]] + [
        (float(ends[layer] - layer_s[layer] * (1 - x.share)), (layer, x.before_end))
        for layer, places in inside.items()
        for x in places
    ]

    def slowest_s(chosen: Sequence[tuple[float, Any]]) -> float:
        return max(np.diff([0.0, *sorted(at for at, _ in chosen), ends[-1]]))

    def layers_cut(chosen: Sequence[tuple[float, Any]]) -> int:
        return sum(place is not None for _, place in chosen)

    ways = list(combinations(all_places, stages - 1))
    least_s = min(map(slowest_s, ways))
    fewest = min(layers_cut(x) for x in ways if slowest_s(x) <= SPLITTING.near_times * least_s)
    found = even_places(planned, inside)
    assert len(found) == fewest
    reached = [x for x in ways if {place for _, place in x} - {None} == set(found)]
    assert min(map(slowest_s, reached)) <= SPLITTING.near_times * least_s * (1 + 1e-9)


def test_stages_do_not_end_inside_what_carries_state_where_devices_have_several() -> None:
    layers = (LayerCost("block", 1.0, 2.0, (Option(0),)),) * 6
    schedule = find_schedule("interleaved")
    problem = Problem(Costs(layers, carried=((2, 3),)), 4, schedule, 4)
    decision = Decision.keeping_all([0, 1, 2, 4, 6])
    planned = Planned(decision.plan(problem, "given"), problem, decision)
    every = [place.at_s for place in _cuts(planned, [3.0] * 6, {})]
    assert every == [0.0, 3.0, 6.0, 12.0, 15.0, 18.0]


@pytest.mark.parametrize("why", ["bits differ", "layers are light", "no finer plan", "not faster"])
def test_whole_layers_stay(why: str) -> None:
    begin = by_flops(three_blocks(), worth=1e-5 if why == "layers are light" else 1.0)

    def plan(traced: Traced) -> CutCandidate:
        if why == "no finer plan":
            raise Infeasible("nothing fits", smallest_limit_bytes=1)
        return begin

    keeps_bits: Callable[[Traced, int, Traced], bool] = (
        always if why != "bits differ" else lambda *_: False
    )
    assert Splitter(CORE, keeps_bits).better(begin, plan) is begin


def test_halves_are_planned_where_whole_layers_keep_no_limit_whatever_the_seconds() -> None:
    whole, splitter = three_blocks(), Splitter(CORE, always)
    needed = {3: 100, 6: 80}

    def within(limit: int) -> Callable[[Traced], CutCandidate]:
        def plan(traced: Traced) -> CutCandidate:
            layers = len(traced.graph.layers)
            if needed[layers] > limit:
                raise MemoryLimitExceeded(f"{layers} layers hold more", needed[layers])
            return by_flops(traced, worth=1e-9)

        return plan

    planned = [splitter.within_limit(whole, 3, within(limit)) for limit in (100, 99, 80)]
    assert [(len(best.traced.graph.layers), rounds) for best, rounds in planned] == [
        (3, 1),
        (6, 0),
        (6, 0),
    ]
    with pytest.raises(MemoryLimitExceeded, match="6 layers") as refused:
        splitter.within_limit(whole, 3, within(79))
    assert refused.value.smallest_limit_bytes == 80


def test_even_stages_stay() -> None:
    begin = by_flops(build_graph(three_blocks().loss), stages=1)
    assert Splitter(CORE, always).better(begin, by_flops) is begin


def run(
    params: Any, given: Any, loss_fn: Any, stages: int | Plan, **options: Any
) -> tuple[Any, Pipeline]:
    """Losses and parameters of two steps, as bytes."""
    devices = jax.devices()[: stages if isinstance(stages, int) else len(stages.stages)]
    pipe = Pipeline(loss_fn, SGD, stages=stages, microbatches=2, devices=devices, **options)
    state, losses = pipe.init(params, given, jax.random.key(0)), []
    for _ in range(2):
        state, metrics = pipe.step(state, given)
        losses.append(float(metrics["loss"]))
    return (losses, [x.tobytes() for x in jax.tree.leaves(pipe.params(state))]), pipe


@pytest.mark.thorough
def test_a_transformer_has_the_same_bits_in_parts() -> None:
    case = transformer(2)
    micro = micro_batch_shapes(case.batch, 2)
    whole = trace_model(case.loss_fn, case.params, micro, case.rng).traced
    attention, network = (
        split_points(whole, layer, lambda eqns, _: [1.0] * len(eqns))[0] for layer in (1, 2)
    )
    *_, last = split_points(whole, 1, lambda eqns, _: [1.0] * len(eqns))
    assert last != attention
    parts = split_at(whole, [(1, attention), (1, last), (2, network)])
    plan = Plan.from_cuts([2, 1, 2, len(parts.graph.layers) - 5], splits=parts.splits)
    alone, _ = run(case.params, case.batch, case.loss_fn, 1, planner="even")
    cut, pipe = run(case.params, case.batch, case.loss_fn, plan)
    assert len(pipe.session.compiled.traced.graph.layers) == len(whole.graph.layers) + 3
    assert cut == alone


@pytest.mark.thorough
def test_more_stages_than_layers_cut_layers() -> None:
    params, given = parameters(*[8] * 6), batch()
    alone, pipe = run(params, given, feed_forward, 1, planner="even")
    layers = len(pipe.session.compiled.traced.graph.layers)
    finer, pipe = run(params, given, feed_forward, layers + 1)
    assert len(pipe.plan.stages) == layers + 1
    assert pipe.plan.splits
    named = re.findall(r"^  layer +\d+ (\S+)", pipe.explain(), re.MULTILINE)
    assert len(set(named)) == len(named) == len(pipe.session.graph.layers)  # halves are told apart
    assert finer == alone
    again, other = run(params, given, feed_forward, Plan.from_json(pipe.plan.to_json()))
    assert (again, other.plan.splits) == (alone, pipe.plan.splits)
    with pytest.raises(
        ValueError, match=r"stages need at least as many layers, but the model has \d+: use at most"
    ):
        run(params, given, feed_forward, layers + 1, planner="even")


def test_a_plan_for_other_layers_is_refused() -> None:
    params, given = parameters(*[8] * 6), batch()
    pipe = Pipeline(
        feed_forward, SGD, stages=1, microbatches=2, planner="even", devices=jax.devices()[:1]
    )
    state = pipe.init(params, given, jax.random.key(0))
    whole = pipe.session.compiled.traced
    halves = split_layers(whole, {3: split_points(whole, 3, lambda eqns, _: [1.0] * len(eqns))[0]})
    plan = Plan.from_cuts([len(halves.graph.layers)], splits=halves.splits)
    with pytest.raises(ValueError, match="a plan with other layers needs a new pipeline"):
        pipe.migrate(state, plan)
    with pytest.raises(ValueError, match="not inside layers"):
        run(params, given, feed_forward, Plan.from_cuts([8], splits=(10**6,)))


def test_disagreement_is_seen() -> None:
    params, whole = parameters(8, 40, 8), three_blocks()
    store, device = shared_store(), jax.devices()[0]
    halves = split_layers(whole, {1: split_points(whole, 1, lambda eqns, _: [1.0] * len(eqns))[0]})
    assert same_bits(store, device, whole, 1, halves)
    *eqns, last = halves.bodies[2].eqns
    wrong = replace(halves.bodies[2], eqns=(*eqns, last.replace(invars=[last.invars[1]] * 2)))
    assert not same_bits(
        store, device, whole, 1, replace(halves, bodies=(*halves.bodies[:2], wrong))
    )
    one, two = optimizer_of(whole, params), optimizer_of(halves, params)
    assert same_update(store, device, one, 1, two)
    assert not same_update(store, device, one, 1, optimizer_of(halves, params, optax.sgd(0.2)))
