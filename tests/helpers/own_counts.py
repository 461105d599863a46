"""A module of the user's that one of `planned_models` counts in."""

number = 0
