"""What there is to read is counted as by hand; ten files are drawn again by the same number."""

from pathlib import Path

from experiments.reading.run import drawn, ink, share

SOURCE = '''"""A page: not counted."""

import math  # noqa: F401


class Circle:
    """Neither is this."""

    radius = 2  # in metres

    def area(self):
        # of the disc
        return self.radius

'''


def test_a_file_is_counted_as_by_hand(tmp_path: Path) -> None:
    (tmp_path / "circle.py").write_text(SOURCE)
    found = ink([tmp_path])
    # import; class; radius = 2; def; return
    assert found.code == 5
    # Module; Import, alias; ClassDef; Assign, Name, Store, Constant; FunctionDef, arguments, arg;
    # Return, Attribute, Name, Load, Load
    assert found.nodes == 16
    assert sorted(found.statements) == [1, 2, 3, 4, 5]
    assert sorted(found.body_lines) == [1, 2]  # arg; Attribute, Name
    assert found.comments == 2
    assert max(found.columns) == len("    radius = 2  # in metres")


def test_a_share_of_values_lies_below() -> None:
    assert [share([3, 1, 2, 4], part) for part in (0, 0.5, 0.9, 1)] == [1, 3, 4, 4]


def test_a_number_draws_the_same_files_again() -> None:
    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 10
