"""A recorder: digests of what runs compute and hold and of what planners choose, before and after a
rebuilding.

    python -m tests.record record FILE      # on the code as it was
    python -m tests.record compare FILE     # on the code as it is, on the same machine: bits are a machine's own
    python -m tests.record compare FILE --group     # with layers in groups: all but rows and their bytes

Each case is a line of the file: its name, and what of it must stay as it was: losses, parameters,
replays, the peaks of the ledger, what every row of the lowered lists does, plans, planned seconds
and bytes. `--only TEXT` takes the cases whose names hold it. Checkpoints at rest lie in
FILE.checkpoints and must restore under the code as it is.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import optax

import jvpipe
from jvpipe import _jax
from jvpipe.cli import plan_command
from jvpipe.ir.buffers import Lowered
from jvpipe.schedules import PipeDream, PipeMare, Schedule, TwoBW, XPipe
from tests.bits import MICRO, batches_of, digest
from tests.zoo import CASES, Case, in_bfloat16

Record = dict[str, Any]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
LOCAL = optax.adamw(1e-2)  # looks at one layer at a time, as streams need it
EVERYWHERE: dict[str, Any] = {"group": False}
"""Options of all pipelines."""
ROWS = ("rows", "peaks", "peak")
"""What depends on how layers are dispatched."""
STREAMS: dict[str, Schedule] = {
    "pipedream": PipeDream(),
    "vertical": PipeDream(vertical_sync=True),
    "every-two": PipeDream(update_every=2),
    "2bw": TwoBW(),
    "pipemare": PipeMare(decay=0.5, anneal_updates=10, warmup_updates=2),
    "xpipe": XPipe(),
}


def rows(lowered: Lowered) -> str:
    """What each row does, whatever its buffers are called: where, and how many bytes it reads,
    writes and ends.
    """

    def sizes(ids: Iterable[int]) -> list[tuple[int, int]]:
        return sorted((lowered.buffers[b].memory, lowered.buffers[b].bytes) for b in ids)

    told = [
        f"{row} {row.kind} {row.place} {sizes(row.reads)} {sizes(row.writes)} {sizes(row.frees)}"
        for row in lowered.rows
    ]
    return hashlib.blake2b("\n".join(told).encode(), digest_size=12).hexdigest()


def fated(pipe: jvpipe.Pipeline, plan: jvpipe.Plan) -> jvpipe.Plan:
    """Every third candidate and edge is swapped, every third one recomputed."""
    stages = []
    for stage in plan.stages:
        layers = [pipe.session.graph.layers[i] for i in stage.layers]
        names = [
            f"{pipe.session.graph.label(layer)}/{c.name}"
            for layer in layers
            for c in layer.candidates
        ]
        names += [t.array.name for t in pipe.session.graph.tensors if t.producer in stage.layers]
        fates = {name: ("keep", "swap", "recompute")[i % 3] for i, name in enumerate(names)}
        stages.append(replace(stage, fates=fates))
    return replace(plan, stages=tuple(stages))


def even(pipe: jvpipe.Pipeline, stages: int) -> jvpipe.Plan:
    layers = len(pipe.session.graph.layers)
    return jvpipe.Plan.from_cuts([layers // stages + (s < layers % stages) for s in range(stages)])


def pipeline(m: Case, stages: Any, schedule: str | Schedule, **options: Any) -> jvpipe.Pipeline:
    flush = isinstance(schedule, str)
    options = {"planner": "even", "devices": jax.devices()[:4]} | EVERYWHERE | options
    kinds = {"has_aux": m.has_aux, "has_state": m.has_state}
    return jvpipe.Pipeline(
        m.loss_fn, OPTIMIZER if flush else LOCAL, stages, MICRO, schedule, **kinds, **options
    )


def started(
    m: Case, stages: Any, schedule: str | Schedule, *, fates: bool = False
) -> tuple[jvpipe.Pipeline, Any]:
    pipe = pipeline(m, stages, schedule)
    state = pipe.init(m.params, batches_of(m)[0], m.rng, m.state)
    if fates:
        pipe = pipeline(m, fated(pipe, even(pipe, stages)), schedule)
        state = pipe.init(m.params, batches_of(m)[0], m.rng, m.state)
    return pipe, state


def outcome(pipe: jvpipe.Pipeline, state: Any, losses: list[Any]) -> Record:
    return {
        "losses": digest(losses),
        "parameters": digest(pipe.params(state)),
        "model state": digest(pipe.model_state(state)),
    }


def stepped(pipe: jvpipe.Pipeline, state: Any, batches: Iterable[Any]) -> tuple[Any, list[Any]]:
    losses = []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses.append(metrics)
    return state, losses


def flown(pipe: jvpipe.Pipeline, state: Any, batches: Iterable[Any]) -> tuple[Any, list[Any]]:
    losses = []
    for now, metrics in pipe.run(state, batches):
        state = now
        losses.append(metrics)
    return state, losses


def held(pipe: jvpipe.Pipeline) -> Record:
    """Peaks by the lists, which do not know late copies."""
    return {"peaks": [peak.bytes for peak in pipe.session.compiled.peaks]}


def synchronous(m: Case, stages: int, schedule: str, *, fates: bool = False) -> Record:
    pipe, state = started(m, stages, schedule, fates=fates)
    state, losses = stepped(pipe, state, batches_of(m))
    return outcome(pipe, state, losses) | held(pipe) | {"rows": rows(pipe.session.compiled.lowered)}


def stream(m: Case, stages: int, schedule: Schedule) -> Record:
    pipe, state = started(m, stages, schedule, fates=True)
    batches = batches_of(m, 5)
    state, losses = flown(pipe, state, batches)
    again, each = jvpipe.replay(pipe.ledger, pipe, m.params, batches, m.rng, m.state)
    stream = pipe.session.compiled.stream
    lists = [*(step.lowered for step in stream.steps), stream.drain(1).lowered]
    told = {
        "replay": digest(again),
        "each loss": digest(each),
        "versions": pipe.ledger.versions.to_json(),
    }
    return (
        outcome(pipe, pipe.drain(state), losses)
        | told
        | held(pipe)
        | {"rows": [rows(found) for found in lists]}
    )


def migrated(m: Case, schedule: str | Schedule, at: tuple[int, int]) -> Record:
    """Two stages, then three with other fates and devices; back at the end of a step."""
    pipe, state = started(m, 2, schedule)
    batches, there = batches_of(m, 5), fated(pipe, even(pipe, 3))
    devices = zip(there.stages, (2, 0, 1), strict=True)
    there = replace(there, stages=tuple(replace(stage, devices=(d,)) for stage, d in devices))
    go = stepped if isinstance(schedule, str) else flown
    state, before = go(pipe, state, batches[:1])
    state, between = go(pipe, pipe.migrate(state, there, at=at), batches[1:3])
    state, after = go(pipe, pipe.migrate(state, even(pipe, 2)), batches[3:])
    moved = [(c.step, c.microbatch, c.how, c.moved_bytes, c.layers) for c in pipe.session.history]
    return outcome(pipe, state, [before, between, after]) | {
        "moved": moved,
        "peak": list(pipe.ledger.peak),
    }


def limited(m: Case) -> Record:
    """Whatever plan measured seconds lead to, it computes the same."""
    pipe, state = started(m, 2, "1f1b")
    limit = max(peak.bytes for peak in pipe.session.compiled.peaks) * 9 // 10
    try:
        pipe = pipeline(m, 2, "1f1b", memory_limit=limit, planner="jvpipe")
        state = pipe.init(m.params, batches_of(m)[0], m.rng, m.state)
    except jvpipe.MemoryLimitExceeded:
        return {"refused": True}
    state, losses = stepped(pipe, state, batches_of(m))
    return outcome(pipe, state, losses) | {"within": max(pipe.ledger.peak[:-1]) <= limit}


def saved(m: Case, schedule: str | Schedule, folder: Path, name: str) -> Record:
    """A checkpoint at rest restored under another cut; one that an older code wrote, if there is
    one.
    """
    pipe, state = started(m, 2, schedule)
    state, _ = stepped(pipe, state, batches_of(m)[:1])
    here = folder / name
    if not here.exists():
        pipe.save(here, state)
    other = pipeline(m, 3, schedule)
    state, losses = stepped(other, other.restore(here), batches_of(m)[1:])
    return outcome(other, state, losses)


def changed(m: Case) -> Record:
    """A model that loses a layer and gets it back."""
    shorter, whole = m.params[:-1], m.params
    pipe, state = started(m, 2, "1f1b")
    state, first = stepped(pipe, state, batches_of(m)[:1])
    state, second = stepped(pipe, pipe.update_model(state, m.loss_fn, shorter), batches_of(m)[1:2])
    state, third = stepped(pipe, pipe.update_model(state, m.loss_fn, whole), batches_of(m)[2:])
    return outcome(pipe, state, [first, second, third])


def planned(*arguments: str) -> Record:
    """A plan from shapes alone, as the command line prints it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        out = Path(folder) / "plan.json"
        code = plan_command.main([*arguments, "--json", str(out)])
        found = json.loads(out.read_text()) if out.exists() else {}
    return {
        "code": code,
        "plan": {key: value for key, value in found.items() if key != "planning_s"},
    }


def cases(checkpoints: Path) -> Iterator[tuple[str, Callable[[], Record]]]:
    """The names of all cases, and what runs them."""
    for name in (
        "pre-norm",
        "resnet",
        "unet",
        "three-readers",
        "chained-keys",
        "with-aux",
        "integers",
        "experts",
    ):
        yield f"{name} 1 gpipe", partial(synchronous, CASES[name](), 1, "gpipe")
        yield f"{name} 3 1f1b fates", partial(synchronous, CASES[name](), 3, "1f1b", fates=True)
    for name in ("pre-norm", "resnet"):
        yield (
            f"{name} 2 gpipe bfloat16",
            partial(synchronous, in_bfloat16(CASES[name]()), 2, "gpipe", fates=True),
        )
    for name, schedule in STREAMS.items():
        yield f"pre-norm 3 {name}", partial(stream, CASES["pre-norm"](), 3, schedule)
        yield f"resnet 2 {name} moves", partial(migrated, CASES["resnet"](), schedule, (2, 1))
    for name in ("resnet", "chained-keys", "three-readers"):
        yield f"{name} 1f1b moves inside", partial(migrated, CASES[name](), "1f1b", (2, 1))
        yield f"{name} gpipe moves between", partial(migrated, CASES[name](), "gpipe", (2, 0))
    for name in ("pre-norm", "resnet"):
        yield f"{name} limited", partial(limited, CASES[name]())
    for name, schedule in (("1f1b", "1f1b"), ("pipedream", PipeDream())):
        yield f"resnet {name} saved", partial(saved, CASES["resnet"](), schedule, checkpoints, name)
    yield "mlp changes", partial(changed, CASES["mlp"]())
    for planner in ("jvpipe", "vpipe", "dawnpiper", "adapipe", "dapple", "torchgpipe"):
        for schedule in ("1f1b", "gpipe", "pipedream"):
            large = (
                "--model",
                "bert",
                "--size",
                "base",
                "--stages",
                "4",
                "--memory-limit",
                "3GiB",
                "--batch-size",
                "64",
            )
            yield (
                f"plan {planner} {schedule}",
                partial(planned, *large, "--planner", planner, "--schedule", schedule),
            )


def record(folder: Path, only: str = "") -> dict[str, Record]:
    """Runs the cases whose names hold `only`; no copy is ever late, so that peaks are those of the
    lists.
    """

    def arrived(array: jax.Array) -> bool:
        array.block_until_ready()
        return True

    _jax.is_ready = arrived
    told = {}
    for name, run in cases(folder):
        if only in name:
            told[name] = json.loads(json.dumps(run()))
            print(name, flush=True)
    return told


def differences(old: dict[str, Record], new: dict[str, Record]) -> list[str]:
    """A line for each case and each thing of it that is not as it was.

    >>> differences({"a": {"losses": "x"}, "b": {}}, {"a": {"losses": "y"}, "b": {}})
    ["a: losses 'x' is now 'y'"]
    """
    lines = [
        f"{name}: {'gone' if name in old else 'new'}" for name in sorted(old.keys() ^ new.keys())
    ]
    for name in (name for name in old if name in new):
        for key in sorted(old[name].keys() | new[name].keys()):
            a, b = old[name].get(key), new[name].get(key)
            if a != b:
                lines.append(f"{name}: {key} {str(a)[:200]!r} is now {str(b)[:200]!r}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Records, or compares; the exit code is 1 if something is not as it was."""
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--group", action="store_true")
    options = parser.parse_args(arguments)
    EVERYWHERE["group"] = options.group
    folder = options.file.with_name(options.file.name + ".checkpoints")
    told = record(folder, options.only)
    if options.action == "record":
        options.file.write_text(json.dumps(told, indent=1) + "\n")
        return 0
    old = json.loads(options.file.read_text())
    left_out = ROWS if options.group else ()
    old = {name: old[name] for name in old if options.only in name}
    old, told = (
        {
            name: {k: v for k, v in found.items() if k not in left_out}
            for name, found in each.items()
        }
        for each in (old, told)
    )
    lines = differences(old, told)
    print("\n".join(lines) or f"{len(told)} cases as they were")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
