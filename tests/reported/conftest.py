"""Tests of the reported stack (vLLM 0.16.0 + speculators 0.3.0): they run in its own environment, by `make compat-reported`."""

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_MLA_DISABLE", "1")

if importlib.util.find_spec("speculators") is None:
    collect_ignore_glob = ["test_*.py"]
