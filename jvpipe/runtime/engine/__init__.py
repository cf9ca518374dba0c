"""Runs rows: the controller, the tensor table, the processes, and what is measured meanwhile."""
