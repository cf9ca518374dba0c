"""What a plan costs: the problem, a stage's bytes and seconds, the forecast of a step."""
