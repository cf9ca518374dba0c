"""Meshes as places: what a user gives is checked, with the values and the cure."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jvpipe
from jvpipe.runtime.engine.meshes import inner_axes
from jvpipe.util.devices import devices_in
from tests.sharded import ROWS, loss_fn, meshes, parameters, shapes

UP = PartitionSpec(None, "model")
DEVICES = jax.devices()


def overlapping() -> list[Mesh]:
    return [Mesh(np.array(DEVICES[i : i + 2]), ("model",)) for i in (0, 1)]


@pytest.mark.parametrize(
    ("devices", "sharding", "message"),
    [
        (DEVICES[:2], {".*/up": UP}, r"devices has none: give a jax.sharding.Mesh for each stage"),
        (None, {".*/up": UP}, r"devices has none"),
        (meshes(), None, r"devices has meshes, so sharding must say .* not None"),
        ([meshes()[0], DEVICES[5]], {".*/up": UP}, r"devices has 1 meshes and 1 others"),
        (
            [meshes()[0], meshes(2, 2)[1]],
            {".*/up": UP},
            r"stage 0 has axes \{'model': 2\}, that of stage 1 \{'fsdp': 2",
        ),
        (
            overlapping(),
            {".*/up": UP},
            r"device \S+:1 is in the mesh of \S+ and in that of \S+: give each",
        ),
        (meshes(), {"(": UP}, r"sharding rule '\(' is not a regular expression"),
        (meshes(), {".*/up": "model"}, r"needs a jax.sharding.PartitionSpec, not 'model'"),
        (meshes(), {".*/up": PartitionSpec("tensor")}, r"says P\('tensor'\): .* they have 'model'"),
        (meshes(), {".*/up": PartitionSpec("model", "model")}, r"each axis once"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_cure(
    devices: Any, sharding: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        jvpipe.Pipeline(loss_fn, optax.sgd(0.1), devices=devices, sharding=sharding)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (
            {"up": UP},
            r"'up' matches no parameter: a rule must match a whole path, and the paths are '0/bias', '0/down'",
        ),
        (
            {".*/up": UP, "0/(down|up)": PartitionSpec("model")},
            r"both match parameter '0/up', but cut it by P\(None, 'model'\) and",
        ),
        ({".*/bias": UP}, r"has 2 entries, but parameter '0/bias' has 1"),
        (
            {".*/odd": PartitionSpec("model")},
            r"cannot cut a dimension of size 3 of parameter '0/odd', whose shape is \[3\], into 2 equal parts",
        ),
    ],
)
def test_a_rule_that_fits_no_parameter_is_refused_with_its_path(
    sharding: Any, message: str
) -> None:
    pipe = jvpipe.Pipeline(
        loss_fn, optax.sgd(0.1), planner="even", devices=meshes(), sharding=sharding
    )
    params = [layer | {"odd": jax.ShapeDtypeStruct((3,), np.float32)} for layer in shapes()]
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), params)
    with pytest.raises(ValueError, match=message):
        pipe.init(params, ROWS, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding": {".*/up": UP}, "replicas": "auto"}, r"counts devices, not meshes"),
        (
            {"batch_axis": "data"},
            r"batch_axis='data' is not an axis of the meshes: they have 'model'",
        ),
        (
            {"batch_axis": "model", "replicas": (2, 1)},
            r"batch_axis='model' and replicas=\(2, 1\) both share out",
        ),
    ],
)
def test_what_does_not_go_with_meshes_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jvpipe.Pipeline(loss_fn, optax.sgd(0.1), devices=meshes(), **options)


def test_examples_that_devices_cannot_share_evenly_are_refused() -> None:
    pipe = jvpipe.Pipeline(
        loss_fn, optax.sgd(0.1), microbatches=4, devices=meshes(), batch_axis="model"
    )
    with pytest.raises(
        ValueError,
        match=r"batch_axis='model' cannot cut the 3 examples of a micro-batch into 2 equal parts",
    ):
        pipe.init(parameters(), ROWS, None)


def test_a_mesh_becomes_a_place_whose_axes_the_compiler_handles() -> None:
    explicit = jax.make_mesh(
        (2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,), devices=DEVICES[:2]
    )
    places, laid = inner_axes([explicit], {".*": UP}, None, None)
    assert laid is not None
    assert devices_in(places[0]) == tuple(DEVICES[:2])
    assert (laid.rules, laid.axes) == ({".*": (None, "model")}, {"model": 2})


@pytest.mark.parametrize("devices", [None, meshes()])
def test_a_shard_map_over_other_meshes_than_the_stages_is_refused(devices: Any) -> None:
    other = Mesh(np.array(DEVICES[:2]), ("data",))

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        cut = PartitionSpec("data")
        return jax.shard_map(lambda x: x @ params, mesh=other, in_specs=cut, out_specs=cut)(
            batch
        ).sum()

    sharding = {".*": PartitionSpec("model")} if devices else None
    pipe = jvpipe.Pipeline(loss, optax.sgd(0.1), planner="even", devices=devices, sharding=sharding)
    with pytest.raises(
        ValueError,
        match=r"jax.shard_map over a mesh of \{'data': 2\}, and stages are on .*devices=\[",
    ):
        pipe.init(np.ones((4, 4), np.float32), np.ones((8, 4), np.float32), None)


@pytest.mark.parametrize("more", [{"stages": 9}, {"stages": 2, "replicas": (8, 1)}])
def test_where_cpus_are_too_few_the_cure_says_how_to_have_more(more: dict[str, Any]) -> None:
    cure = r'jax.config.update\("jax_num_cpu_devices", 9\)'
    with pytest.raises(ValueError, match=cure):
        jvpipe.Pipeline(loss_fn, optax.sgd(0.1), **more)
    with pytest.raises(ValueError, match="there are 1: use at most 1 stages, or share") as caught:
        jvpipe.Pipeline(loss_fn, optax.sgd(0.1), stages=2, devices=DEVICES[:1])
    assert "jax_num_cpu_devices" not in str(caught.value)
