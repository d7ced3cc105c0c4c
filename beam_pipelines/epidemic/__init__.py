"""Writes populations (generated or real) and simulated outbreaks as tables of the US/UK PETs pandemic challenge.

table_writer: writes tables as Parquet or CSV, atomically
community: generates one community with its households, places and contacts
population: generates a population of any size
socio_patterns: writes real contacts of SocioPatterns as tables
outbreak: simulates an outbreak on contacts, day by day
sources: settings of the sources `contact_graph` and `simulated_outbreak`
"""
