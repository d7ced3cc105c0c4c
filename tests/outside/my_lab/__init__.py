"""Parts that an experiment takes from outside of the package."""
