"""The compatibility matrix: vLLM release x target x back end, each cell extracted in that release's own environment."""
