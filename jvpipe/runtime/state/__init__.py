"""What happens to a state between steps: it is moved to other devices or models, saved, and restored."""
