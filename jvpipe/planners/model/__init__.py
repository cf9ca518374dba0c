"""The model that planners share: a problem, the bytes and seconds of stages, a step's forecast."""
