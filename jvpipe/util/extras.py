"""Optional packages: if one is missing, the error names the extra of jvpipe that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ImportError, ValueError):
    """The error for a missing package of an extra; its message says how to install the package.

    It is an ImportError for programs that catch ImportError, and a ValueError for the command line,
    which shows a ValueError as a user's mistake, without a traceback.
    """


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Wraps imports that need an extra of jvpipe.

    Args:
        name: the name of the extra, such as `cli`.

    Raises:
        MissingExtraError: a package cannot be imported.

    >>> with extra("figures"):
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    jvpipe.util.extras.MissingExtraError: no_such_package is not installed: pip install 'jvpipe[figures]'
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"{missing.name} is not installed: pip install 'jvpipe[{name}]'"
        ) from missing
