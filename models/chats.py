"""Conversations as training data. A template formats them; only the assistant's words are learned.

A template is a Jinja program that comes with a tokenizer. It turns a list of messages into one
text:

    <|user|>What is 2+3?<|end|><|assistant|>5<|end|>
                                            ~~~~~~~~  weight 1: the answer and its end mark
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from jvpipe.models.text_files import MESSAGES
from jvpipe.models.workload import Batch
from jvpipe.util.extras import extra

Message = Mapping[str, Any]
FILES = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
"""The files that hold a tokenizer's chat template and the tokens that the template names."""
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Marks around the assistant's words. Unicode reserves these characters for private use."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as a text. `spoken` has the (begin, end) of each message of the assistant."""

    text: str
    spoken: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source, and the special tokens that it may name, such as `eos_token`."""

    source: str
    tokens: Mapping[str, str]

    def rendered(self, messages: Sequence[Message]) -> Rendered:
        """Formats a conversation as one text.

        Args:
            messages: the messages, each with a `role` ("system", "user", "assistant", ...) and
                a text as `content`.

        Raises:
            ValueError: the template rejects the messages, or omits or changes what the assistant
                said.

        >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> template = ChatTemplate(source, {})
        >>> found = template.rendered([{"role": "assistant", "content": "a"}])
        >>> found.text, found.spoken
        ('<assistant>a', ((11, 12),))
        """
        _check(messages)
        # The template runs a second time with marks around the assistant's words, which show where
        # these words are in the text. But a template that inspects contents might write another
        # text because of the marks. So the second text, without the marks, must equal the first
        # one.
        text = self._text(messages)
        marked = self._text([_marked(m) if m["role"] == "assistant" else m for m in messages])
        spans, plain = [], ""
        for i, piece in enumerate(marked.split(_OPEN)):
            said, closed, after = piece.partition(_CLOSE)
            # The first piece is before all marks. Every other piece must have one closing mark.
            if bool(closed) != bool(i) or _CLOSE in after:
                break
            if i:
                spans.append((len(plain), len(plain) + len(said)))
            plain += said + after
        count = sum(m["role"] == "assistant" for m in messages)
        if plain != text or len(spans) != count:
            raise ValueError(
                f"the chat template leaves out or changes what the assistant said in {count} "
                "messages: give a template that writes these messages unchanged"
            )
        return Rendered(text, tuple(spans))

    def _text(self, messages: Sequence[Message]) -> str:
        program = self._program
        from jinja2 import TemplateError

        try:
            return program.render(messages=messages, add_generation_prompt=False, **self.tokens)
        except TemplateError as problem:
            raise ValueError(f"the chat template rejects the messages: {problem}") from problem

    @cached_property
    def _program(self) -> Any:
        """The compiled template. As in transformers, it runs in a sandbox, with few functions.

        The function `strftime_now` is missing, because records must not depend on the day. Without
        it, templates use a fixed date.
        """
        with extra("hf"):
            from jinja2 import TemplateSyntaxError, nodes
            from jinja2.exceptions import TemplateError
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """The tag `{% generation %}`, which some templates put around learned text."""

            tags = {"generation"}  # noqa: RUF012 - Jinja's base class declares it so

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body, lineno=line)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        # Jinja's filter `tojson` escapes HTML, which templates of transformers do not expect.
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as problem:
            raise ValueError(
                f"the chat template is not valid: line {problem.lineno}: {problem.message}"
            ) from problem


def read_template(folder: Path) -> ChatTemplate | None:
    """Reads the chat template beside a tokenizer; None if there is no template.

    Raises:
        ValueError: a file cannot be read, or a template in a list has no name or no text.
    """
    settings: dict[str, Any] = {}
    for name in (FILES[2], FILES[1]):
        if (folder / name).exists():
            try:
                settings |= json.loads((folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError, TypeError) as problem:
                raise ValueError(f"{folder / name} cannot be read: {problem}") from problem
    source = settings.get("chat_template")
    if isinstance(source, list):  # several templates with names
        try:
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        except (KeyError, TypeError) as problem:
            raise ValueError(
                f"{folder / FILES[1]}: each entry of the list chat_template must have a 'name' and "
                f"a 'template', unlike {str(source)[:80]}"
            ) from problem
    if (folder / FILES[0]).exists():
        source = (folder / FILES[0]).read_text(encoding="utf-8")
    if source is None:
        return None
    tokens = {}
    for name, value in settings.items():
        if name.endswith("_token") and isinstance(value, str | dict):
            tokens[name] = value["content"] if isinstance(value, dict) else value
    return ChatTemplate(source, tokens)


@dataclass(frozen=True)
class Chats:
    """A record for each conversation, truncated or padded with 0 to T tokens.

    A record [2, T] has a row of token ids, and a row with 1 for each learned id (an id that the
    loss counts) and 0 for the others. The assistant's words are learned, and so is the special
    token that ends them. A conversation is dropped if its first T tokens have no learned id.
    """

    template: ChatTemplate
    field = MESSAGES

    @property
    def name(self) -> str:
        """The name of these records in the cache, with a digest of the template and its tokens."""
        said = json.dumps([self.template.source, *sorted(self.template.tokens.items())])
        return f"chats-{hashlib.sha256(said.encode()).hexdigest()[:16]}"

    def records(
        self, documents: Sequence[str], tokenizer: Tokenizer, tokens: int
    ) -> Int32[np.ndarray, "N 2 T"]:
        """Makes the records of conversations, given as JSON.

        Raises:
            ValueError: as in `ChatTemplate.rendered`; the message quotes the beginning of the
                conversation.
        """
        rows = [self._record(document, tokenizer, tokens) for document in documents]
        learned = [row for row in rows if row[1].any()]
        return np.array(learned, np.int32).reshape(-1, 2, tokens)

    def streamed(
        self, documents: grain.IterDataset, tokenizer: Tokenizer, tokens: int
    ) -> grain.IterDataset:
        """Makes the records of a stream of conversations."""
        rows = documents.map(lambda document: self._record(document, tokenizer, tokens))
        return rows.filter(lambda row: bool(row[1].any()))

    def _record(self, document: str, tokenizer: Tokenizer, tokens: int) -> Int32[np.ndarray, "2 T"]:
        try:
            found = self.template.rendered(json.loads(document))
        except ValueError as problem:
            raise ValueError(f"in the conversation {document[:80]}...: {problem}") from problem
        # The template writes all special tokens itself, including the start mark.
        encoding = tokenizer.encode(found.text, add_special_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        record = np.zeros((2, tokens), np.int32)
        ids = encoding.ids[:tokens]
        record[0, : len(ids)] = ids
        spoken = False
        for i, (begin, end) in enumerate(encoding.offsets[: len(ids)]):
            # A special token right after the assistant's words ends them, and is learned too.
            ends = spoken and ids[i] in special
            spoken = any(begin < last and first < end for first, last in found.spoken)
            record[1, i] = spoken or ends
        return record


def learned_tokens(record: Int32[np.ndarray, "2 T"], generator: np.random.Generator) -> Batch:
    """Makes an example: `tokens`, the next tokens as `targets`, and `weights`.

    The weight of a target is 1 if the target is learned, else 0.

    >>> record = np.array([[1, 7, 8], [0, 0, 1]], np.int32)
    >>> example = learned_tokens(record, np.random.default_rng(0))
    >>> example["tokens"].tolist(), example["targets"].tolist(), example["weights"].tolist()
    ([1, 7], [7, 8], [0.0, 1.0])
    """
    ids, learned = record
    return {
        "tokens": ids[:-1],
        "targets": ids[1:],
        "weights": learned[1:].astype(np.float32),
    }


def _check(messages: Sequence[Message]) -> None:
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(
                "each item of 'messages' must have a 'role' and a text as 'content', "
                f"unlike {str(message)[:80]}"
            )
        if {_OPEN, _CLOSE} & set(content):
            raise ValueError(
                f"U+E000 and U+E001 are reserved as marks: remove them from {content[:80]!r}"
            )


def _marked(message: Message) -> Message:
    """Puts marks around a message's text, inside any white space that a template may strip."""
    content = message["content"]
    core = content.strip()
    before, after = content.split(core, 1) if core else ("", content)
    return {**message, "content": f"{before}{_OPEN}{core}{_CLOSE}{after}"}
