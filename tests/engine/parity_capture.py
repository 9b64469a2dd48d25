"""Run vLLM with a head and save what its drafter saw and computed: `python parity_capture.py TARGET HEAD STEPS OUT DTYPE`.

A process of its own, since an engine cannot share one with the tests. Per drafting call: positions and auxiliary states of the
target's tokens, the index that is drafted from, the next token, and the logits of every draft step. vLLM loads this project's
plug-in, which repairs its CPU rotary kernel for the three-dimensional inputs of MLA.
"""

import json
import sys
from pathlib import Path

import torch

from kimi_eagle.extract.configure import cpu_mla_arguments, on_cpu


def main(target: str, head: str, steps: int, out: str, dtype: str) -> None:
    from vllm import LLM, SamplingParams

    latent = "kv_lora_rank" in json.loads((Path(target) / "config.json").read_text())
    # On a GPU the back end that takes any width: the toy's heads are narrower than those that the fast ones are built for.
    options = cpu_mla_arguments() if on_cpu() else {"attention_backend": "TRITON_MLA"}
    options = options if latent else {}
    same = {k: v for k, v in options.items() if k == "attention_backend"}
    llm = LLM(
        model=target,
        **options,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=64,
        enable_prefix_caching=False,
        speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": steps, **same},
    )
    drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    calls, logits = [], []
    propose, compute = drafter.propose, drafter.model.compute_logits

    def recorded_propose(*args, **kwargs):
        logits.clear()
        seen = {k: kwargs[k].clone() for k in ("target_positions", "target_hidden_states")}
        drafts = propose(*args, **kwargs)
        indices = kwargs["token_indices_to_sample"]
        last = len(kwargs["target_positions"]) - 1 if indices is None else int(indices[0])
        calls.append(
            {
                "positions": seen["target_positions"],
                "states": seen["target_hidden_states"],
                "last": last,
                "next": int(kwargs["next_token_ids"][0]),
                "drafts": drafts.clone(),
                "logits": torch.cat(list(logits)),
            }
        )
        return drafts

    def recorded_compute(hidden):
        found = compute(hidden)
        logits.append(found[:1].clone())
        return found

    drafter.propose, drafter.model.compute_logits = recorded_propose, recorded_compute
    prompt = list(range(7, 24))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    (result,) = llm.generate({"prompt_token_ids": prompt}, params)
    torch.save({"tokens": prompt + list(result.outputs[0].token_ids), "calls": calls}, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
