"""Plans in the words of other systems, and their layouts as plans: one file per format."""
