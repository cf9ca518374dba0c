"""Where layers go, and each tensor's fate: jvpipe's own search, and what all planners stand on."""
