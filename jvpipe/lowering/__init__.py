"""Lowering: task lists become rows,
by passes of which each is a pure function of the one before.
"""
