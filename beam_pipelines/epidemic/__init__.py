"""Populations and outbreaks in the tables of the US/UK PETs pandemic challenge: made up, or from real contacts."""
