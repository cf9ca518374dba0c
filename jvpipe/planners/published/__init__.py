"""Planners of the papers, one file for each, and their helpers."""
