"""What a user may give, and what is refused in one line."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.schedules import PipeDream

D = 4
PARAMS = [0.5 * np.eye(D, dtype=np.float32) + 0.1 for _ in range(3)]


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), batch["label"][:, None], 1))


def narrow() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(8, D)).astype(np.float32)
    return {"x": x, "label": np.arange(8, dtype=np.int32) % D}


def wide() -> dict[str, np.ndarray]:
    """The same in NumPy's own default types."""
    return {"x": narrow()["x"].astype(np.float64), "label": np.arange(8) % D}


def pipeline(loss: Any = loss_fn, **kwargs: Any) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(
        loss, optax.sgd(0.1), **({"stages": 2, "microbatches": 2, "planner": "even"} | kwargs)
    )


def losses(batch: Any, later: Any = None, loss: Any = loss_fn) -> list[float]:
    """Of two steps and an evaluation; `init` sees `batch`, they see another if it is given."""
    pipe, later = pipeline(loss), batch if later is None else later
    state = pipe.init(PARAMS, batch, None)
    state, first = pipe.step(state, later)
    state, second = pipe.step(state, later)
    return [float(m["loss"]) for m in (first, second, pipe.evaluate(state, later))]


# What is refused: one line, with the cure


def refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        call()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": None}, r"the loss must be a function of \(params, batch, rng\), not None"),
        (
            {"loss": lambda p, b: 0.0},
            r"the loss <lambda>\(p, b\) is called with \(params, batch, rng\).*wrap it",
        ),
        (
            {"loss": lambda *, params, batch, rng: 0.0},
            r"too many positional arguments; wrap it, lambda params, batch,",
        ),
        (
            {"has_state": True},
            r"is called with \(params, model_state, batch, rng\), has_state=True: too many",
        ),
        (
            {"optimizer": optax.adam},
            r"must be an optax transformation, not the function adam: call it, adam\(...\)",
        ),
        ({"optimizer": "adam"}, "must be an optax transformation, not 'adam'"),
        ({"optimizer": None}, "must be an optax transformation, not None"),
        (
            {"devices": [0, 1]},
            r"devices must be a list of JAX devices.*\[jax.devices\(\)\[i\] for.*, not \[0, 1\]",
        ),
        ({"devices": 2}, "devices must be a list of JAX devices"),
        ({"devices": []}, "devices must be a list of JAX devices"),
        ({"planner": None}, "planner must be a name such as 'jvpipe', not None"),
        ({"planner": ["even"]}, "planner must be a name such as 'jvpipe', not a list"),
        ({"schedule": None}, "schedule must be a name such as '1f1b', not None"),
        ({"schedule": PipeDream}, r"not the class PipeDream: call it, PipeDream\(...\)"),
        ({"stages": 2.0}, "stages must be a whole number of at least 1, not 2.0"),
        (
            {"stages": [2, 1]},
            r"stages must be .*not \[2, 1\]; for layers per stage write jvpipe.Plan.from_cuts",
        ),
        ({"stages": "2"}, "stages must be a whole number of at least 1, not '2'"),
        ({"microbatches": np.bool_(True)}, "microbatches must be a whole number"),
        ({"microbatches": np.int64(0)}, "microbatches must be a whole number of at least 1"),
        ({"fates": "swap"}, "fates must map names of tensors, such as .*, not 'swap'"),
        ({"fates": {1: "swap"}}, "fates must map names of tensors"),
        ({"fates": {"*": ["swap"]}}, "fates must map names of tensors"),
        ({"fates": 0}, "fates must map names of tensors, such as .*, not 0"),
        ({"devices": np.array(2)}, r"devices must be a list of JAX devices.*, not array\(2\)"),
        (
            {"replicas": np.array(2)},
            r"replicas must be the devices of each stage, .*, not array\(2\)",
        ),
        ({"replicas": {1: 2}}, r"replicas must be the devices of each stage.*, not \{1: 2\}"),
        ({"remeasure": "no"}, "remeasure must be True or False, not 'no'"),
        ({"optimizer": optax.sgd(0.1)._replace(update=None)}, "must be an optax transformation"),
        ({"checkpoint": True}, "checkpoint must be a name such as 'always', not True"),
        ({"has_aux": "yes"}, "has_aux must be True or False, not 'yes'"),
        ({"memory_limit": -1}, "memory limit -1 is not a size"),
    ],
)
def test_what_cannot_be_an_argument(given: dict[str, Any], message: str) -> None:
    usual = {"loss": loss_fn, "optimizer": optax.sgd(0.1), "stages": 2, "microbatches": 2} | given
    refused(lambda: jvpipe.Pipeline(usual.pop("loss"), usual.pop("optimizer"), **usual), message)


@pytest.mark.parametrize("answer", [3, (), ([1.0], ()), ([1.0] * 3, (), ())])
def test_what_no_update_returns(answer: Any) -> None:
    wrong = optax.GradientTransformation(
        lambda params: (), lambda updates, state, params=None: answer
    )
    pipe = jvpipe.Pipeline(loss_fn, wrong, stages=2, microbatches=2, planner="even")
    refused(
        lambda: pipe.init(PARAMS, narrow(), None),
        r"must return \(updates, state\), where updates has the .*; it returned",
    )


def test_what_a_member_refuses() -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, narrow(), None)
    for at in (5, (1,), ("1", 0), (1, 0.0), (None, None)):
        refused(
            lambda at=at: pipe.migrate(state, jvpipe.Plan.from_cuts([1, 2]), at=cast(Any, at)),
            "at.* must be",
        )
    refused(lambda: pipe.adapt(rule=cast(Any, 3)), "rule must be a jvpipe.session.trigger.Rule")
    refused(
        lambda: pipe.evaluate(state, narrow(), params=jax.eval_shape(lambda: PARAMS)),
        "'0' is a shape: give an array",
    )
    refused(
        lambda: pipe.save("nowhere", state, {"seen": np.float32(1)}),
        "extra must map names to values that JSON can hold.*float32",
    )
    pipe.step(state, narrow())
    refused(lambda: pipe.wait(state), "this state was consumed by an earlier step")


def test_numbers_of_numpy_are_numbers() -> None:
    pipe = pipeline(stages=np.int64(2), microbatches=np.int32(2))
    _, metrics = pipe.step(pipe.init(PARAMS, narrow(), None), narrow())
    assert float(metrics["loss"]) == losses(narrow())[0]
    assert jvpipe.Plan.from_cuts(cast(Any, np.array([2, 1]))) == jvpipe.Plan.from_cuts([2, 1])


@pytest.mark.parametrize(
    ("rng", "message"),
    [
        (0, r"rng must be a random key, not 0: write jax\.random\.key\(0\)"),
        (np.int64(7), r"rng must be a random key, not a int64: write jax\.random\.key\(7\)"),
        ("seed", r"rng must be a random key, not 'seed', such as jax\.random\.key\(0\)"),
        (np.zeros(3, np.uint32), r"rng must be one random key, not uint32\[3\]"),
        (np.zeros(2, np.int32), r"rng must be one random key, not int32\[2\]"),
        (
            jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 2),
            r"rng must be one random key, not key<urbg>\[2\]",
        ),
    ],
)
def test_what_is_no_key(rng: Any, message: str) -> None:
    refused(lambda: pipeline().init(PARAMS, narrow(), rng), message)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"w": PARAMS, "name": "block"},
            "parameter 'name' is of type str, which is not an array: keep it out of the parameters",
        ),
        ({"w": PARAMS, "act": np.tanh}, "parameter 'act' is of type ufunc, which is not an array"),
        (jax.eval_shape(lambda: PARAMS), "parameter '0' is a shape: give an array"),
        ([], "the loss depends on no parameter: there is nothing to train"),
    ],
)
def test_what_cannot_be_parameters(params: Any, message: str) -> None:
    refused(lambda: pipeline().init(params, narrow(), None), message)


def test_parameters_that_are_gone() -> None:
    gone = jax.device_put(PARAMS)
    gone[1].delete()
    refused(lambda: pipeline().init(gone, narrow(), None), "parameter '1' was deleted or donated")
    outside = "parameter '0' is being traced: use jvpipe outside of jax.jit"
    refused(lambda: jax.jit(lambda p: pipeline().init(p, narrow(), None))(PARAMS), outside)


def test_a_model_state_that_nobody_carries() -> None:
    refused(
        lambda: pipeline().init(PARAMS, narrow(), None, {"n": 1.0}),
        "the loss has none: set has_state=True",
    )


@pytest.mark.parametrize(
    ("returned", "options", "message"),
    [
        (
            lambda loss: (loss, {"name": "x"}),
            {"has_aux": True},
            "leaf of aux 'name' is of type str, which is not an array: return",
        ),
        (
            lambda loss: (loss, jax.random.key(0)),
            {"has_aux": True},
            "the only leaf of aux is a key: return jax.random.key_data",
        ),
        (lambda loss: {"loss": loss}, {}, "the loss must be a scalar or jvpipe.Weighted, not dict"),
        (lambda loss: (loss, 1), {}, "not tuple; set has_aux=True if it returns"),
        (
            lambda loss: jvpipe.Weighted(loss, np.bool_(True)),
            {},
            "must be a real number, not of type bool: if it is a mask, take its sum",
        ),
    ],
)
def test_what_cannot_be_returned(returned: Any, options: Any, message: str) -> None:
    pipe = pipeline(lambda p, b, r: returned(loss_fn(p, b, r)), **options)
    refused(lambda: pipe.init(PARAMS, narrow(), None), message)


def test_what_is_no_state_of_the_pipeline() -> None:
    pipe, other = pipeline(), pipeline()
    state, foreign = pipe.init(PARAMS, narrow(), None), other.init(PARAMS, narrow(), None)
    plan, cuts = jvpipe.Plan.from_cuts([1, 2]), cast(Any, [2, 1])
    wrongs: list[tuple[Any, str]] = [
        (None, "not of type NoneType"),
        (PARAMS, "not of type list"),
        (foreign, "another pipeline"),
    ]
    for wrong, message in wrongs:
        refused(lambda wrong=wrong: pipe.step(wrong, narrow()), message)
        refused(lambda wrong=wrong: pipe.evaluate(wrong, narrow()), message)
        refused(lambda wrong=wrong: pipe.params(wrong), message)
        refused(lambda wrong=wrong: pipe.drain(wrong), message)
        refused(lambda wrong=wrong: pipe.migrate(wrong, plan), message)
        refused(lambda wrong=wrong: pipe.update_model(wrong, loss_fn, PARAMS), message)
    refused(
        lambda: pipe.migrate(state, cuts), r"migrate needs a jvpipe.Plan, such as .*, not \[2, 1\]"
    )
    refused(
        lambda: list(pipe.run(state, narrow())),
        "run takes a stream of batches, such as a list, not one dict",
    )
    pipe.step(state, narrow())


def test_a_state_of_the_model_before_is_refused() -> None:
    pipe = pipeline()
    old = pipe.init(PARAMS, narrow(), None)
    new = pipe.init([*PARAMS, PARAMS[0]], narrow(), None)
    refused(lambda: pipe.step(old, narrow()), "belongs to another pipeline or model")
    pipe.step(new, narrow())


def test_a_batch_that_the_loss_does_not_take_is_shown_beside_the_first() -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, narrow(), None)
    first = r"init's was of label int32\[8\], x float32\[8, 4\]: "
    refused(
        lambda: pipe.step(state, {"x": narrow()["x"]}),
        rf"not take a batch of x float32\[8, 4\], {first}KeyError",
    )
    refused(
        lambda: pipe.step(state, narrow() | {"x": np.ones((8, 3), np.float32)}),
        rf"x float32\[8, 3\], {first}TypeE",
    )
    state, _ = pipe.step(state, {name: leaf[:4] for name, leaf in narrow().items()})
    pipe.evaluate(state, narrow())


def test_a_plan_made_for_another_schedule_is_refused() -> None:
    plan = jvpipe.Plan.from_cuts([2, 1], schedule="gpipe")
    cure = (
        r"made for schedule 'gpipe', but the pipeline's schedule is '1f1b': "
        r"give schedule='gpipe', or give plan.with_schedule\('1f1b'\)"
    )
    refused(lambda: pipeline(stages=plan), cure)
    pipe = pipeline()
    state = pipe.init(PARAMS, narrow(), None)
    refused(lambda: pipe.migrate(state, plan), cure)
    pipe.migrate(state, plan.with_schedule("1f1b"))
    for schedule in ("gpipe", "1f1b"):
        pipe = pipeline(stages=jvpipe.Plan.from_cuts([2, 1]), schedule=schedule)
        pipe.init(PARAMS, narrow(), None)
        assert pipe.plan.schedule == schedule
    assert jvpipe.Plan.from_json(jvpipe.Plan.from_cuts([2, 1]).to_json()).schedule is None
