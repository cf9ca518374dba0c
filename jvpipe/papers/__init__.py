"""Planners from published papers, and the registry that lists them beside jvpipe's own planner."""
