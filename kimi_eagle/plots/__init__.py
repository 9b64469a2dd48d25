"""Every figure of the notebooks, one module a subject, one style. Nothing here imports an engine."""
