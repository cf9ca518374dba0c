"""Messages say what is wrong with the value, and what would do: none loses a field unseen.

`python -m tests.test_messages` writes the fields of all messages to tests/messages.txt, one message
on a line, sorted, whatever file it is in. A message that loses a field, or is taken out, is then a
line of the diff that a reviewer sees.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from pathlib import Path

from tests.test_phrases import ROOT, sources

RECORD = ROOT / "tests" / "messages.txt"
OURS = {"AssertionError", "SystemExit"}
"""What is raised for a mistake of ours, or for no message at all."""
REASONS = {
    "ConnectionResetError": "the outer message names the process",
    "CoupledError": "the outer message names the stage and its batch",
    "OSError": "the outer message names the file",
    "OtherLayersError": "the outer message names the batch's shapes",
    "UnlikeError": "the outer message names the equation and its line",
    "wrong": "the method adds the file and the line or the field",
}
"""Exceptions and makers of exceptions whose text is a part of a message that has the values."""
WITHOUT_VALUE = {
    "deferred_batch_norm=True needs a loss": "the equations that differ have no names",
    "deferred_batch_norm=True, but the loss": "a flag needs another",
    "--eval-every is for one model": "two flags exclude each other",
    "--lossy is for --export": "a flag needs another",
    "--nas cannot be resumed": "two flags exclude each other",
    "--resume needs --run-dir": "a flag needs another",
    "give one of --model and --graph": "two flags exclude each other",
    "with --distributed the processes meet": "a flag excludes a group of others",
    "it holds no JSON object": "a part of a message that names the file",
    "nested too deeply": "a part of a message that names the process",
    "this YAML is nested too deeply": "the outer message names the file",
    "not an object": "a part of a message that names the process",
    "there is no such file": "a part of a message that names the model",
    "what answers there is not this version": "a part of a message that names the address",
    "what process 0 says makes no sense": "its answer may be anything, also not printable",
    "has_state needs initial_state": "the name of a member that is missing",
    "model_state is given, but": "two arguments exclude each other",
    "parameters that a function makes need": "an argument needs another",
    "sharding and batch_axis name axes": "arguments need another",
    "replicas='auto' counts devices": "two arguments exclude each other",
    "replicated stages cannot run under": "two arguments exclude each other",
    "the loss uses its rng": "an argument is missing",
    "this plan does not know its model": "what is missing has no value",
    "this run was resumed from a checkpoint": "a state, not a value",
    "this pipeline has no model yet": "a state, not a value",
    "this state belongs to another pipeline": "a state's arrays say nothing to a reader",
    "this state is being traced": "a state's arrays say nothing to a reader",
    "this state was consumed": "a state's arrays say nothing to a reader",
    "nothing is measured": "a state, not a value",
    "what a run holds is known of a model": "a state, not a value",
    "the optimizer keeps other arrays": "the state's arrays say nothing to a reader",
    "the loss, or a derivative rule in it": "what is traced has no value",
    "the weight of jvpipe.Weighted depends on": "what is traced has no value",
    "django is not installed": "the name of a package that is missing",
}
"""How messages without a field begin, and why each has none."""


@dataclass(frozen=True)
class Message:
    """What is raised by a statement: the exception, the text between fields, and the fields as the
    code has them.
    """

    place: str
    error: str
    text: str
    fields: tuple[str, ...]

    @property
    def line(self) -> str:
        """The message as a line of the record."""
        return f"{self.error}: {', '.join(sorted(self.fields)) or repr(self.text[:60])}"


def messages_of(code: str, place: str = "") -> Iterator[Message]:
    """Yields the messages that a file of code raises; a call that makes the text elsewhere is a
    field itself.
    """
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        error = ast.unparse(node.exc.func).split(".")[-1]
        texts, fields = [], []
        for argument in node.exc.args:
            parts = list(ast.walk(argument))
            found = [ast.unparse(x.value) for x in parts if isinstance(x, ast.FormattedValue)]
            is_text = isinstance(argument, ast.Constant | ast.JoinedStr)
            fields += found if is_text or found else [ast.unparse(argument)]
            texts += [x.value for x in parts if isinstance(x, ast.Constant)]
        text = "".join(text for text in texts if isinstance(text, str))
        if error not in OURS and (text or fields):
            yield Message(f"{place}:{node.lineno}", error, text, tuple(fields))


@cache
def messages() -> list[Message]:
    """Returns the messages of the whole package."""
    files = [path for path in sources() if ROOT / "examples" not in path.parents]
    return [
        message
        for path in files
        for message in messages_of(path.read_text(), path.relative_to(ROOT).as_posix())
    ]


def record() -> str:
    """Returns the record of all messages: a line each, sorted."""
    return "".join(f"{line}\n" for line in sorted(message.line for message in messages()))


def test_no_message_has_lost_a_field() -> None:
    changes = unified_diff(RECORD.read_text().splitlines(), record().splitlines(), n=0, lineterm="")
    lines = [line for line in changes if line[:2] not in ("--", "++", "@@")]
    assert not lines, "python -m tests.test_messages writes the record; look at what went\n" + (
        "\n".join(lines)
    )


def test_a_message_has_a_value_or_a_reason_to_have_none() -> None:
    bare = [message for message in messages() if not message.fields]
    assert [
        f"{message.place}: {message.text}"
        for message in bare
        if message.error not in REASONS and not message.text.startswith(tuple(WITHOUT_VALUE))
    ] == []


def test_each_reason_is_that_of_a_message() -> None:
    bare = [message for message in messages() if not message.fields]
    assert REASONS.keys() - {message.error for message in bare} == set()
    texts = [message.text for message in bare]
    assert [start for start in WITHOUT_VALUE if not any(t.startswith(start) for t in texts)] == []


def test_a_lost_field_changes_the_line_of_a_message() -> None:
    whole, bare = messages_of(
        'raise ValueError(f"{n} is too small: give {least}")\nraise ValueError("it is too small")\n'
    )
    assert whole.line == "ValueError: least, n"
    assert bare.line == "ValueError: 'it is too small'"


def test_what_a_function_makes_of_arguments_is_a_field() -> None:
    (message,) = messages_of("raise ValueError(did_you_mean('size', size, sizes))")
    assert message.fields == ("did_you_mean('size', size, sizes)",)


if __name__ == "__main__":
    Path(RECORD).write_text(record())
