"""The pieces of a cut optimizer do what optax does to the whole tree."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jvpipe import _jax
from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer
from jvpipe.programs.optimizer_trace import match_paths
from jvpipe.programs.pieces import Piece, Slot, SlotKind
from tests.grid import grid

# Four layers, 1 and 2 are alike; the leaves of the tree are not in their order. Two layers read
# `embed`.
OWNERS = [1, 1, 2, 2, 0, 3, 3]
READERS = [1, 1, 1, 1, 2, 1, 1]
MICROBATCHES = 2


def make_params(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {
        "blocks": {name: {"w": normal(16, 20), "b": normal(20)} for name in ("one", "two")},
        "embed": normal(16, 20),
        "head": {"scale": normal(), "w": normal(16, 20)},
    }


PARAMS = make_params()
LEAVES, TREE = jax.tree.flatten(PARAMS)
GROUPS = {
    "blocks": {n: {"w": "a", "b": "b"} for n in ("one", "two")},
    "embed": "a",
    "head": {"scale": "b", "w": "a"},
}


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def cut(optimizer: Any, params: Any = PARAMS, **options: Any) -> OptimizerCut:
    return cut_optimizer(
        optimizer, params, OWNERS, READERS, **{"microbatches": MICROBATCHES, **options}
    )


class Interpreter:
    """Runs pieces one after another, operation by operation; if they are compiled, what a piece
    donates is gone.
    """

    def __init__(
        self,
        pieces: OptimizerCut,
        params: Any,
        owners: Sequence[int] = OWNERS,
        *,
        compiled: bool = False,
    ) -> None:
        self.cut, self.owners = pieces, owners
        self.compiled: dict[Any, Callable[..., Any]] | None = {} if compiled else None
        leaves = enumerate(jax.tree.leaves(params))
        self.owned: dict[Any, jax.Array] = {
            (owners[i], Slot(SlotKind.PARAMETER, i)): jnp.array(x) for i, x in leaves
        }
        self.run(pieces.init, {})

    def function(self, piece: Piece) -> Callable[..., Any]:
        function = _jax.jaxpr_as_fun(piece.program)
        if self.compiled is None:
            return function
        return self.compiled.setdefault(
            piece.key, jax.jit(function, donate_argnums=piece.donated, keep_unused=True)
        )

    def run(self, pieces: Sequence[Piece], given: dict[Slot, jax.Array]) -> dict[Slot, jax.Array]:
        found = dict(given)
        for piece in pieces:
            arrays = [found[s] if s in found else self.owned[piece.layer, s] for s in piece.reads]
            for slot, value in zip(piece.writes, self.function(piece)(*arrays), strict=True):
                assert not jax.typeof(value).weak_type
                if slot.kind in ("parameter", "state"):
                    self.owned[piece.layer, slot] = value
                else:
                    assert slot not in found
                    found[slot] = value
        return found

    def update(
        self, gradients: Sequence[Sequence[jax.Array]], **given: jax.Array
    ) -> dict[Slot, jax.Array]:
        slots = {
            Slot(SlotKind.GRADIENT, i, r): x
            for i, parts in enumerate(gradients)
            for r, x in enumerate(parts)
        }
        others = {Slot(SlotKind(kind)): x for kind, x in given.items()}
        return self.run(self.cut.update, {**slots, **others})

    @property
    def params(self) -> list[jax.Array]:
        slots = [Slot(SlotKind.PARAMETER, i) for i in range(len(self.owners))]
        return [self.owned[pair] for pair in zip(self.owners, slots, strict=True)]

    @property
    def state(self) -> list[jax.Array]:
        return [copies[0] for copies in self.copies]

    @property
    def copies(self) -> list[list[jax.Array]]:
        """All copies of each leaf of the state."""
        slots = [Slot(SlotKind.STATE, i) for i in range(len(self.cut.state))]
        return [
            [value for (_, held), value in self.owned.items() if held == slot] for slot in slots
        ]


def make_gradients(step: int, dtype: Any = np.float32) -> list[list[jax.Array]]:
    rng = np.random.default_rng(step + 1)
    leaves = zip(LEAVES, READERS, strict=True)
    return [[jnp.asarray(rng.normal(size=x.shape), dtype) for _ in range(n)] for x, n in leaves]


def mean(gradients: Sequence[Sequence[jax.Array]], by: float = MICROBATCHES) -> Any:
    """What plain optax is given. Before a piece takes its gradients: it may overwrite them."""
    sums = [np.sum([np.asarray(x, np.float32) for x in parts], axis=0) for parts in gradients]
    return TREE.unflatten(
        [jnp.asarray(x / np.float32(by), p[0].dtype) for x, p in zip(sums, gradients, strict=True)]
    )


def numbers(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


def assert_close(actual: Sequence[Any], expected: Sequence[Any], rtol: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = np.max(np.abs(numbers(b)), initial=0, where=np.isfinite(numbers(b)))
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=0, atol=rtol * scale)


def assert_same_as_optax(
    optimizer: Any,
    dtype: Any = np.float32,
    *,
    nan_at: int = -1,
    rtol: float = 1e-6,
    steps: int = 3,
    compiled: bool = False,
) -> OptimizerCut:
    """Compares parameters and state after each step; returns the cut."""

    @jax.jit
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    params = make_params(dtype)
    pieces = cut(optimizer, params)
    interpreter, state = Interpreter(pieces, params, compiled=compiled), optimizer.init(params)
    assert jax.tree.structure(state) == pieces.state_tree
    assert_close(interpreter.state, jax.tree.leaves(state), rtol=0)
    for step in range(steps):
        gradients = make_gradients(step, dtype)
        if step == nan_at:
            gradients[2][0] = gradients[2][0] * jnp.asarray(np.nan, dtype)
        params, state = update(mean(gradients), state, params)
        interpreter.update(gradients)
        assert_close(interpreter.params, jax.tree.leaves(params), rtol)
        assert_close(interpreter.state, jax.tree.leaves(state), rtol)
        for first, *others in interpreter.copies:
            assert all(np.array_equal(numbers(first), numbers(x)) for x in others)
    return pieces


def global_pieces(pieces: OptimizerCut) -> int:
    return sum(piece.layer is None for piece in pieces.update)


LOCAL = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": optax.lion(1e-2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.1, 0.2, 10)
    ),
    "multi_transform": optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, GROUPS),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), is_matrix), optax.adam(1e-2)
    ),
    "muon": contrib.muon(1e-2),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-2)),
    "schedule_free": contrib.schedule_free_adamw(1e-2),
    "noisy_sgd": optax.noisy_sgd(0.1, key=jax.random.key(3)),
}
GLOBAL = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "prodigy": contrib.prodigy(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "dadapt_adamw": contrib.dadapt_adamw(),
}


@pytest.mark.parametrize(
    "name",
    grid(
        LOCAL,
        "lamb",
        "multi_transform",
        "muon",
        "MultiSteps",
    ),
)
def test_local_optimizers_have_one_piece_per_layer(name: str) -> None:
    pieces = assert_same_as_optax(LOCAL[name])
    assert [(piece.layer, piece.phase) for piece in pieces.update] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert pieces.cross_layer == ()
    keys = {piece.layer: piece.key for piece in pieces.update}
    assert (keys[1] == keys[2]) == (
        name != "noisy_sgd"
    )  # there each leaf draws with a key of its own
    assert keys[0] != keys[1]


@pytest.mark.parametrize("name", grid(GLOBAL, "clip_by_global_norm", "apply_if_finite"))
def test_global_values_take_one_global_piece(name: str) -> None:
    pieces = assert_same_as_optax(GLOBAL[name], nan_at=1 if name == "apply_if_finite" else -1)
    layers = [(layer, phase) for phase in (0, 1) for layer in range(4)]
    assert [(piece.layer, piece.phase) for piece in pieces.update] == [
        *layers[:4],
        (None, 0),
        *layers[4:],
    ]
    assert pieces.cross_layer == (name,)
    assert {p.key for p in pieces.update if p.layer == 1} == {
        p.key for p in pieces.update if p.layer == 2
    }
    crossing = [
        (piece, slot)
        for piece in pieces.update
        for slot in piece.writes
        if slot.kind in ("partial", "global")
    ]
    assert len(crossing) == 5  # a vector from each layer and one for all


@pytest.mark.parametrize(
    "name", grid(["lamb", "inject_hyperparams", "clip_by_global_norm"], "clip_by_global_norm")
)
def test_bfloat16_is_updated_as_optax_does(name: str) -> None:
    assert_same_as_optax({**LOCAL, **GLOBAL}[name], jnp.bfloat16, rtol=1e-2, steps=2)


@pytest.mark.parametrize("name", ["adamw", "clip_by_global_norm"])
def test_compiled_pieces_with_donated_inputs_update_as_optax(name: str) -> None:
    assert_same_as_optax({**LOCAL, **GLOBAL}[name], compiled=True, rtol=1e-5)


def test_norms_before_and_after_take_two_global_pieces() -> None:
    clip = optax.clip_by_global_norm
    pieces = assert_same_as_optax(optax.chain(clip(1.0), optax.adam(1e-2), clip(1e-2)), steps=2)
    assert global_pieces(pieces) == 2
    assert pieces.cross_layer == ("clip_by_global_norm",)


def test_costly_values_are_kept_between_phases() -> None:
    pieces = assert_same_as_optax(
        optax.chain(contrib.muon(1e-2), optax.clip_by_global_norm(1e-2)), steps=2
    )
    for layer in range(4):
        first, last = (p for p in pieces.update if p.layer == layer)
        assert [s for s in first.writes if s.kind == "kept"] == [
            s for s in last.reads if s.kind == "kept"
        ]
        assert any(s.kind == "kept" for s in last.reads)
        assert not any("dot_general" in str(eqn.primitive) for eqn in last.program.jaxpr.eqns)


def test_weight_divides_the_gradients() -> None:
    optimizer = optax.sgd(0.1)
    interpreter = Interpreter(cut(optimizer, microbatches=None), PARAMS)
    gradients = make_gradients(0)
    updates, _ = optimizer.update(mean(gradients, 7.0), optimizer.init(PARAMS))
    interpreter.update(gradients, weight=jnp.float32(7))
    assert_close(interpreter.params, jax.tree.leaves(optax.apply_updates(PARAMS, updates)), 1e-6)


@pytest.mark.parametrize(
    "optimizer", [optax.adam(1e-2), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))]
)
def test_grad_norm_is_a_diagnostic(optimizer: Any) -> None:
    pieces = cut(optimizer, grad_norm=True)
    assert global_pieces(pieces) == 1
    assert pieces.cross_layer == cut(optimizer).cross_layer
    gradients = make_gradients(0)
    expected = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(mean(gradients))))
    found = Interpreter(pieces, PARAMS).update(gradients)
    np.testing.assert_allclose(found[Slot(SlotKind.GRAD_NORM)], expected, rtol=1e-6)


def test_donated_arrays_become_results() -> None:
    for piece in cut(GLOBAL["clip_by_global_norm"]).update:
        donated = [piece.reads[i] for i in piece.donated]
        owned = [s for s in piece.writes if s.kind in ("parameter", "state")]
        assert sorted(map(repr, donated)) == sorted(map(repr, owned))
        assert bool(donated) == (piece.phase == 1)


def test_accumulators_are_donated_where_a_result_fits() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: -g, updates), updates

    previous = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    pieces = assert_same_as_optax(previous, steps=2)
    for piece in pieces.update:
        assert [piece.reads[i].kind for i in piece.donated].count(SlotKind.GRADIENT) == len(
            piece.writes
        ) // 2


def test_state_belongs_to_layers_by_path() -> None:
    pieces = cut(LOCAL["inject_hyperparams"])
    owners = {leaf.array.name: leaf.owner for leaf in pieces.state}
    assert owners["inner_state/0/mu/blocks/two/w"] == 2
    assert owners["inner_state/0/nu/embed"] == 0
    assert owners["inner_state/0/count"] is None
    assert owners["hyperparams/learning_rate"] is None
    own = {i for i, leaf in enumerate(pieces.state) if leaf.owner in (None, 1)}
    assert set(pieces.held_by(1)) == own
    assert pieces.held_by(None) == ()


def test_hyperparameters_are_no_parameters() -> None:
    optimizer = optax.inject_hyperparams(optax.adam)(0.1, b1=0.9)
    params = {"b1": jnp.ones(3), "w1": jnp.ones((3, 3))}
    pieces = cut_optimizer(optimizer, params, [0, 1], [1, 1], microbatches=1)
    owners = {leaf.array.name: leaf.owner for leaf in pieces.state}
    assert (owners["hyperparams/b1"], owners["inner_state/0/mu/b1"]) == (None, 0)


def test_the_longest_path_matches() -> None:
    assert match_paths([("mu", "a", "w"), ("mu", "w")], [("w",), ("a", "w")]) == [1, 0]
    assert match_paths([("mu",), ("count",)], [()]) == [0, 0]


def make_list_state() -> optax.GradientTransformation:
    """A state whose paths say nothing of the parameters."""

    def init(params: Any) -> Any:
        return [(jnp.zeros_like(x), jnp.zeros(())) for x in jax.tree.leaves(params)]

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(updates)
        new = [(0.9 * m + g, c + jnp.sum(g * g)) for g, (m, c) in zip(leaves, state, strict=True)]
        return tree.unflatten([-0.1 * m / (1 + c) for m, c in new]), new

    return optax.GradientTransformation(init, update)


def test_state_belongs_to_the_only_layer_that_uses_it() -> None:
    pieces = assert_same_as_optax(make_list_state())
    assert [leaf.owner for leaf in pieces.state] == [owner for owner in OWNERS for _ in range(2)]


def make_relay() -> optax.GradientTransformation:
    """One layer's norm scales the update of all."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: -0.1 * g / (1 + state), updates), jnp.sum(
            jnp.abs(updates["embed"])
        )

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def test_a_small_value_of_one_layer_goes_to_all() -> None:
    pieces = assert_same_as_optax(make_relay())
    assert global_pieces(pieces) == 1
    assert pieces.cross_layer == ("make_relay",)


def make_loop(mixes: bool) -> optax.GradientTransformation:
    """A loop over the whole tree, with a counter and a factor that all leaves share, and a value
    that nobody reads.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def body(_: Any, carry: Any) -> Any:
            momentum, factor, count, _ = carry
            unused = jnp.sum(momentum["embed"]) + jnp.sum(momentum["head"]["w"])
            factor = factor * (jnp.mean(momentum["embed"]) if mixes else 0.5)
            return (
                jax.tree.map(lambda m, g: 0.9 * m + factor * g, momentum, updates),
                factor,
                count + 1,
                unused,
            )

        start = (state["m"], jnp.float32(1), state["n"], jnp.float32(0))
        momentum, _, count, _ = jax.lax.fori_loop(0, 3, body, start)
        return jax.tree.map(lambda m: -0.1 * m, momentum), {"m": momentum, "n": count}

    def init(params: Any) -> Any:
        return {"m": jax.tree.map(jnp.zeros_like, params), "n": jnp.zeros((), np.int32)}

    return optax.GradientTransformation(init, update)


def test_a_scan_over_several_layers_is_split() -> None:
    pieces = assert_same_as_optax(make_loop(mixes=False))
    assert global_pieces(pieces) == 0
    assert [leaf.owner for leaf in pieces.state] == [*OWNERS, None]
    assert all(
        sum(eqn.primitive.name == "scan" for eqn in p.program.jaxpr.eqns) >= 1
        for p in pieces.update
    )


def make_switch() -> optax.GradientTransformation:
    """Three branches, one of them beyond what the index can reach."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        branches = [
            lambda g: g,
            lambda g: jax.tree.map(jnp.sign, g),
            lambda g: jax.tree.map(jnp.tanh, g),
        ]
        return jax.lax.switch(state, branches, updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), np.int32), update)


def test_a_switch_becomes_a_choice() -> None:
    pieces = assert_same_as_optax(make_switch())
    assert not any(
        eqn.primitive.name == "cond" for p in pieces.update for eqn in p.program.jaxpr.eqns
    )


def test_weak_types_settle() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: -g * state, updates), state * jnp.float32(0.5)

    optimizer = optax.GradientTransformation(lambda params: jnp.asarray(0.1), update)
    pieces = assert_same_as_optax(optimizer)
    assert [leaf.array.dtype for leaf in pieces.state] == ["float32"]


def test_one_parameter_is_updated_in_one_piece() -> None:
    pieces = cut_optimizer(GLOBAL["clip_by_global_norm"], jnp.ones(3), [5], [1], microbatches=1)
    assert [(piece.layer, piece.phase) for piece in pieces.update] == [(5, 0)]


def make_while() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        halve = lambda c: (jax.tree.map(lambda g: g / 2, c[0]), c[1] + 1)  # noqa: E731
        return jax.lax.while_loop(lambda c: c[1] < 3, halve, (updates, 0))[0], state

    return optax.GradientTransformation(lambda params: (), update)


def make_talkative() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        jax.debug.print("{}", updates["embed"])
        return updates, state

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            optax.lbfgs(linesearch=None),
            r"scale_by_lbfgs combines arrays of .* in one scan\. .*'blocks/one/w', .*'embed'",
        ),
        (optax.flatten(optax.adam(1e-2)), r"flatten combines .* one concatenate\. .* 1024 bytes"),
        (make_loop(mixes=True), "make_loop combines arrays of several layers in one scan"),
        (make_while(), "make_while combines arrays of several layers in one while"),
        (make_talkative(), "side effects cannot be cut: debug_.* in make_talkative"),
        (optax.lbfgs(), "scale_by_zoom_linesearch.*'value'.*linesearch=None"),
        (contrib.momo(), "missing 1 required keyword-only argument: 'value'"),
    ],
)
def test_what_cannot_be_cut_is_named(optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(optimizer)


def test_nothing_is_made_while_cutting() -> None:
    shapes = jax.eval_shape(
        lambda: {"a": jnp.zeros((1 << 20, 1 << 20)), "b": jnp.zeros((1 << 20, 1 << 20))}
    )
    pieces = cut_optimizer(optax.adamw(1e-2), shapes, [0, 1], [1, 1], microbatches=4)
    assert pieces.update[0].key == pieces.update[1].key
