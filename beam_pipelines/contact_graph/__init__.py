"""People of a contact graph as rows: own features, those of sampled contacts, and the label, falling ill.

tables: the tables: columns and files
input_tables: tables read in chunks; bad rows kept aside
degree: the bound on rows one person changes, and its proof
people: everybody as arrays, their rules and features
row_steps: rows counted, made unique, exchanged
people_stages: tables to people
sampling: which contacts fill a row
rows: settings, and the features of a row
contact_stages: contacts to rows
job: the job
"""
