"""States as files: what is written, and how it is found whole again."""
