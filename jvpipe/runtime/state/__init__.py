"""States between steps: moved to other devices or models, saved, restored, and computed again."""
