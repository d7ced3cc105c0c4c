"""Makes a row for each person: features of the person and of sampled contacts, and whether the person falls ill.

tables: columns and files of the tables
input_tables: reads tables in chunks; makes dead letters of bad rows
degree: the bound on the rows that one person can change, and its proof
people: all people as arrays, and their features
row_steps: helpers of the stages, which count, join and send rows of tables
people_stages: stages that turn tables into people
sampling: chooses the contacts in a row
rows: settings; the numbers in a row
contact_stages: stages that turn contacts into rows
job: runs the job
"""
