"""A package by name, because a dependency of PenguiFlow installs one called `tests`, too."""
