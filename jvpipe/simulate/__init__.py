"""Predicting what a run takes, from the lists that the controller reads."""
