"""Measures one thing in a process of its own; prints one JSON object.

Usage: python -m experiments.gpu.case SCALE MEASURE ARGUMENTS, such as: toy pipeline '{"fates":
"swap"}'
"""

import json
import sys

import jax

import jvpipe
from experiments.gpu.measure import MEASURES, SCALES, Found


def found(scale: str, measure: str, arguments: Found) -> Found:
    """What was measured; `{"fits": false}` if it needs more memory than there is."""
    try:
        return MEASURES[measure](SCALES[scale], **arguments)
    except Exception as error:
        if not is_of_memory(error):
            raise
        return {"fits": False}


def is_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it stands for, says that there is not enough memory."""
    if error is None:
        return False
    if isinstance(error, (jvpipe.MemoryLimitExceeded, MemoryError)):
        return True
    exhausted = isinstance(error, (jax.errors.JaxRuntimeError, jvpipe.StageError))
    told = exhausted and "RESOURCE_EXHAUSTED" in str(error)
    return told or is_of_memory(error.__cause__)


if __name__ == "__main__":
    print(json.dumps(found(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
