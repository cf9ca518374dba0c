"""Defines the format of MaxText: a configuration with equal stages and the schedule GPipe.

The file is a complete configuration, because it names MaxText's `base.yml` as the source of all
fields that it does not set. MaxText runs the embedding and the head outside of its pipeline. In the
plan, the embedding belongs to the first stage and the head to the last stage.

MaxText recomputes blocks from their inputs in two cases:

- `set_remat_policy_on_pipeline_iterations` is true (the default), whatever `remat_policy` is.
- `set_remat_policy_on_layers_per_stage` is true, and `remat_policy` is full.
"""

import re

from jvpipe.exports.format import Format, integer_field
from jvpipe.exports.stack import Layout, layout_of, stack_of, stacked_plan
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan

_STAGES = ("ici_pipeline_parallelism", "dcn_pipeline_parallelism")
_LINE = re.compile(r"(\w+)\s*[:=]\s*['\"]?(-?\w*)['\"]?\s*(?:#.*)?")


def _write(plan: Plan, outline: Outline) -> str:
    """Writes the fields of the layout (see `exports/stack.py`) that is nearest to a plan."""
    layout = layout_of(plan, outline, ("gpipe",), equal=True)
    if outline.microbatches % layout.devices:
        raise ValueError(
            f"MaxText needs a number of micro-batches that is a multiple of its {layout.devices} "
            f"stages, not {outline.microbatches}"
        )
    fields = {
        "base_config": "base.yml",
        "base_num_decoder_layers": sum(layout.counts),
        "ici_pipeline_parallelism": layout.devices,
        "num_layers_per_pipeline_stage": layout.counts[0],
        "num_pipeline_repeats": 1,
        "num_pipeline_microbatches": outline.microbatches,
        "remat_policy": "'full'" if layout.again else "'none'",
        "set_remat_policy_on_pipeline_iterations": "true" if layout.again else "false",
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def _read(text: str, outline: Outline) -> Plan:
    """Reads a plan from fields, which are lines of YAML or words such as `name=value`.

    Raises:
        ValueError: the fields do not fit the model, or a plan cannot express them.
    """
    matches = (_LINE.fullmatch(line.strip()) for line in text.splitlines())
    fields = {match[1]: match[2] for match in matches if match}
    # A slice is a set of devices with fast links. A pipeline may run within a slice (ici), across
    # several slices (dcn), or both.
    within, across = (integer_field(fields, name, 1) for name in _STAGES)
    stages = within * across
    blocks = stack_of(outline, strict=False).blocks
    if stages < 1 or fields.keys().isdisjoint(_STAGES):
        raise ValueError(f"ici_pipeline_parallelism must give at least 1 stage, not {stages}")
    total = integer_field(fields, "base_num_decoder_layers", blocks)
    per_stage = integer_field(fields, "num_layers_per_pipeline_stage", 1)
    repeats = integer_field(fields, "num_pipeline_repeats", -1)
    if total != blocks:
        raise ValueError(f"base_num_decoder_layers is {total}, the model has {blocks} blocks")
    if repeats == -1 and per_stage > 0:  # MaxText's default: as often as the blocks require
        repeats = blocks // (stages * per_stage)
    if stages * per_stage * repeats != blocks:
        raise ValueError(
            f"{stages} stages of {per_stage} layers, {repeats} times, do not cover the {blocks} "
            "blocks"
        )
    if repeats != 1:
        raise ValueError(f"num_pipeline_repeats {repeats} cannot be read: only 1 can")
    policy = fields.get("remat_policy", "full")
    if policy not in ("none", "full"):
        raise ValueError(f"remat_policy '{policy}' cannot be read: only none and full can")
    iterations = _flag(fields, "set_remat_policy_on_pipeline_iterations", True)
    layers = _flag(fields, "set_remat_policy_on_layers_per_stage", False)
    recomputes = iterations or (layers and policy == "full")
    again = per_stage if recomputes else 0
    return stacked_plan(Layout((per_stage,) * stages, again, "gpipe", stages), outline)


def _flag(fields: dict[str, str], name: str, default: bool) -> bool:
    """Returns a field that is true or false; `default` if there is no such field.

    Raises:
        ValueError: the field is something else.
    """
    value = fields.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise ValueError(f"{name} must be true or false, not '{value}'")
    return value == "true"


MAXTEXT = Format("maxtext", _write, _read)
