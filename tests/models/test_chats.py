"""Conversations are written out by a model's template, and what the assistant says in them is
learned.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as kinds

from jvpipe.models import load
from jvpipe.models.chats import Chats, ChatTemplate, read_template

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|start|>system\\nBe kind.<|end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|start|>assistant\\n' }}
        {%- generation %}{{ message.content | trim }}{{ '<|end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- elif message.role in ('user', 'system') %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}"""
TALK = [
    {"role": "user", "content": "assistant"},  # as the template itself says
    {"role": "assistant", "content": " a "},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "<|x|> c"},
]
WRITTEN = (
    "<|start|>system\nBe kind.<|end|>\n"
    "<|start|>user\nassistant<|end|>\n"
    "<|start|>assistant\na<|end|>\n"
    "<|start|>user\nb<|end|>\n"
    "<|start|>assistant\n<|x|> c<|end|>\n"
)


def characters() -> Tokenizer:
    """A token for each character, and special ones."""
    letters = sorted(set(WRITTEN) | set("0123456789+"))
    tokenizer = Tokenizer(kinds.WordLevel({c: i for i, c in enumerate(["?", *letters])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<|start|>", "<|end|>", "</s>"])
    return tokenizer


def learned(record: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The runs of tokens that are learned, as texts."""
    runs, before = [], False
    for token, weight in zip(*record.tolist(), strict=True):
        if weight:
            runs = runs if before else [*runs, ""]
            runs[-1] += tokenizer.id_to_token(token)
        before = bool(weight)
    return runs


def test_what_the_assistant_says_is_learned_with_its_end() -> None:
    template, tokenizer = ChatTemplate(CHATML, {}), characters()
    found = template.rendered(TALK)
    assert found.text == WRITTEN
    assert [found.text[a:b] for a, b in found.spoken] == ["a", "<|x|> c"]
    (record,) = Chats(template).records([json.dumps(TALK)], tokenizer, 200)
    assert learned(record, tokenizer) == ["a<|end|>", "<|x|> c<|end|>"]
    ids = record[0].tolist()
    written = tokenizer.encode(WRITTEN).ids
    assert ids == written + [0] * (200 - len(written))
    cut = Chats(template).records([json.dumps(TALK)], tokenizer, len(written) - 2)
    assert learned(cut[0], tokenizer) == ["a<|end|>", "<|x|> c"]
    assert len(Chats(template).records([json.dumps(TALK)], tokenizer, 20)) == 0


@pytest.mark.parametrize(
    ("source", "talk", "told"),
    [
        (CHATML, [{"role": "tool", "content": "1"}], "rejects the messages: unknown role tool"),
        (CHATML, [{"role": "user", "content": ["a"]}], "must have a 'role' and a text"),
        ("{{ messages[0].content | upper }}", TALK[1:2], None),
        ("{{ messages[0].content }}", TALK[1:], "leaves out or changes what the assistant said"),
        ("{% for m in messages %}", TALK, "the chat template is not valid: line 1: Unexpected end"),
        ("{{ messages.append(1) }}", TALK, "rejects the messages: .*append.* unsafe"),
    ],
)
def test_templates_that_do_not_fit_are_refused(source: str, talk: Any, told: str | None) -> None:
    template = ChatTemplate(source, {})
    if told is None:
        assert template.rendered(talk).text == " A "
        return
    with pytest.raises(ValueError, match=told) as refused:
        template.rendered(talk)
    assert "\n" not in str(refused.value)


def test_a_template_is_found_beside_the_tokenizer(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    told = {
        "eos_token": {"content": "</s>"},
        "chat_template": [{"name": "default", "template": "A"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    assert read_template(tmp_path) == ChatTemplate("A", {"eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("B")
    assert read_template(tmp_path) == ChatTemplate("B", {"eos_token": "</s>"})


@pytest.mark.parametrize("entry", [{"template": "A"}, {"name": "default"}, "A"])
def test_a_list_of_templates_without_names_is_refused(tmp_path: Path, entry: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [entry]}))
    with pytest.raises(ValueError, match=r"config\.json: each entry .* must have a 'name' and a"):
        read_template(tmp_path)


def test_files_of_conversations_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = tmp_path / "talks.jsonl"
    talks = [
        [{"role": "user", "content": f"{i}+1"}, {"role": "assistant", "content": f"{i + 1}"}]
        for i in range(60)
    ]
    lines.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    workload = load("llama", "tiny", tokens=96, vocabulary=300)
    with pytest.raises(ValueError, match=r"there is no chat template .*chat_template\.jinja"):
        workload.open_data(lines, tmp_path, 0, 4)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    characters().save(str(tmp_path / "tokenizer.json"))
    data = workload.open_data(lines, tmp_path, 0, 4)
    batch = next(data.train)
    columns = (batch[name] for name in ("tokens", "targets", "weights"))
    for ids, targets, weights in zip(*columns, strict=True):
        record = np.stack([targets, weights.astype(np.int32)])
        (answer,) = learned(record, characters())
        written = "".join(str(characters().id_to_token(i)) for i in ids.tolist())
        (asked,) = re.findall(r"user\n(\d+)\+1", written)
        assert answer == f"{int(asked) + 1}<|end|>"
    assert 0 < data.baseline_loss < 5
    with pytest.raises(ValueError, match="has no text in a field 'text', its fields are messages"):
        load("bert", "tiny").open_data(lines, tmp_path, 0, 4)
