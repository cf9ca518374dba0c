"""What a layer did with a micro-batch counts from wherever its keeper counts."""

from jvpipe.ir.kinds import Kind
from jvpipe.ir.use import Use, synchronous_uses


def test_a_moved_use_takes_its_tied_versions_along_and_not_its_shift() -> None:
    use = Use(Kind.F, 2, 1, 3, tied=((0, 2), (5, 4)), shift=2)
    assert use.moved(8, 4) == Use(Kind.F, 2, 9, 7, tied=((0, 6), (5, 8)), shift=2)
    assert use.moved(8, 4).moved(-8, -4) == use


def test_a_synchronous_step_reads_one_version_and_makes_the_next() -> None:
    uses = synchronous_uses(2, 3)
    assert {use.version for use in uses if use.kind is not Kind.U} == {0}
    assert [(use.layer, use.microbatch, use.version) for use in uses if use.kind is Kind.U] == [
        (0, 2, 1),
        (1, 2, 1),
    ]
    for layer in range(2):
        for m in range(3):
            assert [use.kind for use in uses if (use.layer, use.microbatch) == (layer, m)][:2] == [
                Kind.F,
                Kind.B,
            ]
