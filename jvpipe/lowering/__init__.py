"""Lowering: passes that turn the task lists of a schedule into rows (one program or one copy each).

Each pass depends only on the result of the pass before it.
"""
