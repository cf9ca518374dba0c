"""Planners: jvpipe's own search for each layer's stage and each tensor's fate, and its basis."""
