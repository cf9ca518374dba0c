"""Defines the format of Megatron-LM: options of its command line, including the layout.

    Et*3|t*4|t*4|t*3L    four stages: E is the embedding, t a block, L the head with the loss

Stage s runs on rank s modulo the number of ranks, so a rank may have several stages (chunks). With
`full` recomputation by `block`, the first `--recompute-num-layers` blocks of each stage keep only
their inputs.
"""

import re
import shlex
from collections.abc import Sequence

from jvpipe.exports.format import Format, integer_field
from jvpipe.exports.stack import Layout, layout_of, stacked_plan
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import MOST_LAYERS, Plan
from jvpipe.schedules.interleaved import Interleaved
from jvpipe.util.brief import brief

SCHEDULES = ("1f1b", "interleaved")
_WORD = re.compile(r"\(([^)]+)\)\*(\d{1,7})|([EtL|])(?:\*(\d{1,7}))?")


def _write(plan: Plan, outline: Outline) -> str:
    """Writes the options of the layout (see `exports/stack.py`) that is nearest to a plan."""
    layout = layout_of(plan, outline, SCHEDULES)
    stages = ["t" * count if count < 2 else f"t*{count}" for count in layout.counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    options = {
        "num-layers": sum(layout.counts),
        "pipeline-model-parallel-size": layout.devices,
        "pipeline-model-parallel-layout": shlex.quote("|".join(stages)),
    }
    if layout.again:
        options |= {"recompute-granularity": "full", "recompute-method": "block"}
        options["recompute-num-layers"] = layout.again
    return "".join(f"--{name} {value}\n" for name, value in options.items())


def _read(text: str, outline: Outline) -> Plan:
    """Reads a plan from options or only a layout; by default, each stage has its own rank."""
    options = _options(shlex.split(text, comments=True))
    if "--pipeline-model-parallel-layout" not in options:
        flags = brief(", ".join(options))
        raise ValueError(f"there is no --pipeline-model-parallel-layout among {flags}: add it")
    stages = _unrolled(options["--pipeline-model-parallel-layout"]).split("|")
    joined = "".join(stages)
    if not re.fullmatch("Et*L", joined):
        raise ValueError(f"the layout must be one E, blocks t and one L, it is {brief(joined)}")
    blocks = joined.count("t")
    layers = integer_field(options, "--num-layers", blocks, signed=False)
    if layers != blocks:
        raise ValueError(f"--num-layers is {layers}, the layout has {blocks} blocks t")
    devices = integer_field(options, "--pipeline-model-parallel-size", len(stages), signed=False)
    chunks, rest = divmod(len(stages), devices) if devices else (0, 1)
    if rest:
        raise ValueError(f"{len(stages)} stages cannot be shared by {devices} ranks")
    rule = "1f1b" if chunks == 1 else Interleaved(chunks=chunks).name
    counts = tuple(stage.count("t") for stage in stages)
    again = _again(options, max(counts))
    return stacked_plan(Layout(counts, again, rule, devices), outline)


def _options(words: Sequence[str]) -> dict[str, str]:
    """Returns the values of options by name; the value of a flag is an empty text.

    Words before the first option count as the layout.
    """
    flags = (i for i, word in enumerate(words) if word.startswith("--"))
    first = next(flags, len(words))
    options: dict[str, str] = {}
    if first:
        options["--pipeline-model-parallel-layout"] = "".join(words[:first])
    name = ""
    for word in words[first:]:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        else:
            options[name] = (options[name] + " " + word).strip()
    return options


def _again(options: dict[str, str], largest: int) -> int:
    """Returns how many blocks of each stage are recomputed.

    Args:
        options: the options by name.
        largest: the number of blocks in the largest stage.

    Raises:
        ValueError: the options recompute in a way that a plan cannot express.
    """
    granularity = options.get("--recompute-granularity")
    if granularity is None:
        return 0
    method = options.get("--recompute-method")
    count = integer_field(options, "--recompute-num-layers", 1, signed=False)
    # "uniform" recomputes all blocks in units of `count` blocks. A plan's units are single blocks.
    if granularity == "full" and method == "uniform" and count == 1:
        return largest
    if granularity != "full" or method != "block":
        raise ValueError(
            f"recomputation '{granularity}' by '{method}' in units of {count} cannot be read: "
            "only full by block can"
        )
    return min(count, largest)


def _unrolled(layout: str) -> str:
    """Writes out the repetitions of a layout: (tt|)*2 becomes tt|tt|.

    The length is checked before the text is made, because t*9999999 could fill the memory.
    """
    layout = layout.replace(",", "").replace(" ", "")
    parts = list[str]()
    at, length = 0, 0
    while at < len(layout):
        match = _WORD.match(layout, at)
        if match is None:
            raise ValueError(
                f"{brief(layout[at:])} is not a layout: E, t, L and | can be read, m cannot"
            )
        group, times, letter, count = match.groups()
        number = int(times or count or 1)
        part = _unrolled(group) if group else letter
        length += number * len(part)
        if length > MOST_LAYERS:
            raise ValueError(
                f"'{match[0]}' has more than the {MOST_LAYERS} layers that a model may have"
            )
        parts.append(part * number)
        at = match.end()
    return "".join(parts)


MEGATRON = Format("megatron", _write, _read)
