"""Measures the cost of preparing and reading data, also with one-process scripts that do the same.

femnist: generates FEMNIST of the true size; runs its job once
contact_graph_run: runs the contact-graph job once
polars_rows: the contact-graph job by hand, in Polars
run: all sizes and engines, and a figure
client_reads: how fast a client dataset is read
"""
