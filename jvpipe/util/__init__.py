"""What every room needs and no room is about: sizes, names, values as users give them, extras."""
