"""Whatever trains can be saved, and restored by a pipeline that has seen nothing yet."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import jvpipe
from jvpipe.cli.outputs import write_safetensors
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.state.checkpoints.flight import names_of
from jvpipe.runtime.state.checkpoints.process_parts import save_parts
from jvpipe.runtime.state.checkpoints.saving import Saving
from tests.grid import grid
from tests.runtime.test_hosts import each
from tests.saved import load_checkpoint
from tests.session import tiny
from tests.session.tiny import begun

D = 4
W = np.asarray(0.3 * np.eye(D) + 0.05, np.float32)
BATCH = {"x": np.ones((4, D), np.float32), "y": np.zeros((4, D), np.float32)}
Make = Callable[..., jvpipe.Pipeline]


def through(matrices: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w in matrices:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def pipeline(loss_fn: Any, optimizer: Any = None, **kwargs: Any) -> jvpipe.Pipeline:
    kwargs = {"stages": jvpipe.Plan.from_cuts([1, 1]), "microbatches": 2} | kwargs
    return jvpipe.Pipeline(loss_fn, optimizer or optax.adam(0.1), **kwargs)


def stepped(pipe: jvpipe.Pipeline, state: jvpipe.State, steps: int) -> jvpipe.State:
    for _ in range(steps):
        state, _ = pipe.step(state, BATCH)
    return state


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_leaves_whose_paths_read_alike_are_kept_apart(tmp_path: Path) -> None:
    params = {"a/b": {"c": W}, "a": {"b/c": 2 * W}, "a.b": {"c": 3 * W}}

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        return through([params["a/b"]["c"], params["a"]["b/c"], params["a.b"]["c"]], batch)

    pipe, other = pipeline(loss_fn, stages=2), pipeline(loss_fn, stages=3)
    state = stepped(pipe, pipe.init(params, BATCH, None), 2)
    pipe.save(tmp_path / "saved", state)
    again = other.restore(tmp_path / "saved")
    assert_same(other.params(again), pipe.params(state))
    assert_same(other.params(stepped(other, again, 2)), pipe.params(stepped(pipe, state, 2)))
    dotted = {"a.b": {"c": W}, "a": {"b.c": 2 * W}}
    write_safetensors(tmp_path / "params.safetensors", dotted)
    written = load_file(tmp_path / "params.safetensors")
    assert_same(written, {"a~1b.c": W, "a.b~1c": 2 * W})


def test_leaves_without_elements_are_saved(tmp_path: Path) -> None:
    params = {"a": W, "b": W, "none": np.zeros((0, D), np.float32)}

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        return through([params["a"], params["b"]], batch) + jnp.sum(params["none"])

    pipe, other = pipeline(loss_fn), pipeline(loss_fn)
    state = stepped(pipe, pipe.init(params, BATCH, None), 2)
    pipe.save(tmp_path, state)
    again = other.restore(tmp_path)
    assert other.params(again)["none"].shape == (0, D)
    assert_same(other.params(stepped(other, again, 2)), pipe.params(stepped(pipe, state, 2)))


@pytest.mark.parametrize(
    ("name", "impl"),
    grid(
        product(("add_noise", "noisy_sgd"), ("threefry2x32", "rbg")),
        ("add_noise", "rbg"),
        ("noisy_sgd", "threefry2x32"),
    ),
)
def test_typed_keys_of_the_optimizer_move_and_are_saved(
    name: str, impl: str, tmp_path: Path
) -> None:
    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        return through(params, batch)

    key = jax.random.key(5, impl=impl)
    noise = optax.chain(optax.add_noise(0.1, 0.55, key), optax.sgd(0.1))
    optimizer = noise if name == "add_noise" else optax.noisy_sgd(0.1, key=key)
    whole, pipe, other = (pipeline(loss_fn, optimizer) for _ in range(3))
    expected = whole.params(stepped(whole, whole.init([W, W], BATCH, None), 4))
    state = pipe.init([W, W], BATCH, None)
    state = pipe.migrate(stepped(pipe, state, 1), jvpipe.Plan.from_cuts([1, 1], devices=[1, 0]))
    state = stepped(pipe, state, 1)
    pipe.save(tmp_path, state)
    assert_same(pipe.params(stepped(pipe, state, 2)), expected)
    assert_same(other.params(stepped(other, other.restore(tmp_path), 2)), expected)


class Carried(NamedTuple):
    mean: Any
    key: Any


def test_a_fresh_pipeline_knows_the_containers_and_keys_of_the_model_state(tmp_path: Path) -> None:
    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        key, noise = jax.random.split(state.key)
        x = batch["x"] + 0.1 * jax.random.normal(noise, batch["x"].shape)
        return through(params, batch | {"x": x}), Carried(0.9 * state.mean + 0.1 * jnp.mean(x), key)

    begun = Carried(np.float32(0.5), jax.random.key(3, impl="rbg"))
    pipe, other = (pipeline(loss_fn, has_state=True) for _ in range(2))
    state = stepped(pipe, pipe.init([W, W], BATCH, None, begun), 2)
    pipe.save(tmp_path, state)
    again = other.restore(tmp_path)
    assert_same(other.model_state(again), pipe.model_state(state))
    state, again = stepped(pipe, state, 2), stepped(other, again, 2)
    assert_same(other.model_state(again), pipe.model_state(state))
    assert_same(other.params(again), pipe.params(state))


def test_what_several_processes_save_is_what_one_saves_and_one_goes_on_from_it(
    tmp_path: Path,
) -> None:
    pipe, state = begun(schedule="pipedream")
    for now, _ in pipe.run(state, [tiny.BATCH] * 2):
        state = now
    compiled, trees, steps = pipe.session.compiled, pipe.session.trees, state.stream_steps
    saving = Saving(compiled)
    shapes = {"params": trees.params, "batch": trees.batch, "model_state": None}
    meta = saving.meta(state, None, shapes, pipe.ledger.versions, {})
    places = [spot.place for spot in names_of(compiled, steps)]

    def save(hosts: Hosts) -> None:
        held = [
            x if place == hosts.process else None
            for place, x in zip(places, state.arrays, strict=True)
        ]
        save_parts(hosts, tmp_path, saving.arrays(held, steps), meta)

    assert each(2, save) == [None, None]
    arrays, whole = load_checkpoint(tmp_path)[0], saving.arrays(state.arrays, steps)
    assert {kind: named.keys() for kind, named in arrays.items()} == {
        kind: n.keys() for kind, n in whole.items()
    }
    assert_same(arrays, whole)
    other = tiny.pipeline(schedule="pipedream")
    again = other.restore(tmp_path)
    assert_same(again.arrays, state.arrays)
    (ahead, _), (after, _) = (
        next(p.run(s, [tiny.BATCH])) for p, s in ((pipe, state), (other, again))
    )
    assert_same(ahead.arrays, after.arrays)
