"""Planned and compiled bytes of each stage, for models of some size on hardware that is not here.

    python -m experiments.absent_hardware.table                         # what is missing, and then the table
    python -m experiments.absent_hardware.table gpt2:medium h100,v5e 4  # these cells once more

wants `jvpipe[aot-cuda]` or `jvpipe[aot-tpu]`. Each cell is a line of cells.jsonl as soon as it is
there; what compilers say is kept: a second run takes seconds. Limits are what the devices have.
"""

import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jvpipe
from jvpipe.cli.job import keep_compiled, stay_on_cpus
from jvpipe.cli.own_model import find_model

MIB = 2**20
CELLS = Path(__file__).with_name("cells.jsonl")
WORKLOADS = {
    "bert:large": {},
    "gpt2:medium": {},
    "llama:1b": {"batch_size": 8, "tokens": 1024},
    "gemma:2b": {"batch_size": 8, "tokens": 512},
    "t5:780m": {},
    "transformer:big": {},
    "gnmt:8": {},
    "xlnet:24": {},
    "resnet:50": {},
    "vgg:16": {},
    "unet:233m": {},
    "amoebanet:82m": {},
}
"""The twelve, with the batch and what else is not the model's own: sequences that a device can
hold.
"""
HARDWARE, STAGES = ("h100", "a100-80gb", "v5e"), (2, 4)

Cell = dict[str, Any]


def planned(model: str, hardware: str, stages: int, **options: Any) -> jvpipe.Forecast:
    """The plan of a model; `options` are those of `jvpipe.plan_for`."""
    name, _, size = model.partition(":")
    own = dict(WORKLOADS.get(model, {}))
    batch_size = own.pop("batch_size", None)
    told = find_model(name, size, own).to_plan(batch_size)
    # Fewer, and the first stage has all of them in flight before it has a gradient (README).
    told["microbatches"] = 2 * stages
    return jvpipe.plan_for(**told | options, stages=stages, hardware=hardware)


def forecast(model: str, hardware: str, stages: int) -> jvpipe.Forecast:
    """The plan of a model, signed by the hardware's compiler."""
    return planned(model, hardware, stages, compile=True)


def cell(model: str, hardware: str, stages: int) -> Cell:
    """What there is to say of a model on some devices."""
    start_s = time.perf_counter()
    where = {"model": model, "hardware": hardware, "stages": stages}
    try:
        found = forecast(model, hardware, stages)
    except ValueError as refused:
        return where | {"refused": str(refused)}
    took = {"seconds": round(time.perf_counter() - start_s)}
    if not found.fits:
        return where | took | {"refused": found.why_not()}
    both = [(x.planned_bytes, x.compiled_bytes) for x in found.answers[0].compiled]
    return where | took | {"bytes": both}


def kept() -> dict[tuple[str, str, int], Cell]:
    """The cells that were measured, by what they are of."""
    lines = CELLS.read_text().splitlines() if CELLS.exists() else []
    return {(x["model"], x["hardware"], x["stages"]): x for x in map(json.loads, lines)}


def rows() -> Iterator[str]:
    """Yields the table: planned and compiled MiB of each stage, and their ratio."""
    yield "| model | hardware | planned / compiled MiB = ratio, stage by stage |\n|---|---|---|"
    for (model, hardware, _), found in sorted(kept().items()):
        stages = (
            f"{planned / MIB:.1f} / {compiled / MIB:.1f} = {planned / compiled:.3f}"
            for planned, compiled in found.get("bytes", ())
        )
        yield f"| {model} | {hardware} | {'; '.join(stages) or found['refused']} |"
    ratios = [p / c for found in kept().values() for p, c in found.get("bytes", ())]
    if ratios:
        good = sum(0.98 <= ratio <= 1.05 for ratio in ratios)
        yield f"\n{good} of {len(ratios)} from 0.98 to 1.05; {min(ratios):.3f} to {max(ratios):.3f}"


def main(models: str = "", hardware: str = "", stages: str = "") -> None:
    """Measures what is asked for, or what is missing, and prints the table."""
    stay_on_cpus()
    keep_compiled()
    every = product(
        models.split(",") if models else WORKLOADS,
        hardware.split(",") if hardware else HARDWARE,
        map(int, stages.split(",")) if stages else STAGES,
    )
    for asked in every:
        if models or asked not in kept():
            cells = kept() | {asked: cell(*asked)}
            CELLS.write_text("".join(f"{json.dumps(cells[key])}\n" for key in sorted(cells)))
            print(json.dumps(cells[asked]), flush=True)
    print("\n".join(rows()))


if __name__ == "__main__":
    main(*sys.argv[1:])
