"""Measures 100,000 users from raw data to a server: seconds and memory of each stage.

users: raw data of many users, as LEAF's JSON
requests: a server that is started, asked and ended
run: the stages, one after another
"""
