"""Reports on experiments, as a page and as `summary.json`.

words: numbers and words for clients
statement: paragraphs from facts of privacy, by the templates `statement_*.jinja`
content: data of a report
summary: words for metrics; summaries of many clients; `summary.json`
plots: figures as SVG
html: the page
"""
