"""The command lines behind `python -m jvpipe.train` and `python -m jvpipe.plan`."""
