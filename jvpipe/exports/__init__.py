"""Plans written in the formats of other systems, and read from them: one file per format."""
