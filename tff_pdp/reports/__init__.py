"""Reports on experiments, as a page and as `summary.json`.

words: writes numbers, and has the words for clients
statement: makes paragraphs from facts of privacy, with the templates `statement_*.jinja`
content: data of a report
summary: words for metrics, summaries of many clients, and the content of `summary.json`
plots: figures as SVG
html: the page
"""
