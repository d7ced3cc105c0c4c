"""Reports on experiments, as a page and as `summary.json`.

words: formats numbers, and names clients: silos or users
statement: builds the privacy statement from facts, with the templates `statement_*.jinja`
content: the data that a report shows
summary: words for metrics, summaries of many clients, and the content of `summary.json`
advice: what a reader may try next, and what that costs
plots: figures as SVG
html: the report as an HTML page
"""
