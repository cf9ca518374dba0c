"""States as files: written whole, and checked when they are read."""
