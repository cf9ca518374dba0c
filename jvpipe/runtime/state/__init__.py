"""What becomes of a state: moved to other devices or models, kept on disk, made again."""
