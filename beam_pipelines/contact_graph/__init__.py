"""People of a contact graph as rows: own features, those of sampled contacts, and whether a person falls ill."""
