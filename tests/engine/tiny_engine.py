"""Run one vLLM engine on the tiny Kimi checkpoint and print one JSON line; a script, so that vLLM may spawn workers.

Arguments: folder, tensor-parallel size. The environment (KIMI_EAGLE_PATCHES, VLLM_ENABLE_V1_MULTIPROCESSING) is the caller's.
"""

import json
import sys

PROMPTS = [list(range(10, 15)), list(range(300, 321)), list(range(900, 940))]

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    from kimi_eagle.extract.configure import cpu_mla_arguments
    from kimi_eagle.tiny_kimi import ENGINE_ARGUMENTS

    llm = LLM(
        sys.argv[1],
        **ENGINE_ARGUMENTS,
        **cpu_mla_arguments(),
        tensor_parallel_size=int(sys.argv[2]),
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=512,
    )
    greedy = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], greedy, use_tqdm=False)
    answer = {
        "logprobs": [[next(iter(d.values())).logprob for d in o.prompt_logprobs[1:]] for o in outputs],
        "workers": llm.collective_rpc("kimi_eagle_patches"),
    }
    print("ANSWER " + json.dumps(answer), flush=True)
