"""The error that a planner raises if it finds no plan within the memory limit."""

from jvpipe.planners.model.problem import Decision


class Infeasible(ValueError):  # noqa: N818 - planners also read it as an answer
    """The error of a planner that finds no plan within a problem's memory limit.

    The plan that comes nearest is over the limit by `excess_bytes` at `stage`. It would fit under a
    limit of `smallest_limit_bytes`. `decision` is this nearest plan, if it is known.

    >>> raise Infeasible("no plan fits", stage=1, excess_bytes=24, smallest_limit_bytes=1024)
    Traceback (most recent call last):
    jvpipe.planners.model.infeasible.Infeasible: no plan fits
    """

    def __init__(
        self,
        message: str,
        stage: int,
        excess_bytes: int,
        smallest_limit_bytes: int,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(message)
        self.decision = decision
        self.stage = stage
        self.excess_bytes = excess_bytes
        self.smallest_limit_bytes = smallest_limit_bytes
