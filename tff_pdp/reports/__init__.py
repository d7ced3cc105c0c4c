"""Reports: what readers see.

words: numbers and clients in words
statement: facts of privacy to paragraphs, by the templates `statement_*.jinja`
content: what a report is made of
summary: metrics in words; many clients in a line; `summary.json`
plots: figures as SVG
html: the page
"""
