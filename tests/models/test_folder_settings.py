"""A value of config.json that is null or of another type is refused with its key."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jvpipe.models.checkpoints import model_of
from jvpipe.models.folder_settings import Settings
from jvpipe.models.weight_folder import Folder
from jvpipe.models.weights import read_fields
from tests.models.test_weights import MODELS, WEIGHTS

LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
COUNT, POSITIVE = "a whole number of at least 1", "a positive number"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"vocab_size": None}, f"vocab_size None: it must be {COUNT}"),
    ("llama", {"hidden_size": "16"}, f"hidden_size '16': it must be {COUNT}"),
    ("llama", {"num_hidden_layers": 3.0}, f"num_hidden_layers 3.0: it must be {COUNT}"),
    ("llama", {"num_attention_heads": True}, f"num_attention_heads True: it must be {COUNT}"),
    ("llama", {"num_key_value_heads": 0}, f"num_key_value_heads 0: it must be {COUNT}"),
    (
        "llama",
        {"max_position_embeddings": None},
        f"max_position_embeddings None: it must be {COUNT}",
    ),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps None: it must be 0 or a positive number"),
    (
        "llama",
        {"rms_norm_eps": float("nan")},
        "rms_norm_eps nan: it must be 0 or a positive number",
    ),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false': it must be true or"),
    ("llama", {"layer_types": 5}, "layer_types 5: it must be a list"),
    ("llama", {"rope_theta": None}, f"rope_theta None: it must be {POSITIVE}"),
    ("llama", {"rope_theta": -1}, f"rope_theta -1: it must be {POSITIVE}"),
    ("llama", {"rope_theta": 10**400}, f"0: it must be {POSITIVE}"),
    ("llama", {"rope_scaling": []}, "rope_scaling []: it must be an object"),
    ("llama", {"rope_parameters": "linear"}, "rope_parameters 'linear': it must be an object"),
    ("llama", {"rope_parameters": LINEAR | {"factor": "2"}}, f"factor '2': it must be {POSITIVE}"),
    ("llama", {"rope_parameters": LINEAR | {"factor": 0}}, f"factor 0: it must be {POSITIVE}"),
    ("llama", {"rope_parameters": LINEAR | {"rope_theta": 0}}, "rope_theta 0: it must be"),
    (
        "llama",
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 4}},
        "low_freq_factor 4.0 and high_freq_factor 4.0: the second must be larger",
    ),
    ("qwen3", {"max_window_layers": -1}, "max_window_layers -1: it must be a whole number of at"),
    ("qwen3", {"use_sliding_window": None}, "use_sliding_window None: it must be true or false"),
    (
        "gemma2",
        {"attn_logit_softcapping": "2"},
        f"attn_logit_softcapping '2': it must be {POSITIVE}",
    ),
    ("gemma3_text", {"rope_parameters": {"full_attention": 1}}, "full_attention 1: it must be an"),
    ("gpt2", {"n_embd": None}, f"n_embd None: it must be {COUNT}"),
    ("gpt2", {"n_inner": "x"}, f"n_inner 'x': it must be {COUNT}"),
    ("gpt2", {"resid_pdrop": None}, "resid_pdrop None: it must be 0 or a positive number"),
    (
        "bert",
        {"max_position_embeddings": None},
        f"max_position_embeddings None: it must be {COUNT}",
    ),
    ("t5", {"num_layers": None}, f"num_layers None: it must be {COUNT}"),
    ("t5", {"d_kv": [6]}, f"d_kv [6]: it must be {COUNT}"),
]


@pytest.mark.parametrize(("name", "settings", "told"), WRONG)
def test_a_value_of_another_type_is_refused(name: str, settings: dict[str, Any], told: str) -> None:
    read = json.loads((WEIGHTS / name / "config.json").read_text()) | settings
    with pytest.raises(ValueError, match=re.escape(told)):
        read_fields(Folder(Path(), read, {}), MODELS[name].FORMAT)


def test_a_type_of_model_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has a model of type \['llama'\]: supported are"):
        model_of(Folder(Path(), {"model_type": ["llama"]}, {}))


def test_what_stands_for_a_missing_value_and_for_null() -> None:
    settings = Settings({"null": None, "given": 3})
    assert [settings.count(key, 2, null=1) for key in ("given", "none", "null")] == [3, 2, 1]
    assert settings.number("none", null=0.0) == 0
    assert settings.table("null") == settings.table("none") == {}
    with pytest.raises(KeyError, match="none"):
        settings.count("none")
