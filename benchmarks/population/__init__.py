"""100,000 users from raw data to a server: seconds and memory of each stage.

Modules in reading order:

users: raw data of many users, as LEAF's JSON
requests: a server that is started, asked and ended
run: the stages, one after another
"""
