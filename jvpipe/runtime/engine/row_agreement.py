"""Makes processes compare the rows that each of them has lowered, before any of these rows runs.

If a process asks for an array that no other process sends, it waits forever. Rows may differ, for
example because a process has another version of a library. Then an error must come before any row.
"""

from collections.abc import Iterable

from jvpipe.ir.rows import Row
from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.compiled_plan import CompiledPlan


def agree_on_rows(
    compiled: CompiledPlan,
    name: str = "the rows that processes run",
    changes: Iterable[Bound] = (),
) -> None:
    """Makes sure that all processes have lowered a plan to the same rows (programs and copies).

    The rows of evaluations are not compared. A comparison needs all processes at the same time, but
    each process binds these rows again when it begins to run layers in groups, at its own time.

    Args:
        compiled: the plan.
        name: names the compared rows in the message.
        changes: the rows of the change to this plan, if there is one.

    Raises:
        Disagreement: some rows differ.
    """
    if compiled.hosts is None:
        return
    parts: list[tuple[str, str]] = []
    for i, bound in enumerate((*compiled.bounds, *changes)):
        text = "\n".join(map(_in_words, bound.whole))
        parts.append((f"rows {i}", text))
    compiled.hosts.agree(name, parts)


def _in_words(row: Row) -> str:
    """Returns a row with its place and buffers as a text, for processes to compare."""
    return f"{row} {row.place} {row.reads} {row.writes} {row.frees}"
