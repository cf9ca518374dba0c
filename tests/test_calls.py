"""What is no argument is refused by a ValueError of few lines, whatever it is and wherever it is
given.
"""

import dataclasses
import inspect
import json
import random
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jvpipe
from jvpipe.ir.plan import Plan

KEY = jax.random.key(0)
PARAMS = [0.5 * np.eye(4, dtype=np.float32)] * 3
BATCH = {"x": np.ones((8, 4), np.float32)}
DEEP = json.loads("[" * 300 + "]" * 300)
USUAL = {"stages": 2, "planner": "even", "microbatches": 2}


def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def pipeline(**options: Any) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(**({"loss_fn": loss, "optimizer": optax.sgd(0.1)} | USUAL | options))


ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        3,
        2**70,
        1.5,
        float("nan"),
        1j,
        np.float32(2),
        object(),
        slice(1),
        range(3),
    ),
    *(
        "",
        "x",
        "a\0b",
        b"x",
        "auto",
        Path("nowhere") / "x",
        int,
        lambda: 0,
        lambda *given: given,
        loss,
    ),
    *(
        [],
        {},
        (),
        [1],
        [-1],
        [[1]],
        [None],
        {"a": 1},
        {1: 2},
        {1, 2},
        (-1, 0),
        (10**30, 0),
        {"*": 3},
        ["16GiB"],
    ),
    *(
        KEY,
        np.ones((40, 40)),
        jnp.ones((30, 30)),
        np.ones(2, object),
        np.array(["a"]),
        [PARAMS],
        PARAMS,
        BATCH,
    ),
    *(
        {"x": np.ones((8, 5), np.float32)},
        {"x": "text"},
        {"x": np.ones(())},
        [np.ones((4, 4), np.int32)] * 3,
    ),
    *(float("nan"), -3, 2**40, 1j, b"x", "x" * 5000, "\ud800", range(3), object(), slice(None)),
    *(
        {"a": {"b": {}}},
        [[[[]]]],
        {(1, 2): 3},
        {None: None},
        np.zeros(0),
        np.ones((2, 2), bool),
        ...,
    ),
    *(
        Plan.from_cuts([1, 1, 1]),
        Plan.from_cuts([2, 1]),
        optax.sgd(0.1),
        jax.ShapeDtypeStruct((8, 4), np.float32),
    ),
]
"""What nobody would give, or would give elsewhere."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[jvpipe.Pipeline, Path]:
    """A pipeline, and a checkpoint of it: each call begins with a state of its own."""
    pipe, path = pipeline(), tmp_path_factory.mktemp("calls") / "state"
    pipe.save(path, pipe.init(PARAMS, BATCH, KEY))
    return pipe, path


def calls_of(pipe: jvpipe.Pipeline, saved: Path) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Each argument of each public name, as a function of what is given for it; the others are
    right.
    """
    methods: dict[str, dict[str, Any]] = {
        "step": {"batch": BATCH},
        "evaluate": {"batch": BATCH, "params": PARAMS},
        "migrate": {"plan": Plan.from_cuts([1, 2]), "at": (5, 0)},
        "update_model": {"loss_fn": loss, "params": PARAMS, "model_state": None},
        "save": {"path": saved.parent / "other", "extra": {}},
        "with_optimizer_state": {"tree": ()},
        **{name: {} for name in ("params", "optimizer_state", "model_state", "drain", "wait")},
    }
    for name, usual in methods.items():
        for option in ("state", *usual):
            yield f"{name} {option}", partial(_called, pipe, saved, name, usual, option)
    for option in inspect.signature(jvpipe.Pipeline).parameters:
        yield f"Pipeline {option}", lambda value, option=option: pipeline(**{option: value})
    begin, model = (
        {"params": PARAMS, "batch": BATCH, "rng": KEY},
        {"loss_fn": loss, "params": PARAMS},
    )
    for option in ("params", "batch", "rng", "model_state"):
        yield (
            f"init {option}",
            lambda value, option=option: pipeline().init(**begin | {option: value}),
        )
    for option in ("loss_fn", "params", "model_state"):
        yield (
            f"precompile {option}",
            lambda value, option=option: pipe.precompile(**model | {option: value}),
        )
    shapes = {"loss_fn": loss, "params": PARAMS, "batch": BATCH, **USUAL}
    for option in inspect.signature(jvpipe.plan_for).parameters:
        yield (
            f"plan_for {option}",
            lambda value, option=option: jvpipe.plan_for(**shapes | {option: value}),
        )
    yield "restore", pipe.restore
    yield "checkpoint_extra", jvpipe.checkpoint_extra
    yield "from_cuts layers", Plan.from_cuts
    yield "from_cuts devices", lambda value: Plan.from_cuts([2, 1], value)
    yield "load", Plan.load
    yield "from_json", Plan.from_json
    good = Plan.from_cuts([2, 1]).to_json()
    for key in good:
        yield f"from_json {key}", lambda value, key=key: Plan.from_json(good | {key: value})
    for key, stage in [(key, good["stages"][0]) for key in good["stages"][0]]:

        def wrong(value: Any, key: str = key, stage: Any = stage) -> Plan:
            return Plan.from_json(good | {"stages": [stage | {key: value}]})

        yield f"from_json stages {key}", wrong


def _called(
    pipe: jvpipe.Pipeline, saved: Path, name: str, usual: dict[str, Any], option: str, value: Any
) -> None:
    pipe.session.migrations.queue.clear()
    if name == "update_model":
        pipe = pipeline()
    getattr(pipe, name)(**{"state": pipe.restore(saved), **usual, option: value})


def refused(call: Callable[[Any], Any], value: Any) -> str | None:
    """The message with which a value was refused; None if it was taken, or if the loss itself
    failed on it.
    """
    try:
        call(value)
    except (ValueError, jvpipe.MemoryLimitExceeded) as error:
        return str(error)
    except Exception as error:
        if loss.__name__ in [frame.name for frame in traceback.extract_tb(error.__traceback__)]:
            return None
        raise
    return None


@pytest.mark.filterwarnings("ignore")
def test_chance_gives_what_is_no_argument(
    trained: tuple[jvpipe.Pipeline, Path], monkeypatch: Any
) -> None:
    monkeypatch.chdir(trained[1].parent)
    chance, found = random.Random(28), 0
    for name, call in calls_of(*trained):
        for value in chance.sample(ODD, 6):
            told = refused(call, value)
            found += told is not None
            assert told is None or (told.count("\n") <= 2 and len(told) < 1000), (name, told)
    assert found > 250


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("precompile loss_fn", 3, r"the loss must be a function of \(params, batch, rng\), not 3"),
        (
            "plan_for planner",
            slice(1),
            r"planner must be a name, or several, such as .* not slice\(None, 1, None\)",
        ),
        ("plan_for planner", [], r"planner must be a name, or several, .* not \[\]"),
        ("from_json", 3, "a plan must be a mapping with stages, schedule, planner, not 3"),
        ("from_json", {}, "a plan lacks stages, schedule, planner: it is {}"),
        ("from_json stages", 3, "stages must be a list of .*, not 3"),
        ("from_json stages", [3], "stage 0 must be a mapping with layers, devices, not 3"),
        ("from_json stages fates", 3, "fates of stage 0 must map names to fates, not 3"),
        ("from_json tasks", 3, "tasks must be texts, one for each device, not 3"),
        (
            "migrate at",
            (-1, 0),
            r"at=\(-1, 0\) is not a moment of a future step: the next step is 0",
        ),
        (
            "migrate plan",
            np.ones((40, 40)),
            r"migrate needs a jvpipe.Plan, such as .*, not float64\[40, 40\]$",
        ),
        ("Pipeline stages", np.ones((40, 40)), r"stages must be .*, not float64\[40, 40\]$"),
        (
            "Pipeline fates",
            {"a": np.ones((40, 40))},
            r"fates must map .*, not {'a': float64\[40, 40\]}$",
        ),
        (
            "init params",
            int,
            "parameters are <class 'int'>: give arrays, or a function key -> params",
        ),
        ("init params", lambda: 0, "give arrays, or a function key -> params that makes arrays"),
        ("init params", 2**70, "is the number 1180591620717411303424, which no device can hold"),
        ("save extra", {1: 2}, "extra must map names .*, not {1: 2}"),
        ("save extra", {"a": DEEP}, "extra must map .*: it.* more than 200 deep"),
        ("restore", "x" * 5000, "path has a name of more than 255 bytes: 'xxx"),
        ("plan_for hardware", "x" * 5000, r"unknown hardware 'xx.*\.\.\..*: There are"),
        ("save path", 3, "path must be a text or a pathlib.Path, not 3"),
        ("restore", None, "path must be a text or a pathlib.Path, not None"),
        ("load", "missing.json", "missing.json cannot be read: No such file"),
        (
            "step state",
            "x",
            "the state must be the one that init, step or restore returned, not of type str",
        ),
    ],
)
def test_the_value_and_the_cure_are_named(
    trained: tuple[jvpipe.Pipeline, Path], name: str, value: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=told) as raised:
        dict(calls_of(*trained))[name](value)
    assert "\n" not in str(raised.value)


def test_a_state_of_no_step_is_refused(trained: tuple[jvpipe.Pipeline, Path]) -> None:
    pipe, saved = trained
    with pytest.raises(
        ValueError, match="the state is of step -1: use the one that init, step or restore returned"
    ):
        pipe.step(dataclasses.replace(pipe.restore(saved), step=-1), BATCH)
    with pytest.raises(ValueError, match="num_steps must be a whole number of at least 0, not -1"):
        next(pipe.run(pipe.restore(saved), [BATCH], -1))


def test_what_a_notebook_shows_is_short(trained: tuple[jvpipe.Pipeline, Path]) -> None:
    pipe, saved = trained
    state, *devices = repr(pipe.restore(saved)).splitlines()
    assert (state, len(devices)) == ("State(step=0, updates=0)", 1 + 2)
    shown = "Pipeline(loss, 2 micro-batches, 1f1b, planner even, 2 devices"
    told, *stages = repr(pipe).splitlines()
    assert (told, len(stages)) == (f"{shown})", 1 + len(pipe.plan.stages))
    assert repr(pipeline()) == f"{shown}: call init)"


def test_a_key_that_is_missed_is_asked_for() -> None:
    def noisy(params: Any, batch: Any, rng: Any) -> jax.Array:
        return loss(params, batch, rng) * jax.random.uniform(rng)

    with pytest.raises(
        ValueError,
        match=r"the loss uses its rng, but no key was given: give one to init, init\(params",
    ):
        pipeline(loss_fn=noisy).init(PARAMS, BATCH, None)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), "nnx.Rng"),
        (nnx.BatchNorm(4, rngs=nnx.Rngs(0)), "nnx.BatchStat"),
    ],
)
def test_a_module_that_holds_more_than_parameters_is_to_be_split(
    layer: nnx.Module, told: str
) -> None:
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), layer)
    told = rf"is an {told}.*: use jvpipe.nnx.loss\(model_fn, loss_fn\), which splits"
    with pytest.raises(ValueError, match=told):
        pipeline(loss_fn=lambda model, batch, rng: jnp.mean(model(batch["x"]))).init(
            model, BATCH, KEY
        )
