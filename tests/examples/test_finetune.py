"""The example of fine-tuning learns answers, and what it writes computes what it trained."""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.commands import here
from tests.models.test_weights import WEIGHTS

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"


def run(arguments: Any) -> None:
    runpy.run_path(str(EXAMPLE))["main"](*arguments)


@pytest.mark.thorough
def test_answers_are_learned_and_the_folder_is_changed_in_maps_of_attention(tmp_path: Path) -> None:
    base = shutil.copytree(WEIGHTS / "llama", tmp_path / "base")
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?0123456789+=")}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(base / "tokenizer.json"))
    lines = [json.dumps({"prompt": f"{i}+0=", "answer": "7"}) for i in range(10)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    files = (str(base), str(tmp_path / "lines.jsonl"), str(tmp_path / "tuned"))
    done = here(run, *files, "12", "0.1")
    assert done.returncode == 0, done.stderr
    losses = [
        float(told) for told in re.findall(r"^step \d+: loss (.*)$", done.stdout, re.MULTILINE)
    ]
    assert losses[-1] < 0.9 * losses[0]
    for file in base.glob("*.safetensors"):
        if file.name == "logits.safetensors":
            continue
        before, after = load_file(file), load_file(tmp_path / "tuned" / file.name)
        changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
        assert changed <= {name for name in before if "self_attn" in name}
    assert (tmp_path / "tuned" / "tokenizer.json").exists()
