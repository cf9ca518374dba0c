"""The error that a planner raises if it finds no plan within the memory limit."""


class Infeasible(ValueError):  # noqa: N818 - planners also read it as an answer
    """The error of a planner that finds no plan within a problem's memory limit.

    Some plan would fit under a limit of `smallest_limit_bytes`.

    >>> raise Infeasible("no plan fits", smallest_limit_bytes=1024)
    Traceback (most recent call last):
    jvpipe.planners.model.infeasible.Infeasible: no plan fits
    """

    def __init__(self, message: str, smallest_limit_bytes: int) -> None:
        super().__init__(message)
        self.smallest_limit_bytes = smallest_limit_bytes
