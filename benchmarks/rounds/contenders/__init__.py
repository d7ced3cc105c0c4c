"""One module per contender, each run as a program by the Python of its own environment."""
