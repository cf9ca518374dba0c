"""The runtime of a pipeline: `engine` runs its steps, `state` handles states between steps."""
