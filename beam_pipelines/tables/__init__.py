"""Reads tables of examples: CSV and Parquet, with a file for each client or with a column of clients.

columns: kinds of columns; values of a column as numbers
files: tables in a folder, in batches; numbers of lines; writing a data frame
survey: what the values of columns are, and the schema that follows
rows: checked rows of a table as arrays
users: rows grouped by client, and the stages of a job for tables with a column of clients
describe: clients, labels, columns and problems of tables in words
"""
