"""The error that examples of a micro-batch depend on one another."""


class CoupledError(ValueError):
    """Examples of a micro-batch depend on one another, so replicas cannot share them out.

    Args:
        message: for the user.
        where: the layer and the equation at which examples meet; empty if no single one is known.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where

    @staticmethod
    def at(place: str, reason: str) -> "CoupledError":
        """Returns the error about one equation.

        Args:
            place: the layer that has the equation.
            reason: what the equation does, as a sentence that begins with the equation's name.
        """
        return CoupledError(
            f"{place} cannot be replicated: {reason}. Where a stage is replicated every example "
            "has to be computed by itself (batch norm, whose statistics are model state, may use "
            "those of its replica): use one device for each stage, let examples be apart, or "
            "make each stage a mesh with a batch_axis",
            where=f"{place}: {reason}",
        )
