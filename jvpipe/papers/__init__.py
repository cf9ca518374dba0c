"""Planners of the papers, one file for each,
and the registry that lists them beside jvpipe's own.
"""
