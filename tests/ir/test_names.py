"""Names that a user gave and that we do not know."""

from jvpipe.util.names import did_you_mean


def test_a_name_that_is_close_is_offered() -> None:
    assert did_you_mean("planner", "torchgpip", ["even", "torchgpipe"]) == (
        "unknown planner 'torchgpip': did you mean 'torchgpipe'? There are even, torchgpipe"
    )


def test_else_all_names_are_listed() -> None:
    assert did_you_mean("planner", "magic", ["even", "torchgpipe"]) == (
        "unknown planner 'magic': There are even, torchgpipe"
    )
