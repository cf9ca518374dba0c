"""Run by the Python of an environment with JaxPP: what it makes of the order of tasks of our files.

On the command line: how many micro-batches there are, and files of Python. A line of JSON per file:
the device of each stage, what each device does in which order, and the marks. Of the first stage's
whole backward JaxPP keeps the first half, with the other one in it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from jaxpp.schedules import (  # pyright: ignore[reportMissingImports]
    preprocess_schedule_tasks,
)

LETTERS = {"FWD": "F", "BWD": "B", "BWD_I": "I", "BWD_W": "W"}


def main() -> None:
    for path in sys.argv[2:]:
        space: dict[str, Any] = {"__name__": "planned"}
        exec(compile(Path(path).read_text(), path, "exec"), space)
        schedule = space["SCHEDULE"]
        tasks = schedule.tasks(int(sys.argv[1]))
        ranks = [schedule.get_mpmd_idx(s) for s in range(schedule.num_stages)]
        rows = preprocess_schedule_tasks(tasks, 0, True)
        order = [
            [(t.stage_id, LETTERS[t.fwd_or_bwd.name], t.mubatch_idx) for t in row] for row in rows
        ]
        print(json.dumps({"ranks": ranks, "order": order, "marks": space["MARKS"]}))


main()
