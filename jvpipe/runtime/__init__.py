"""Runs the task lists: controller, buffers, transfers, checkpoints."""
