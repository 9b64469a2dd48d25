"""What a notebook, and the runner around it, need: parameters, the stage object, provenance, reports."""

from kimi_eagle.notebook.stage import Stage, begin

__all__ = ["Stage", "begin"]
