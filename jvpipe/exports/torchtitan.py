"""torchtitan's configuration: names of modules for each stage, in a table `[parallelism]`."""

import re
import tomllib
from itertools import accumulate, pairwise
from typing import Any

from jvpipe.exports.format import Format, rule_named
from jvpipe.exports.stack import Layout, layout_of, plan_of
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.util.brief import brief
from jvpipe.util.given import is_whole

SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
FIRST, LAST = ["tok_embeddings"], ["norm", "lm_head"]


def write(plan: Plan, outline: Outline) -> str:
    """The table of the nearest layout."""
    layout = layout_of(plan, outline, tuple(SCHEDULES.values()), equal=False)
    rule = rule_named(layout.schedule)
    usual = "interleaved" if rule.chunks > 1 else rule.name
    called = next(name for name, ours in SCHEDULES.items() if ours == usual)
    if layout.again:
        layout = Layout(layout.counts, max(layout.counts), layout.schedule, layout.devices)
    ends = accumulate(layout.counts, initial=0)
    names = [[f"layers.{k}" for k in range(a, b)] for a, b in pairwise(ends)]
    names[0] = FIRST + names[0]
    names[-1] += LAST
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
    table, checkpoints = (_table(tables, name) for name in ("parallelism", "activation_checkpoint"))
    counts = _counts(table.get("module_fqns_per_model_part"))
    schedule, mode = (
        table.get("pipeline_parallel_schedule", "1F1B"),
        checkpoints.get("mode", "none"),
    )
    if schedule not in list(SCHEDULES):
        raise ValueError(f"schedule {brief(schedule)} cannot be read: {', '.join(SCHEDULES)} can")
    if mode not in ("none", "full"):
        raise ValueError(f"activation checkpoints {brief(mode)} cannot be read: none and full can")
    looped = schedule == "Interleaved1F1B"
    degree = table.get("pipeline_parallel_degree", len(counts) // (2 if looped else 1))
    chunks, rest = divmod(len(counts), degree) if is_whole(degree) and degree > 0 else (0, 1)
    if rest or (chunks > 1) != looped:
        raise ValueError(f"{len(counts)} parts under {schedule} cannot be on {brief(degree)} ranks")
    rule = Interleaved(chunks=chunks).name if looped else SCHEDULES[schedule]
    again = max(counts) if mode == "full" else 0
    return plan_of(Layout(counts, again, rule, degree), outline, strict=False)


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """A table of the file, empty if it is not there."""
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"[{name}] must be a table, not {brief(table)}")
    return table


def _counts(parts: Any) -> tuple[int, ...]:
    """The blocks of each part; ValueError unless the parts have all modules, each where its stage needs it."""
    if not isinstance(parts, list) or not all(_is_names(part) for part in parts) or not parts:
        raise ValueError("[parallelism] lacks module_fqns_per_model_part, lists of names")
    blocks = [name for part in parts for name in part if re.fullmatch(r"layers\.\d+", name)]
    if blocks != [f"layers.{k}" for k in range(len(blocks))]:
        raise ValueError(f"the layers must be each once and in order, they are {brief(blocks)}")
    others = [sorted(set(part) - set(blocks)) for part in parts]
    want: list[list[str]] = [[] for _ in parts]
    want[0] += FIRST
    want[-1] += LAST
    for s, (there, need) in enumerate(zip(others, want, strict=True)):
        # a head was called output in versions before
        if sorted("lm_head" if name == "output" else name for name in there) != sorted(need):
            raise ValueError(f"part {s} must have {need} beside layers.N, it has {brief(there)}")
    return tuple(sum(name in blocks for name in part) for part in parts)


def _is_names(part: Any) -> bool:
    return isinstance(part, list) and all(isinstance(name, str) for name in part)


TORCHTITAN = Format("torchtitan", write, read)
