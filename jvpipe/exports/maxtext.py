"""MaxText's configuration: equal stages of a stack, each of which runs all micro-batches before any backward.

The file is a configuration by itself: what it does not say is told by MaxText's own `base.yml`.
The embedding and the head run outside of its pipeline; here they count to the first and to the last stage.
Unless `set_remat_policy_on_pipeline_iterations` is false, no more than the inputs of blocks is kept, also
where `remat_policy` is none.
"""

import re

from jvpipe.exports.format import Format
from jvpipe.exports.stack import Layout, layout_of, plan_of, stack_of
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan

_LINE = re.compile(r"(\w+)\s*[:=]\s*['\"]?(-?\w*)['\"]?\s*(?:#.*)?")


def write(plan: Plan, outline: Outline) -> str:
    """The fields of the nearest layout."""
    layout = layout_of(plan, outline, ("gpipe",), equal=True)
    if outline.microbatches % layout.devices:
        raise ValueError(
            f"MaxText's micro-batches are a multiple of its {layout.devices} stages, not {outline.microbatches}"
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


def read(text: str, outline: Outline) -> Plan:
    """Reads fields, as lines of YAML or words `name=value`."""
    fields = dict[str, str]()
    for line in text.splitlines():
        if match := _LINE.fullmatch(line.strip()):
            fields[match[1]] = match[2]
    within, across = (
        _number(fields, f"{where}_pipeline_parallelism", 1) for where in ("ici", "dcn")
    )
    stages = within * across
    blocks = stack_of(outline, strict=False).blocks
    if stages < 1 or not {"ici_pipeline_parallelism", "dcn_pipeline_parallelism"} & set(fields):
        raise ValueError("ici_pipeline_parallelism must say how many stages there are")
    told = _number(fields, "base_num_decoder_layers", blocks)
    each = _number(fields, "num_layers_per_pipeline_stage", 1)
    repeats = _number(fields, "num_pipeline_repeats", -1)
    if told != blocks:
        raise ValueError(f"base_num_decoder_layers is {told}, the model has {blocks} blocks")
    repeats = blocks // (stages * each) if repeats == -1 and each > 0 else repeats
    if stages * each * repeats != blocks:
        raise ValueError(
            f"{stages} stages of {each} layers, {repeats} times, do not cover the {blocks} blocks"
        )
    if repeats != 1:
        raise ValueError(f"num_pipeline_repeats {repeats} cannot be read: 1 can")
    policy = fields.get("remat_policy", "full")
    if policy not in ("none", "full"):
        raise ValueError(f"remat_policy '{policy}' cannot be read: none and full can")
    iterations = _flag(fields, "set_remat_policy_on_pipeline_iterations", True)
    layers = _flag(fields, "set_remat_policy_on_layers_per_stage", False)
    again = each if iterations or (layers and policy == "full") else 0
    return plan_of(Layout((each,) * stages, again, "gpipe", stages), outline, strict=False)


def _number(fields: dict[str, str], name: str, usual: int) -> int:
    value = fields.get(name, str(usual))
    if not value.lstrip("-").isdecimal():
        raise ValueError(f"{name} must be a whole number, not '{value}'")
    return int(value)


def _flag(fields: dict[str, str], name: str, usual: bool) -> bool:
    """A field that is true or false."""
    value = fields.get(name, str(usual)).lower()
    if value not in ("true", "false"):
        raise ValueError(f"{name} must be true or false, not '{value}'")
    return value == "true"


MAXTEXT = Format("maxtext", write, read)
