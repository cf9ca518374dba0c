"""jvpipe's own planner: cuts and fates chosen together."""
