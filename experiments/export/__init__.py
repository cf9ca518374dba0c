"""Plans in the words of other systems, and their default layouts beside ours."""
