"""The first hour on a GPU: what has to be measured there, in parts of at most ten minutes."""
