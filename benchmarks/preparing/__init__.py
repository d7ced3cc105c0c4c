"""Costs of preparing and reading data, beside scripts in one process that do the same.

femnist: FEMNIST of the true size, made up; its job, once
contact_graph_run: the contact-graph job, once
polars_rows: the same by hand, in Polars
run: all sizes and engines, and a figure
client_reads: how fast a client dataset is read
"""
