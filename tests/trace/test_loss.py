"""What a loss may be, and what a wrong one says."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.ir.layers import Ref
from jvpipe.ir.values import ValueKind
from jvpipe.ir.weighted import Weighted
from jvpipe.trace.loss import (
    KeyKind,
    LossJaxpr,
    active,
    check_trained,
    key_words,
    trace_loss,
)

PARAMS = {"block": [{"w": np.ones((3, 3), np.float32)}], "scale": np.ones((), np.float32)}
X = np.ones((2, 3), np.float32)


def good(params: Any, x: Any, rng: Any) -> jax.Array:
    return jnp.mean((x @ params["block"][0]["w"]) ** 2) * params["scale"]


def trace(loss_fn: Any, params: Any = PARAMS, state: Any = None, **options: Any) -> LossJaxpr:
    return trace_loss(loss_fn, params, X, None, state, **options)


def test_inputs_are_named_by_their_paths() -> None:
    loss = trace(good)
    assert loss.names == {"parameter": ("block/0/w", "scale"), "batch": ("",), "state": ()}
    assert list(loss.inputs.values()) == [
        Ref(ValueKind.PARAMETER, 0),
        Ref(ValueKind.PARAMETER, 1),
        Ref(ValueKind.BATCH, 0),
    ]
    assert [ref for _, ref in loss.outputs] == [Ref(ValueKind.LOSS, 0)]


def test_arrays_that_a_loss_captures_are_constants() -> None:
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    loss = trace(lambda p, x, rng: good(p, x + table, rng))
    assert [ref for ref in loss.inputs.values() if ref.kind == "constant"] == [
        Ref(ValueKind.CONSTANT, 0)
    ]
    np.testing.assert_array_equal(loss.constants[0], table)


def test_a_gradient_flows_from_parameters_to_the_loss_alone() -> None:
    def loss_fn(params: Any, x: Any, rng: Any) -> Any:
        x = x @ params["block"][0]["w"]
        beside = jnp.cos(x)
        still = jax.lax.stop_gradient(jnp.sin(x))
        return jnp.sum(jnp.exp(x) * still) * params["scale"], beside

    loss = trace(loss_fn, has_aux=True)
    flows = active(loss)
    by_name = {eqn.primitive.name: eqn.outvars[0] in flows for eqn in loss.eqns}
    assert by_name["dot_general"]
    assert by_name["exp"]
    assert not by_name["cos"]
    assert not by_name["sin"]
    assert not by_name["stop_gradient"]


@pytest.mark.parametrize(
    "rng", [jax.random.key(5), jax.random.PRNGKey(5), jax.random.key(5, impl="rbg")]
)
def test_each_micro_batch_has_its_own_key(rng: jax.Array) -> None:
    seed = np.array([*key_words(rng).ravel(), 3, 1], np.uint32)
    made = KeyKind.of(rng).micro_batch_key(jnp.asarray(seed))
    expected = jax.random.fold_in(jax.random.fold_in(rng, 3), 1)
    assert made.dtype == expected.dtype
    np.testing.assert_array_equal(key_words(made), key_words(expected))


@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        (
            np.int32,
            r"int32, which has no gradient: name it in frozen=, such as frozen=\['block/0/w'\]",
        ),
        (
            jnp.float8_e4m3fn,
            "float8_e4m3fn, in which gradients cannot be added up: give it as bfloat16 or wider",
        ),
    ],
)
def test_parameters_of_types_without_gradients_are_refused_by_path(dtype: Any, told: str) -> None:
    params = {**PARAMS, "block": [{"w": np.ones((3, 3), dtype)}]}
    traced = trace(lambda p, x, r: good(PARAMS, x, r) * p["scale"], params)
    with pytest.raises(ValueError, match=f"'block/0/w' is of type {told}"):
        check_trained(traced)
    check_trained(replace(traced, frozen=frozenset([0])))


def test_something_is_left_to_be_trained() -> None:
    loss = replace(trace(lambda p, x, r: good(PARAMS, x, r) * p["scale"]), frozen=frozenset([1]))
    with pytest.raises(ValueError, match=r"depends on no trained parameter \(1 frozen\)"):
        check_trained(loss)


def test_no_gradient_flows_for_frozen_parameters_alone() -> None:
    def loss_fn(params: Any, x: Any, rng: Any) -> Any:
        before = jnp.sin(x @ params["block"][0]["w"])
        return jnp.sum(jnp.exp(before * params["scale"]))

    loss = trace(loss_fn)
    names = [eqn.primitive.name for eqn in loss.eqns if eqn.outvars[0] in active(loss, [0])]
    assert "exp" in names
    assert not {"dot_general", "sin"} & set(names)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda p, x, r: x @ p["block"][0]["w"],
            r"must be a scalar, not of shape \(2, 3\): take its mean or sum",
        ),
        (
            lambda p, x, r: (good(p, x, r), x),
            r"must be a scalar or jvpipe.Weighted, not tuple; set has_aux=True",
        ),
        (lambda p, x, r: {"loss": good(p, x, r)}, "must be a scalar or jvpipe.Weighted, not dict"),
        (lambda p, x, r: None, "must be a scalar or jvpipe.Weighted, not NoneType"),
        (
            lambda p, x, r: jnp.argmax(p["block"][0]["w"]),
            "must be a real floating-point scalar, not of type int32",
        ),
        (
            lambda p, x, r: jax.lax.complex(good(p, x, r), good(p, x, r)),
            "must be a real floating-point scalar, not of type complex64",
        ),
        (lambda p, x, r: jnp.sum(x), "depends on no parameter: there is nothing to train"),
        (lambda p, x, r: 0.0, "depends on no parameter: there is nothing to train"),
        (
            lambda p, x, r: jax.lax.stop_gradient(good(p, x, r)),
            "depends on no parameter: there is nothing to train",
        ),
        (
            lambda p, x, r: Weighted(good(p, x, r), 10**30),
            "part of the loss 'weight' is the number 10{30}, which no device can hold",
        ),
        (lambda p, x, r: Weighted(good(p, x, r), x), r"must be a scalar, not of shape \(2, 3\)"),
        (
            lambda p, x, r: Weighted(good(p, x, r), jnp.sum(p["block"][0]["w"])),
            r"weight of jvpipe.Weighted depends on parameters: count items of the batch, or .*stop_gradient",
        ),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(loss_fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(loss_fn)


class Undecided:
    """Losses that look at a value, as a function, a method and an object."""

    def method(self, params: Any, x: Any, rng: Any) -> Any:
        return good(params, x, rng) if jnp.sum(x) > 0 else 0.0

    def __call__(self, params: Any, x: Any, rng: Any) -> Any:
        return self.method(params, x, rng)


def undecided(params: Any, x: Any, rng: Any) -> Any:
    return Undecided().method(params, x, rng)


@pytest.mark.parametrize(
    ("loss_fn", "named"),
    [
        (undecided, "undecided at .*test_loss.py:.* the value of the argument x"),
        (jax.jit(undecided), "undecided at .*test_loss.py:.* the value of the argument x"),
        (functools.partial(undecided), "undecided at .*test_loss.py:.* the value of the argument"),
        (Undecided().method, "method at .*test_loss.py:.* the value of the argument x"),
        (Undecided(), "__call__ at .*test_loss.py:.* the value of the argument"),
    ],
    ids=["function", "jitted", "partial", "method", "object"],
)
def test_an_error_inside_a_loss_names_the_users_function(loss_fn: Any, named: str) -> None:
    with pytest.raises(
        jax.errors.TracerBoolConversionError, match=f"(?s)while tracing the function {named}"
    ):
        trace(loss_fn)


def test_a_loss_that_needs_a_key_and_has_none_says_so() -> None:
    with pytest.raises(
        ValueError,
        match=r"uses its rng, but no key was given: give one to init, init\(params, batch, ",
    ):
        trace(lambda p, x, rng: good(p, x, rng) + jax.random.normal(rng))
    with pytest.raises(TypeError, match="NoneType") as failed:
        trace(lambda p, x, rng: good(p, x, rng) + rng[0])
    assert any(
        "give one to init, such as jax.random.key(0)" in note for note in failed.value.__notes__
    )


def test_a_weight_behind_stop_gradient_is_fine() -> None:
    loss = trace(lambda p, x, r: Weighted(good(p, x, r), jax.lax.stop_gradient(p["scale"])))
    assert loss.weighted
    assert [ref for _, ref in loss.outputs] == [Ref(ValueKind.LOSS, 0), Ref(ValueKind.LOSS, 1)]


@pytest.mark.parametrize(
    ("options", "returned", "message"),
    [
        (
            {"has_aux": True},
            lambda loss, s: loss,
            r"has_aux=True, has_state=False the loss must return \(loss, aux\)",
        ),
        ({"has_aux": True}, lambda loss, s: (loss, s, 3), r"must return \(loss, aux\)"),
        (
            {"has_aux": True},
            lambda loss, s: Weighted(loss, jnp.float32(1)),
            r"must return \(loss, aux\)",
        ),
        (
            {"has_state": True},
            lambda loss, s: loss,
            r"has_state=True the loss must return \(loss, new_model_state\)",
        ),
        (
            {"has_state": True, "has_aux": True},
            lambda loss, s: (loss, s),
            r"must return \(loss, new_model_state, aux\)",
        ),
        (
            {"has_state": True},
            lambda loss, s: (loss, {"other": s["mean"]}),
            "structure of the model state from .* to .*other",
        ),
        (
            {"has_state": True},
            lambda loss, s: (loss, {"mean": s["mean"][:2]}),
            r"changes model state 'mean' from float32\[3\] to float32\[2\]",
        ),
        (
            {"has_state": True},
            lambda loss, s: (loss, {"mean": s["mean"].astype(jnp.bfloat16)}),
            r"changes model state 'mean' from float32\[3\] to bfloat16\[3\]",
        ),
        (
            {"has_state": True},
            lambda loss, s: (loss, {"mean": 0.0}),
            r"'mean' from float32\[3\] to float32\[\]",
        ),
    ],
)
def test_what_a_loss_returns_must_be_what_was_announced(
    options: Any, returned: Any, message: str
) -> None:
    state = {"mean": np.zeros(3, np.float32)} if "has_state" in options else None

    def loss_fn(params: Any, *rest: Any) -> Any:
        return returned(good(params, X, None), rest[0])

    with pytest.raises(ValueError, match=message):
        trace(loss_fn, state=state, **options)


def test_aux_keeps_its_structure() -> None:
    pair = Weighted(jnp.float32(1), jnp.float32(2))
    loss = trace(lambda p, x, r: (good(p, x, r), {"b": [x, None], "a": pair}), has_aux=True)
    assert loss.aux_weighted == (True, False)
    assert jax.tree.unflatten(loss.aux_tree, ["pair", "array"]) == {
        "b": ["array", None],
        "a": "pair",
    }
    assert [ref for _, ref in loss.outputs[1:]] == [
        Ref(ValueKind.AUX, 0),
        Ref(ValueKind.AUX, 1),
        Ref(ValueKind.AUX, 2),
    ]
