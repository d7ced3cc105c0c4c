"""Reports: what readers see.

words: numbers and clients in words
content: what a report is made of
privacy_texts: sentences that all privacy statements share
silo_texts: sentences of the statement of silos
user_texts: sentences of the statement of users
statement: facts and sentences to statements
summary: metrics in words; many clients in a line; `summary.json`
plots: figures as SVG
html: the page
"""
