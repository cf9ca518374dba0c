"""Readers of the formats, after the definitions of the systems that they are of: nothing here is of
jvpipe's exports.

What each of them says of a run: which stage has which blocks, which rank has which stage, and what
each rank does in which order, as `(stage, kind, micro-batch)`.
"""

import csv
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

Action = tuple[int, str, int]
Order = list[list[Action]]


@dataclass
class Said:
    """What a file says; None for what it is not about. `again` are the blocks whose inputs alone
    are kept.
    """

    blocks: list[list[int]] | None = None
    ranks: list[int] | None = None
    order: Order | None = None
    again: set[int] | None = None
    marks: list[str] | None = None


# Orders, as the systems define them.


def one_f_one_b(ranks: int, microbatches: int) -> Order:
    """Each rank warms up by as many forwards as ranks come after it, then alternates, and
    drains.
    """
    order = []
    for rank in range(ranks):
        warm = min(ranks - rank - 1, microbatches)
        steps = [(rank, "F", m) for m in range(warm)]
        for m in range(microbatches):
            steps += [(rank, "F", m + warm)] * (m + warm < microbatches) + [(rank, "B", m)]
        order.append(steps)
    return order


def interleaved(ranks: int, chunks: int, microbatches: int) -> Order:
    """Virtual micro-batch k is of group k // (ranks x chunks), of a chunk each `ranks` of them; the
    warm-up has two more for each rank that comes after, and a group for each chunk but one.
    """
    assert microbatches % ranks == 0
    total = microbatches * chunks

    def virtual(k: int) -> tuple[int, int]:
        group, inside = divmod(k, ranks * chunks)
        return inside // ranks, group * ranks + inside % ranks

    order = []
    for rank in range(ranks):
        warm = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
        steps: list[Action] = []
        for k in range(total + warm):
            if k < total:
                chunk, m = virtual(k)
                steps.append((chunk * ranks + rank, "F", m))
            if k >= warm:
                chunk, m = virtual(k - warm)
                steps.append(((chunks - 1 - chunk) * ranks + rank, "B", m))
        order.append(steps)
    return order


def gpipe(ranks: int, microbatches: int) -> Order:
    """All forwards, then all backwards."""
    return [[(r, kind, m) for kind in "FB" for m in range(microbatches)] for r in range(ranks)]


# Formats.


def of_megatron(text: str, microbatches: int) -> Said:
    """Options of arguments.py; the layout as parse_str_to_list tells it."""
    words = shlex.split(text, comments=True)
    assert all(word.startswith("--") for word in words[::2])
    given = dict(zip(words[::2], words[1::2], strict=True))
    layout = given.pop("--pipeline-model-parallel-layout").replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout)
    stages = layout.split("|")
    assert re.fullmatch("Et*L", "".join(stages))
    assert layout.count("t") == int(given.pop("--num-layers"))
    ranks = int(given.pop("--pipeline-model-parallel-size"))
    assert len(stages) % ranks == 0
    chunks = len(stages) // ranks
    blocks, first = [], 0
    for stage in stages:
        blocks.append(list(range(first, first + stage.count("t"))))
        first += stage.count("t")
    again = set[int]()
    if given:
        assert given.pop("--recompute-granularity") == "full"
        assert given.pop("--recompute-method") == "block"
        count = int(given.pop("--recompute-num-layers"))
        again = {block for stage in blocks for block in stage[:count]}
    assert given == {}
    order = interleaved(ranks, chunks, microbatches) if chunks > 1 else None
    return Said(
        blocks,
        [s % ranks for s in range(len(stages))],
        order or one_f_one_b(ranks, microbatches),
        again,
    )


def of_torchtitan(text: str, microbatches: int) -> Said:
    """`[parallelism]` and `[activation_checkpoint]` of its configuration."""
    tables = tomllib.loads(text)
    table, mode = tables.pop("parallelism"), tables.pop("activation_checkpoint").pop("mode")
    assert tables == {}
    parts, ranks = table["module_fqns_per_model_part"], table["pipeline_parallel_degree"]
    assert "tok_embeddings" in parts[0]
    assert {"norm", "lm_head"} <= set(parts[-1])
    blocks = [[int(n.removeprefix("layers.")) for n in part if "layers." in n] for part in parts]
    others = sum(len(part) for part in parts) - sum(map(len, blocks))
    assert others == 3
    chunks, rest = divmod(len(parts), ranks)
    assert not rest
    orders = {
        "GPipe": lambda: gpipe(ranks, microbatches),
        "1F1B": lambda: one_f_one_b(ranks, microbatches),
        "Interleaved1F1B": lambda: interleaved(ranks, chunks, microbatches),
    }
    name = table["pipeline_parallel_schedule"]
    assert (chunks > 1) == (name == "Interleaved1F1B")
    again = {block for part in blocks for block in part} if mode == "full" else set[int]()
    return Said(blocks, [s % ranks for s in range(len(parts))], orders[name](), again)


def of_maxtext(text: str, microbatches: int) -> Said:
    """Fields of base.yml: equal stages, whose iterations keep what they are told to."""
    fields = yaml.safe_load(text)
    assert fields["base_config"] == "base.yml"
    stages, each = fields["ici_pipeline_parallelism"], fields["num_layers_per_pipeline_stage"]
    assert fields["num_pipeline_repeats"] == 1
    assert fields["num_pipeline_microbatches"] == microbatches
    assert microbatches % stages == 0
    assert stages * each == fields["base_num_decoder_layers"]
    blocks = [list(range(s * each, (s + 1) * each)) for s in range(stages)]
    rematerialised = fields.get("set_remat_policy_on_pipeline_iterations", True)
    assert fields["remat_policy"] in ("full", "none")
    again = set(range(stages * each)) if rematerialised else set[int]()
    return Said(blocks, list(range(stages)), gpipe(stages, microbatches), again)


def of_torch_csv(text: str, microbatches: int) -> Said:
    """A line per rank, which does one action after another; whoever receives waits for a send."""
    action = re.compile(r"(\d+)(F|I|B|W|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)")
    rows = [[action.fullmatch(cell) for cell in row] for row in csv.reader(text.splitlines())]
    rank: dict[int, int] = {}
    order: Order = []
    for r, row in enumerate(rows):
        steps = []
        for cell in row:
            assert cell
            assert rank.setdefault(int(cell[1]), r) == r
            if cell[2] in "FIBW":
                steps.append((int(cell[1]), cell[2], int(cell[3])))
        order.append(steps)
    assert sorted(rank) == list(range(len(rank)))
    _run([[(int(c[1]), c[2], c[3]) for c in row if c] for row in rows], rank, microbatches)
    return Said(ranks=[rank[s] for s in range(len(rank))], order=order)


def _run(rows: list[list[tuple[int, str, str]]], rank: dict[int, int], microbatches: int) -> None:
    """Runs the actions, whichever can be; asserts what torch's runtime does, and that none is
    left.
    """
    last, done, sums = len(rank) - 1, set[tuple[int, str, str]](), Counter[int]()
    reduced = Counter[int]()

    def arrived(stage: int, letter: str, m: str, peer: int) -> bool:
        """What a task reads is there: of a stage of its own rank, else received."""
        if rank[peer] == rank[stage]:
            return any((peer, kind, m) in done for kind in ("F" if letter == "F" else "BI"))
        return (stage, f"RECV_{letter}", m) in done

    def may(stage: int, kind: str, m: str) -> bool:
        match kind:
            case "SEND_F":
                return (stage, "F", m) in done
            case "SEND_B":
                return (stage, "B", m) in done or (stage, "I", m) in done
            case "RECV_F":
                return (stage - 1, "SEND_F", m) in done
            case "RECV_B":
                return (stage + 1, "SEND_B", m) in done
            case "F":
                return stage == 0 or arrived(stage, "F", m, stage - 1)
            case "B" | "I":
                return (stage, "F", m) in done and (
                    stage == last or arrived(stage, "B", m, stage + 1)
                )
            case "W":
                return (stage, "I", m) in done
            case _:
                return sums[stage] == microbatches

    at = [0] * len(rows)
    while moved := [r for r, row in enumerate(rows) if at[r] < len(row) and may(*row[at[r]])]:
        for r in moved:
            stage, kind, m = rows[r][at[r]]
            assert (stage, kind, m) not in done, "an action comes twice"
            done.add((stage, kind, m))
            sums[stage] += kind in "BW"
            reduced[stage] += kind == "REDUCE_GRAD"
            at[r] += 1
    assert at == [len(row) for row in rows], "ranks wait for each other"
    assert reduced == dict.fromkeys(rank, 1), "gradients are divided once"
    sends = {(s, kind[-1], m) for s, kind, m in done if kind.startswith("SEND")}
    received = {(s, kind[-1], m) for s, kind, m in done if kind.startswith("RECV")}
    assert {(s + (1 if letter == "F" else -1), letter, m) for s, letter, m in sends} == received


def of_jaxpp(text: str, microbatches: int) -> Said:
    """Runs the file, as a program of JaxPP's users would, against the few names of JaxPP that it
    takes.
    """
    kinds = {"FWD": "F", "BWD": "B", "BWD_I": "I", "BWD_W": "W"}

    @dataclass(frozen=True)
    class BaseSchedule:
        num_stages: int

        def __post_init__(self) -> None:
            object.__setattr__(self, "is_partial_bwd", False)

    api: Any = ModuleType("jaxpp.api")
    api.BaseSchedule, api.mark_stage_end = BaseSchedule, lambda value: ("the end", value)
    task = SimpleNamespace(make=lambda stage, m, kind: (stage, kinds[kind], m))
    types = SimpleNamespace(**{name: name for name in kinds})
    modules = {
        "jaxpp": SimpleNamespace(api=api),
        "jaxpp.api": api,
        "jaxpp.schedules": SimpleNamespace(Task=task),
        "jaxpp.types": SimpleNamespace(TaskType=types),
    }
    space: dict[str, Any] = {"__name__": "planned"}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        exec(compile(text, "planned.py", "exec"), space)
    schedule, mark = space["SCHEDULE"], space["mark"]
    order = schedule.tasks(microbatches)
    split = any(kind in "IW" for row in order for _, kind, _ in row)
    assert schedule.is_partial_bwd == split
    assert not (split and any(kind == "B" for row in order for _, kind, _ in row))
    ranks = [schedule.get_mpmd_idx(s) for s in range(schedule.num_stages)]
    assert all(ranks[s] == r for r, row in enumerate(order) for s, _, _ in row)
    marks = [name for name in space["MARKS"] if mark(0, name) == ("the end", 0)]
    assert mark(0, "of no layer") == 0
    return Said(ranks=ranks, order=order, marks=marks)


READERS = {
    "megatron": of_megatron,
    "torchtitan": of_torchtitan,
    "torch-csv": of_torch_csv,
    "maxtext": of_maxtext,
    "jaxpp": of_jaxpp,
}


def whole(order: Order) -> Iterator[list[Action]]:
    """An order with halves that follow each other on the first stage as one backward, which they
    are.
    """
    for row in order:
        joined: list[Action] = []
        for stage, kind, m in row:
            if (stage, kind) == (0, "W") and joined and joined[-1] == (0, "I", m):
                joined[-1] = (0, "B", m)
            else:
                joined.append((stage, kind, m))
        yield joined
