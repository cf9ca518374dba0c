"""Defines the format of torchtitan: a TOML configuration that lists the modules of each stage.

A part is the list of modules of one stage. A chunk is one of several stages on a rank.
"""

import re
import tomllib
from itertools import accumulate, chain, pairwise
from typing import Any

from jvpipe.exports.format import Format, rule_named
from jvpipe.exports.stack import Layout, layout_of, stacked_plan
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.util.brief import brief
from jvpipe.util.given import is_whole

SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
FIRST, LAST = ["tok_embeddings"], ["norm", "lm_head"]


def _write(plan: Plan, outline: Outline) -> str:
    """Writes the tables of the layout (see `exports/stack.py`) that is nearest to a plan."""
    layout = layout_of(plan, outline, tuple(SCHEDULES.values()))
    rule = rule_named(layout.schedule)
    family = "interleaved" if rule.chunks > 1 else rule.name
    schedule = next(name for name, ours in SCHEDULES.items() if ours == family)
    parts = []
    for first, end in pairwise(accumulate(layout.counts, initial=0)):
        parts.append([f"layers.{k}" for k in range(first, end)])
    # The embedding belongs to the first part; the norm and the head belong to the last part.
    parts[0] = FIRST + parts[0]
    parts[-1] += LAST
    rows = "".join(f"  {_row(part)},\n" for part in parts)
    # torchtitan recomputes all blocks or none. For a plan that recomputes some, "full" is nearest.
    mode = "full" if layout.again else "none"
    return (
        "[parallelism]\n"
        f"pipeline_parallel_degree = {layout.devices}\n"
        f'pipeline_parallel_schedule = "{schedule}"\n'
        f"module_fqns_per_model_part = [\n{rows}]\n"
        "\n[activation_checkpoint]\n"
        f'mode = "{mode}"\n'
    )


def _row(names: list[str]) -> str:
    """Writes a list of texts as a TOML array."""
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _read(text: str, outline: Outline) -> Plan:
    """Reads a plan from the tables.

    Raises:
        ValueError: the text is not TOML, or the tables do not fit the model.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"this is not TOML: {error}") from None
    table = _table(tables, "parallelism")
    checkpoints = _table(tables, "activation_checkpoint")
    counts = _counts(table.get("module_fqns_per_model_part"))
    schedule = table.get("pipeline_parallel_schedule", "1F1B")
    mode = checkpoints.get("mode", "selective")  # torchtitan's own default
    if schedule not in list(SCHEDULES):
        raise ValueError(f"schedule {brief(schedule)} cannot be read: {', '.join(SCHEDULES)} can")
    if mode not in ("none", "full"):
        raise ValueError(
            f"activation checkpoints {brief(mode)} cannot be read: only none and full can, "
            "such as [activation_checkpoint] mode = 'full'"
        )
    looped = schedule == "Interleaved1F1B"
    # By default, an interleaved schedule has two chunks per rank, and other schedules have one.
    usual = len(counts) // 2 if looped else len(counts)
    degree = table.get("pipeline_parallel_degree", usual)
    chunks, rest = 0, 1
    if is_whole(degree) and degree > 0:
        chunks, rest = divmod(len(counts), degree)
    if rest or (chunks > 1) != looped:
        raise ValueError(f"{len(counts)} parts under {schedule} cannot be on {brief(degree)} ranks")
    rule = Interleaved(chunks=chunks).name if looped else SCHEDULES[schedule]
    again = max(counts) if mode == "full" else 0
    layout = Layout(counts, again, rule, degree)
    return stacked_plan(layout, outline)


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a table of the file, or an empty table if the file has no such table.

    Raises:
        ValueError: the name of the table has another kind of value.
    """
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"[{name}] must be a table, not {brief(table)}")
    return table


def _counts(parts: Any) -> tuple[int, ...]:
    """Counts the blocks of each part.

    Raises:
        ValueError: `parts` has no lists of names, or a module is missing, unknown or misplaced.
    """
    is_list = isinstance(parts, list)
    if not is_list or not parts or not all(map(_is_names, parts)):
        raise ValueError(
            f"[parallelism] lacks module_fqns_per_model_part, lists of names: it is {brief(parts)}"
        )
    names = chain.from_iterable(parts)
    blocks = [name for name in names if re.fullmatch(r"layers\.\d+", name)]
    in_order = [f"layers.{k}" for k in range(len(blocks))]
    if blocks != in_order:
        raise ValueError(f"the layers must be each once and in order, they are {brief(blocks)}")
    needs: list[list[str]] = [[] for _ in parts]
    needs[0] += FIRST
    needs[-1] += LAST
    counts = []
    for s, (part, need) in enumerate(zip(parts, needs, strict=True)):
        others = sorted(set(part) - set(blocks))
        # Earlier versions of torchtitan called the head "output".
        current = sorted("lm_head" if name == "output" else name for name in others)
        if current != sorted(need):
            raise ValueError(f"part {s} must have {need} beside layers.N, it has {brief(others)}")
        counts.append(sum(name in blocks for name in part))
    return tuple(counts)


def _is_names(part: Any) -> bool:
    """Tells whether a part is a list of texts."""
    return isinstance(part, list) and all(isinstance(name, str) for name in part)


TORCHTITAN = Format("torchtitan", _write, _read)
