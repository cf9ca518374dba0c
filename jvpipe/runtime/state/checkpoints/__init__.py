"""Checkpoints: states as files, which are written as a whole and checked when they are read."""
