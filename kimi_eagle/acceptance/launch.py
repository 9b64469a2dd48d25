"""How a server is told to serve a head, in one line per server."""

import json
import shlex
from pathlib import Path


def launch_line(reader: str, target: str | Path, head: str | Path, k: int = 3, attention_backend: str = "") -> str:
    """The shell line with which `reader` ("vllm", "sglang", or "speculators": a head in its format in vLLM) serves `target` with `head` drafting `k` tokens a step.

    What a draft would else take from its target is said for the draft itself: its method (vLLM guesses it from the path's
    name), that it is not quantized (SGLang), and its attention back end where one is named ("" leaves it to the server).
    """
    if reader != "sglang":
        draft = {"method": "eagle3", "model": str(head), "num_speculative_tokens": k}
        draft |= {"attention_backend": attention_backend} if attention_backend else {}
        words = ["vllm", "serve", str(target), "--trust-remote-code", "--speculative-config", json.dumps(draft)]
        return shlex.join(words)
    words = ["python", "-m", "sglang.launch_server", "--model-path", str(target), "--trust-remote-code"]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head)]
    # a chain: one candidate a step, and the token that the target itself gives counts as a draft token
    words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(k + 1), "--speculative-draft-model-quantization", "unquant"]
    words += ["--speculative-draft-attention-backend", attention_backend] if attention_backend else []
    return shlex.join(words)
