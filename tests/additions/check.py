"""Looks at copies of the library: `check.py JSON` prints for each what is wrong with it, or null.

JSON has for each copy, by its folder, the additions in it.
"""

import inspect
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module

import jax
import numpy as np
import optax
import pytest  # noqa: F401 - loaded once, for all copies
import scipy.optimize  # noqa: F401

LIMIT_S = 60
HOUSE = "tests.test_house"
CHECKS = ("tests.test_lists", "tests.ir.test_kinds", HOUSE)
"""Of the page about the house, whether it has a line for every file."""


def use_schedule() -> None:
    """The lists have their last backward first, and a planner and the clock take them."""
    from jvpipe.ir.task import text
    from jvpipe.schedules import find_schedule

    assert text(find_schedule("gpipe-lifo").tasks(2, 2)[1]) == "1F0 1F1 1B1 1B0"
    assert _step_s("even", find_schedule("gpipe-lifo")) == 15.0  # (4 + 2 - 1) (1 + 2)


def use_planner() -> None:
    """It is found by its name and halves four layers."""
    from jvpipe.schedules import find_schedule

    assert _step_s("halving", find_schedule("1f1b")) == 15.0


def use_kind() -> None:
    """Lists with a pause before each backward are simulated, lowered and bound to what runs
    them.
    """
    from jvpipe.ir.kinds import Kind
    from jvpipe.ir.task import Task
    from jvpipe.lowering.step import lower_step
    from jvpipe.schedules.schedule import Schedule
    from tests.lowering.toy import GRAPH, layout, optimizer

    pause = Kind["P"]

    def lists(stages: int, microbatches: int) -> tuple[tuple[Task, ...], ...]:
        kinds = [Kind.F, pause, Kind.B]
        return tuple(
            tuple(Task(s, kind, m) for m in range(microbatches) for kind in kinds)
            for s in range(stages)
        )

    step = lower_step(GRAPH, [layout([1, 2])] * 2, lists(2, 2), optimizer(2))
    plain = [[t for t in tasks if t.kind is not pause] for tasks in lists(2, 2)]
    assert step == lower_step(GRAPH, [layout([1, 2])] * 2, tuple(map(tuple, plain)), optimizer(2))
    assert _step_s("even", Schedule(name="pauses", lists=lists)) == 24.0  # 4 x 2 x (1 + 2)


def use_fate() -> None:
    """A compressed product takes half of the bytes until the backward, and the loss is nearly the
    same.
    """
    import jvpipe
    from jvpipe.ir.plan import Fate, Plan, Stage

    weights = [np.full((8, 8), 0.1, np.float32)] * 4
    batch = np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8)

    def loss_fn(params: list[jax.Array], batch: jax.Array, rng: jax.Array) -> jax.Array:
        for w in params:
            batch = jax.numpy.tanh(batch @ w)
        return jax.numpy.mean(batch**2)

    def trained(fate: Fate) -> tuple[float, int]:
        plain = pipeline(Plan.from_cuts([4]))
        plain.init(weights, batch, jax.random.key(0))
        graph = plain.session.compiled.graph
        names = [
            f"{graph.label(layer)}/{c.name}" for layer in graph.layers for c in layer.candidates
        ]
        pipe = pipeline(Plan((Stage((0, 1, 2, 3), (0,), dict.fromkeys(names, fate)),)))
        state = pipe.init(weights, batch, jax.random.key(0))
        state, _ = pipe.step(state, batch)
        _, metrics = pipe.step(state, batch)
        residuals = [
            array.bytes
            for programs in pipe.session.compiled.programs[0]
            for array in programs.signature.residuals
        ]
        return float(metrics["loss"]), sum(residuals)

    def pipeline(plan: Plan) -> jvpipe.Pipeline:
        devices = jax.devices()[:1]
        return jvpipe.Pipeline(
            loss_fn, optax.sgd(0.1), stages=plan, microbatches=2, devices=devices
        )

    (kept, kept_bytes), (packed, packed_bytes) = trained(Fate.KEEP), trained(Fate["COMPRESS"])
    assert packed_bytes * 2 == kept_bytes > 0
    assert np.isclose(packed, kept, rtol=1e-2)


def _step_s(planner: str, schedule: object) -> float:
    """The simulated step of four equal layers on two devices, four micro-batches, by a planner."""
    from jvpipe.cost.costs import Costs, LayerCost, Option
    from jvpipe.papers.registry import find_planner
    from jvpipe.planners.model.problem import Problem
    from jvpipe.planners.model.stage_cost import evaluate_decision
    from jvpipe.planners.model.stage_simulation import simulated_bubble_fraction, simulated_step_s

    costs = Costs((LayerCost("layer", 0.5, 1.0, (Option(1),)),) * 4)
    problem = Problem(costs, 2, schedule, 4)  # type: ignore[arg-type]
    stages = evaluate_decision(problem, find_planner(planner).decide(problem)).stages
    assert 0 <= simulated_bubble_fraction(problem, stages) < 1
    return simulated_step_s(problem, stages)


USES: dict[str, Callable[[], None]] = {
    "schedule": use_schedule,
    "planner": use_planner,
    "kind": use_kind,
    "fate": use_fate,
}


def run(check: Callable[..., None]) -> None:
    """Runs a test, with each of its parameters; a test that takes anything else is not among the
    named checks.
    """
    marks = getattr(check, "pytestmark", [])
    if not marks and not inspect.signature(check).parameters:
        check()
    for mark in marks:
        if mark.name == "parametrize" and isinstance(mark.args[0], tuple):
            for values in mark.args[1]:
                check(*values)


def look(
    additions: Iterable[str], copy: str, say: "multiprocessing.SimpleQueue[str | None]"
) -> None:
    """Uses the additions in a copy, and runs the named checks.

    Args:
        additions: their names.
        copy: its folder.
        say: is told what is wrong, or None.
    """
    sys.path.insert(0, copy)
    try:
        for name in CHECKS:
            module = import_module(name)
            for check in [check for check in vars(module) if check.startswith("test_")]:
                if name != HOUSE or check.endswith("line_for_every_file"):
                    run(getattr(module, check))
        for addition in additions:
            USES[addition]()
    except BaseException as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        say.put(f"{where.name}: {type(e).__name__}: {e}"[:300])
    else:
        say.put(None)


def main() -> None:
    """Forks for each copy."""
    forks, said = multiprocessing.get_context("fork"), []
    for copy, additions in json.loads(sys.argv[1]).items():
        say = forks.SimpleQueue()
        child = forks.Process(target=look, args=(additions, copy, say))
        child.start()
        child.join(LIMIT_S)
        said.append("it did not end" if child.is_alive() else say.get())
        child.kill()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
