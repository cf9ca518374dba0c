"""Planners of the papers, and the registry that lists them beside jvpipe's own."""
