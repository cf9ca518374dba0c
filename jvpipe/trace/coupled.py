"""The error that examples of a micro-batch depend on one another."""


class CoupledError(ValueError):
    """Examples of a micro-batch depend on one another, so replicas cannot share the micro-batch.

    Args:
        message: for the user.
        where: the layer and the equation that couple examples; empty if no single equation does.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where

    @staticmethod
    def at(place: str, reason: str) -> "CoupledError":
        """Returns the error about one equation.

        Args:
            place: the layer that has the equation.
            reason: what the equation does, as a clause that begins with its name.
        """
        return CoupledError(
            f"{place} cannot be replicated: {reason}. A replicated stage must compute each example "
            "independently (only a batch norm whose statistics are model state may combine the "
            "examples of its replica): use one device for each stage, make examples independent, "
            "or make each stage a mesh with a batch_axis",
            where=f"{place}: {reason}",
        )
