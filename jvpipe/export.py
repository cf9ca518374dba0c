"""Parameters as a file that other programs read."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from safetensors.numpy import save_file


def parameter_names(params: PyTree) -> dict[str, Any]:
    """The leaves of a pytree by their path, its parts joined by dots.

    >>> list(parameter_names({"encoder": [{"kernel": 1.0}, {"kernel": 2.0}]}))
    ['encoder.0.kernel', 'encoder.1.kernel']
    """
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def write_safetensors(path: Path, params: PyTree) -> None:
    """Writes host arrays to a `.safetensors` file, keyed by parameter path; the file appears whole or not at all."""
    arrays = {name: np.ascontiguousarray(leaf) for name, leaf in parameter_names(params).items()}
    draft = path.with_name(path.name + ".draft")
    save_file(arrays, draft)
    draft.replace(path)
