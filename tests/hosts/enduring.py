"""One process that is looked at from within, given PROCESS COUNT PORT: prints one line.

It is fed what it needs alone, under the smallest limit that its planner names; then one process is
late at every step.
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvpipe
from tests.hosts.worker import begun, own

WIDTH, LAYERS, EXAMPLES = 128, 6, 64
STEPS, LATE_STEPS, LATE_S = 200, 30, 0.02


def loss_fn(params: list[Any], batch: dict[str, Any], rng: Any) -> Any:
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def pipeline(**limits: Any) -> tuple[jvpipe.Pipeline, Any, dict[str, Any]]:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(LAYERS)]
    batch = {name: rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for name in ("x", "y")}
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), 2, 4, "gpipe", **limits)
    return pipe, params, batch


def smallest_limit() -> int:
    pipe, params, batch = pipeline(memory_limit=1)
    try:
        pipe.init(params, batch, None)
    except jvpipe.MemoryLimitExceeded as exceeded:
        return exceeded.smallest_limit_bytes
    raise AssertionError("a byte is not enough")


def main(arguments: Sequence[str]) -> None:
    process, count, port = map(int, arguments)
    begun(process, count, port)
    limit = smallest_limit()
    pipe, params, batch = pipeline(memory_limit=limit)
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    state, needs = pipe.init(params, shapes, None), pipe.needs()
    refused = ""
    if len(needs) < len(shapes):
        try:
            pipe.step(state, shapes)
        except ValueError as error:
            refused = str(error)
    fed = {name: leaf if name in needs else shapes[name] for name, leaf in batch.items()}
    losses, levels = [], []
    for step, (now, metrics) in enumerate(pipe.run(state, [fed] * STEPS)):
        state = now
        losses.append(float(metrics["loss"]).hex())
        if step + 1 in (STEPS // 2, STEPS):
            pipe.wait(state)
            levels.append([resident_bytes(), len(jax.live_arrays())])
    ahead, waiting = 0, []
    for _ in range(LATE_STEPS):
        time.sleep(LATE_S if process == count - 1 else 0)
        state, metrics = pipe.step(state, fed)
        waiting = [loss for loss in (*waiting, metrics["loss"]) if not loss.is_ready()]
        ahead = max(ahead, len(waiting))
    pipe.wait(state)
    larger = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), batch)
    try:
        pipe.step(state, larger)
    except jvpipe.MemoryLimitExceeded as exceeded:
        over = exceeded.smallest_limit_bytes
    else:
        raise AssertionError("a batch twice as large keeps the smallest limit of this one")
    state, metrics = pipe.step(state, fed)
    losses.append(float(metrics["loss"]).hex())
    held = {
        str(i): peak
        for i, (device, peak) in enumerate(pipe.ledger.peak_bytes.items())
        if own(device)
    }
    explained = re.findall(r"; (peak .*)", pipe.explain())
    told = {
        "limit": limit,
        "explained": explained,
        "needs": needs,
        "refused": refused,
        "losses": losses,
        "levels": levels,
    }
    print(json.dumps(told | {"peaks": held, "ahead": ahead, "over": over}), flush=True)
    if count > 1:
        jax.distributed.shutdown()
