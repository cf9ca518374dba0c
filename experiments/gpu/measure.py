"""What is measured on a device, each in a process of its own; results are named with their units.

Shapes and symbols: a step has `count` micro-batches of `micro` examples each.
"""

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvpipe
from jvpipe.cost.compiling import Compiler
from jvpipe.cost.targets import TARGETS
from jvpipe.models import load
from jvpipe.programs.model_programs import backward_program, forward_program, layer_programs
from jvpipe.programs.store import shared_store
from jvpipe.trace.model import trace_model
from jvpipe.util.devices import swapper

Tree = Any
Found = dict[str, Any]
MIB = 2**20
SHARE = 0.92
"""Of what a device reports, plans are made for so much: the allocator's pieces need the rest
(docs/gpus.md).
"""
FATES: dict[str, dict[str, str] | None] = {
    "keep": {"*": "keep"},
    "recompute": {"*": "recompute", "*:*": "keep"},  # each layer from its input
    "swap": {"*": "swap"},
    "plan": None,
}


@dataclass(frozen=True)
class Scale:
    """A model and how much of it is measured; `limit_bytes` is for devices that report no
    memory.
    """

    model: str
    size: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    micro: int = 2
    count: int = 2
    copy_mib: int = 4
    limit_bytes: int = 12 * MIB


SCALES = {
    "real": Scale("gpt2", "medium", {}, "bfloat16", micro=8, count=8, copy_mib=256),
    "toy": Scale("gpt2", "mini", {"blocks": 1, "width": 32, "vocabulary": 300, "tokens": 16}),
}


def pipeline(
    scale: Scale,
    fates: str = "keep",
    stages: int = 1,
    schedule: str = "gpipe",
    steps: int = 6,
    micro: int = 0,
) -> Found:
    """Steps of a pipeline whose stages are all on one device.

    Args:
        scale: the model.
        fates: of all candidates, or `plan` for those of a plan under what the device has.
        stages: how many.
        schedule: by name.
        steps: after the first one, which compiles.
        micro: examples of a micro-batch, if not those of the scale.
    """
    device = jax.devices()[0]
    loss_fn, init, optimizer, batch = _training(scale, (micro or scale.micro) * scale.count)
    pipe = jvpipe.Pipeline(
        loss_fn,
        optimizer,
        stages=stages,
        microbatches=scale.count,
        schedule=schedule,
        planner="jvpipe" if FATES[fates] is None else "even",
        memory_limit=_limit_bytes(device, scale, planned=FATES[fates] is None),
        fates=FATES[fates],
        devices=[device] * stages,
    )
    start_s = time.perf_counter()
    state, metrics = pipe.step(pipe.init(init, batch, jax.random.key(0)), batch)
    jax.block_until_ready(state)
    first_s = time.perf_counter() - start_s
    taken, dispatched = [], []
    for _ in range(steps):
        start_s = time.perf_counter()
        state, metrics = pipe.step(state, batch)
        dispatched.append(time.perf_counter() - start_s)
        jax.block_until_ready(state)
        taken.append(time.perf_counter() - start_s)
    arrays = [np.asarray(x) for x in jax.tree.leaves(pipe.params(state))]
    bits = hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()[:8]
    rows = len(pipe.session.compiled.step.instructions)
    held = _held_bytes(device)
    return {
        "step_s": statistics.median(taken),
        "dispatch_s": statistics.median(dispatched),
        "rows": rows,
        "dispatch_of_a_row_s": statistics.median(dispatched) / rows,
        "first_s": first_s,
        "ledger_bytes": pipe.ledger.peak_bytes[device],
        "device_bytes": held,
        "ledger_over_device": pipe.ledger.peak_bytes[device] / held if held else None,
        "host_bytes": pipe.ledger.host_peak_bytes,
        "bits": bits,
        "loss": float(metrics["loss"]),
    }


def plain(scale: Scale, remat: str = "", steps: int = 6, micro: int = 0) -> Found:
    """Steps of one `jax.jit` of everything: gradients of micro-batches are added up in a scan.

    Args:
        scale: the model.
        remat: what `jax.checkpoint` is told: "all" is computed again, or products without a batch
            go to the host.
        steps: after the first one.
        micro: examples of a micro-batch, if not those of the scale.

    Raises:
        MemoryError: it takes more than the scale's limit, where the device has none.
    """
    device = jax.devices()[0]
    loss_fn, init, optimizer, batch = _training(scale, (micro or scale.micro) * scale.count)
    total: Callable[..., Any] = lambda *xs: _total(loss_fn(*xs))  # noqa: E731
    policies = {
        "all": None,
        "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    }
    if remat:
        total = jax.checkpoint(total, policy=policies[remat])

    def step(params: Tree, state: Tree, batch: Tree, key: Any) -> tuple[Tree, Tree]:
        def add(sums: Tree, part: Tree) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, sums, jax.grad(total)(params, part, key)), None

        parts = jax.tree.map(lambda x: x.reshape(scale.count, -1, *x.shape[1:]), batch)
        sums, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        mean = jax.tree.map(lambda x: x / scale.count, sums)
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.jit(init)(jax.random.key(0))
    state, key = optimizer.init(params), jax.random.key(1)
    run = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch, key).compile()
    sizes = run.memory_analysis()
    assert sizes is not None
    needed = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes
    if device.memory_stats() is None and needed > scale.limit_bytes:
        raise MemoryError(f"{needed:,} bytes are over the limit")
    taken = []
    for _ in range(steps + 1):
        start_s = time.perf_counter()
        params, state = run(params, state, batch, key)
        jax.block_until_ready(params)
        taken.append(time.perf_counter() - start_s)
    return {
        "step_s": statistics.median(taken[1:]),
        "compiled_bytes": needed,
        "device_bytes": _held_bytes(device),
    }


def copies(scale: Scale) -> Found:
    """Copies to the host and back, alone and beside a product: what of them is hidden."""
    device = jax.devices()[0]
    arrays = [jnp.ones(scale.copy_mib * MIB // 4) for _ in range(4)]
    factor = jnp.ones((64 * scale.copy_mib // 2,) * 2, jnp.bfloat16)
    product = jax.jit(lambda w: jax.lax.fori_loop(0, 40, lambda _, x: (x @ w) * 1e-3, w))
    out, back = swapper(device, "pinned_host"), swapper(device, "device")
    away = jax.block_until_ready([out(x) for x in arrays])

    def seconds(*starts: Callable[[], Any]) -> float:
        jax.block_until_ready([start() for start in starts])
        start_s = time.perf_counter()
        jax.block_until_ready([start() for start in starts])
        return time.perf_counter() - start_s

    def outward() -> list[jax.Array]:
        return [out(x) for x in arrays]

    def inward() -> list[jax.Array]:
        return [back(x) for x in away]

    def work() -> jax.Array:
        return product(factor)

    start_s = time.perf_counter()
    pending = out(arrays[0])
    issue_s = time.perf_counter() - start_s
    jax.block_until_ready(pending)
    out_s, in_s, work_s = seconds(outward), seconds(inward), seconds(work)
    moved = sum(x.nbytes for x in arrays)
    return {
        "issue_s": issue_s,
        "out_s": out_s,
        "in_s": in_s,
        "product_s": work_s,
        "product_then_out_s": seconds(work, outward),
        "product_then_in_s": seconds(work, inward),
        "in_then_product_s": seconds(inward, work),
        "out_gb_per_s": moved / out_s / 1e9,
        "in_gb_per_s": moved / in_s / 1e9,
    }


def ahead(scale: Scale) -> Found:
    """Temporaries of all layers' programs as compiled here, beside what the compiler says without
    the device.

    Raises:
        ValueError: no target is known for the device.
    """
    device = jax.devices()[0]
    known = (t for t in TARGETS.values() if f'"{device.device_kind}"' in t.config)
    target = TARGETS["cpu"] if device.platform == "cpu" else next(known, None)
    if target is None:
        raise ValueError(f"no compile target is known for a {device.device_kind}")
    loss_fn, init, _, batch = _training(scale, scale.micro)
    key, store = jax.random.key(0), shared_store()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    traced = trace_model(loss_fn, jax.eval_shape(init, key), shapes, key, None).traced
    made = {programs.key: programs for programs in layer_programs(store, traced)}
    programs = [kind(x) for x in made.values() for kind in (forward_program, backward_program)]
    start_s = time.perf_counter()
    here = [x.memory_analysis() for x in store.compile([(program, device) for program in programs])]
    here_s, start_s = time.perf_counter() - start_s, time.perf_counter()
    texts = [store.text(program, device, target.platform) for program in programs]
    there = [sizes.temp_size_in_bytes for sizes in Compiler(target).sizes(texts)]
    pairs = [(x.temp_size_in_bytes, size) for x, size in zip(here, there, strict=True)]
    return {
        "target": target.name,
        "programs": len(programs),
        "equal": sum(own == other for own, other in pairs),
        "here_bytes": sum(own for own, _ in pairs),
        "ahead_bytes": sum(other for _, other in pairs),
        "worst_ratio": max((own + MIB) / (other + MIB) for own, other in pairs),
        "here_s": here_s,
        "ahead_s": time.perf_counter() - start_s,
    }


def _training(scale: Scale, examples: int) -> tuple[Any, Any, Any, Tree]:
    """The loss, the initializer, the optimizer and a batch of a scale's model."""
    workload = load(scale.model, scale.size, **scale.options)

    def low(x: jax.Array) -> jax.Array:
        return x.astype(scale.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def loss_fn(params: Tree, *others: Any) -> Any:
        return workload.loss_fn(jax.tree.map(low, params), *others)

    rng = np.random.default_rng(0)

    def drawn(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if np.issubdtype(x.dtype, np.integer):
            return rng.integers(0, 50, x.shape).astype(x.dtype)
        return np.ones(x.shape, x.dtype)

    batch = jax.tree.map(drawn, workload.abstract_batch(examples))
    return loss_fn, workload.init, workload.optimizer(1000), batch


def _total(loss: Any) -> jax.Array:
    return loss.total / loss.weight if isinstance(loss, jvpipe.Weighted) else loss


def _limit_bytes(device: Any, scale: Scale, *, planned: bool) -> int:
    """What the pipeline is told: a device that reports its memory refuses by itself what it cannot
    hold.
    """
    stats = device.memory_stats()
    if stats is None:
        return scale.limit_bytes
    return int(SHARE * stats["bytes_limit"]) if planned else 2**50


def _held_bytes(device: Any) -> int | None:
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


MEASURES: dict[str, Callable[..., Found]] = {
    "pipeline": pipeline,
    "plain": plain,
    "copies": copies,
    "ahead": ahead,
}
