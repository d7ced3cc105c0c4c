"""People of a contact graph as rows: own features, features of sampled contacts, and whether the person falls ill.

tables: columns and files of the tables
input_tables: reads tables in chunks; keeps bad rows aside
degree: the bound on rows one person changes, and its proof
people: all people as arrays, and their features
row_steps: counts rows, makes rows unique, exchanges rows
people_stages: tables to people
sampling: which contacts fill a row
rows: settings, and the features of a row
contact_stages: contacts to rows
job: the job
"""
