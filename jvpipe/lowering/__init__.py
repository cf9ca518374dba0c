"""Lowering: passes that turn the task lists of a schedule into rows (one program or one copy each).

step.py lists the passes in order, for steps with a flush. stream/ lowers schedules without a flush.
"""
