"""Small helpers for all other folders: sizes, names, checks of users' values, optional packages."""
