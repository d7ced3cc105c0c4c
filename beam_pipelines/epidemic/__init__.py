"""Populations and outbreaks as tables of the US/UK PETs pandemic challenge: generated, or from real contacts.

table_writer: writes tables as Parquet or CSV, atomically
community: one community: households, places, meetings
population: a population of any size
socio_patterns: real contacts of SocioPatterns as tables
outbreak: an outbreak on contacts, day by day
sources: the sources `contact_graph` and `simulated_outbreak`
"""
