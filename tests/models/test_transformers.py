"""transformers itself loads what we write, in an environment of its own: `make peers` makes it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jvpipe.models import bert, lora
from jvpipe.models.checkpoints import from_folder, to_folder
from tests.models.test_lora import shaken
from tests.models.test_weights import MODELS, WEIGHTS

pytestmark = pytest.mark.thorough
PYTHON = Path(__file__).resolve().parents[2] / "build" / "peers" / "transformers" / "bin" / "python"
LOGITS = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
folder, batch, into = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(folder)
model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
ids = {name: x.long() for name, x in load_file(batch).items()}
given = {"input_ids": ids.get("inputs", ids["tokens"])}
if "inputs" in ids:
    given["decoder_input_ids"] = ids["tokens"]
with torch.no_grad():
    save_file({"logits": model.eval()(**given).logits.contiguous()}, into)
"""


def logits_of_transformers(folder: Path, batch: Any) -> np.ndarray:
    """Those of the model in a folder; the test is skipped where there is no transformers."""
    if not PYTHON.exists():
        pytest.skip("no environment with transformers: make peers")
    told, into = folder.parent / "batch.safetensors", folder.parent / "logits.safetensors"
    save_file(batch, told)
    command = [str(PYTHON), "-c", LOGITS, str(folder), str(told), str(into)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(into)["logits"]


@pytest.mark.parametrize("name", MODELS)
def test_a_tuned_folder_has_our_logits(name: str, tmp_path: Path) -> None:
    """Adapters far from zero are written into float32 tensors, and the logits are those of base and
    adapters apart.
    """
    base = shutil.copytree(WEIGHTS / name, tmp_path / "base")
    batch = {k: x for k, x in load_file(base / "logits.safetensors").items() if k != "logits"}
    (base / "logits.safetensors").unlink()
    for file in base.glob("*.safetensors"):
        save_file(
            {k: x.astype(np.float32) for k, x in load_file(file).items()}, file, {"format": "pt"}
        )
    workload, params = from_folder(base, jax.random.key(0), lora=2, dropout=0.0)
    held = jax.tree.map(np.asarray, params)
    params = lora.joined_params(lora.without_adapters(held), shaken(lora.adapters_alone(held)))
    to_folder(workload, params, like=base, into=tmp_path / "tuned")
    everywhere = {"positions": np.tile(np.arange(12), (2, 1))} if MODELS[name] is bert else {}
    logits = MODELS[name].logits_function(workload.config)
    ours = logits(*jax.tree.map(jnp.asarray, (params, batch | everywhere)), None)
    theirs = logits_of_transformers(tmp_path / "tuned", batch)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert np.abs(theirs - logits_of_transformers(base, batch)).max() > 1e-3
