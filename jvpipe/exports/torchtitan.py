"""torchtitan's configuration: names of modules for each stage, in a table `[parallelism]`."""

import re
import tomllib
from itertools import accumulate, pairwise
from typing import Any

from jvpipe.exports.format import Format
from jvpipe.exports.stack import Layout, layout_of, plan_of
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan

SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
FIRST, LAST = ["tok_embeddings"], ["norm", "lm_head"]


def write(plan: Plan, outline: Outline) -> str:
    """The table of the nearest layout."""
    layout = layout_of(plan, outline, tuple(SCHEDULES.values()), equal=False)
    called = next(name for name, rule in SCHEDULES.items() if rule == layout.schedule)
    if layout.again:
        layout = Layout(layout.counts, max(layout.counts), layout.schedule, layout.devices)
    ends = accumulate(layout.counts, initial=0)
    names = [[f"layers.{k}" for k in range(a, b)] for a, b in pairwise(ends)]
    names[0], names[-1] = FIRST + names[0], names[-1] + LAST
    rows = "".join(f"  {_row(row)},\n" for row in names)
    return (
        f"[parallelism]\npipeline_parallel_degree = {layout.devices}\n"
        f'pipeline_parallel_schedule = "{called}"\nmodule_fqns_per_model_part = [\n{rows}]\n'
        f'\n[activation_checkpoint]\nmode = "{"full" if layout.again else "none"}"\n'
    )


def _row(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def read(text: str, outline: Outline) -> Plan:
    """Reads the tables."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"this is no TOML: {error}") from None
    table = tables.get("parallelism", {})
    parts = table.get("module_fqns_per_model_part")
    if not isinstance(parts, list) or not all(_is_names(part) for part in parts) or not parts:
        raise ValueError("[parallelism] lacks module_fqns_per_model_part, lists of names")
    flat, blocks = [name for part in parts for name in part], []
    for name in flat:
        match = re.fullmatch(r"layers\.(\d+)", name)
        if match is None and name not in (*FIRST, *LAST, "output"):
            raise ValueError(f"'{name}' is none of tok_embeddings, layers.N, norm, lm_head")
        blocks += [int(match[1])] if match else []
    if blocks != list(range(len(blocks))):
        raise ValueError(f"the layers must be each once and in order, they are {blocks}")
    counts = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
    schedule = table.get("pipeline_parallel_schedule", "1F1B")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule '{schedule}' cannot be read: {', '.join(SCHEDULES)} can")
    mode = tables.get("activation_checkpoint", {}).get("mode", "none")
    if mode not in ("none", "full"):
        raise ValueError(f"activation checkpoints '{mode}' cannot be read: none and full can")
    usual = len(counts) // (2 if schedule == "Interleaved1F1B" else 1)
    degree = table.get("pipeline_parallel_degree", usual)
    if degree != usual:
        raise ValueError(f"{len(counts)} parts under {schedule} are of {usual} ranks, not {degree}")
    again = max(counts) if mode == "full" else 0
    return plan_of(Layout(counts, again, SCHEDULES[schedule], usual), outline, strict=False)


def _is_names(part: Any) -> bool:
    return isinstance(part, list) and all(isinstance(name, str) for name in part)


TORCHTITAN = Format("torchtitan", write, read)
