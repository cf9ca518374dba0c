"""Which values are made by calls, and that the compiler leaves these alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe.programs.layer import differentiate
from jvpipe.programs.model_programs import forward_program
from jvpipe.programs.outlining import outline
from jvpipe.programs.store import ProgramStore
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body
from jvpipe.trace.graph import build_graph
from jvpipe.trace.inline import merged_equations
from jvpipe.trace.loss import trace_loss
from tests.zoo import D, draws, normalized


def body_of(loss_fn: Any, params: Any) -> Body:
    (body,) = build_graph(trace_loss(loss_fn, params, draws(1)(4, D), None), cuts=[]).bodies
    return body


def names(body: Body) -> dict[str, list[list[str]]]:
    """The equations of each call, by the primitive of the last."""
    found: dict[str, list[list[str]]] = {}
    for _, call in sorted(outline(body).items()):
        primitives = [eqn.primitive.name for eqn in call.eqns]
        found.setdefault(primitives[-1], []).append(primitives)
    return found


def test_a_value_that_several_calls_need_is_made_once() -> None:
    """A normalized row is read by three products; its transpose is made by each product that wants
    it.
    """

    def loss_fn(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        row = normalized(x)
        q, k, v = row @ params[0], row.T @ row, (row.T @ row) @ params[1]
        return jnp.sum(q @ k @ v)

    body = body_of(loss_fn, [draws(2)(D, D), draws(3)(D, D)])
    calls = names(body)
    assert calls["div"] == [["mul", "reduce_sum", "broadcast_in_dim", "add", "sqrt", "div"]]
    assert sorted(len(call) for call in calls["dot_general"]) == [1, 1, 1, 1, 2, 2]
    assert {first for first, last in (c for c in calls["dot_general"] if len(c) == 2)} == {
        "transpose"
    }
    assert calls["reduce_sum"] == [["reduce_sum"]]


def test_calls_make_every_candidate_and_every_output_from_what_was_made_before() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> tuple[jax.Array, jax.Array]:
        x = jnp.tanh(x @ params[0]) + x
        return jnp.sum(jnp.sort(x, -1) @ params[1]), x

    traced = build_graph(
        trace_loss(loss_fn, [draws(2)(D, D), draws(3)(D, D)], draws(1)(4, D), None, has_aux=True),
        cuts=[],
    )
    (body,) = traced.bodies
    known = set(body.inputs)
    for _, call in sorted(outline(body).items()):
        assert known.issuperset(call.inputs)
        assert known.isdisjoint(call.outputs)
        known |= set(call.outputs)
    assert known.issuperset([*body.candidates, *jaxprs.variables(body.outputs)])


def test_the_compiler_leaves_calls_apart_and_costs_see_through_them() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(normalized(x) @ params[0]) @ params[1])

    params = [draws(2)(D, D), draws(3)(D, D)]
    made = differentiate(body_of(loss_fn, params), [], [])
    calls = [eqn for eqn in made.forward.jaxpr.eqns if eqn.primitive.name == "outlined"]
    assert len(calls) == 3
    compiled = jax.jit(_jax.jaxpr_as_fun(made.forward)).lower(*made.forward.in_avals).compile()
    assert str(compiled.as_text()).count(" call(") == len(calls)
    flat = merged_equations(made.forward)
    primitives = [eqn.primitive.name for eqn in flat.jaxpr.eqns]
    assert "outlined" not in primitives
    assert primitives.count("dot_general") == 2
    x = draws(1)(4, D)
    inputs = [
        params[ref.index] if ref.kind == "parameter" else x
        for ref in body_of(loss_fn, params).reads
    ]
    (whole,), (spread,) = _jax.jaxpr_as_fun(made.forward)(*inputs), _jax.jaxpr_as_fun(flat)(*inputs)
    np.testing.assert_allclose(spread, whole, rtol=1e-5)


def test_other_compilers_are_told_how_results_and_inputs_lie() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(normalized(x) @ params[0]) @ params[1])

    body = body_of(loss_fn, [draws(2)(D, D), draws(3)(D, D)])
    forward = forward_program(differentiate(body, [], []))
    texts = {
        platform: ProgramStore().text(forward, jax.devices()[0], platform)
        for platform in ("cpu", "cuda", "tpu")
    }
    pinned = {platform: text.count("@LayoutConstraint") for platform, text in texts.items()}
    calls = [x for call in outline(body).values() for x in call.outputs]
    inputs = [array for array in forward.inputs if array.ndim > 1]
    assert pinned["cpu"] == 0
    assert (
        pinned["cuda"] == pinned["tpu"] == len(inputs) + sum(_jax.aval(x).ndim > 1 for x in calls)
    )


def test_effects_stay_outside_of_calls() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        y = jnp.tanh(x @ params)
        jax.debug.callback(lambda size: None, jnp.max(y))
        return jnp.sum(y @ params)

    body = body_of(loss_fn, draws(2)(D, D))
    assert any(eqn.effects for eqn in body.eqns)
    assert not any(eqn.effects for call in outline(body).values() for eqn in call.eqns)


def test_a_number_that_the_loss_returns_needs_no_call() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> tuple[jax.Array, float]:
        return jnp.sum(x @ params), 3.0

    (body,) = build_graph(
        trace_loss(loss_fn, draws(2)(D, D), draws(1)(4, D), None, has_aux=True), cuts=[]
    ).bodies
    assert any(isinstance(v, _jax.Literal) for v in body.outputs)
    assert [len(call.outputs) for call in outline(body).values()] == [1, 1]
