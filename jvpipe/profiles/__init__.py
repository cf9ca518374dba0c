"""Profiles and operator graphs read from files."""
