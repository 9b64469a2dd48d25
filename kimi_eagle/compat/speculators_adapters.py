"""What the patches of speculators put in place of the names that its generator imports: each takes the original.

Every function here has the form that a Change's `build` wants: original in, replacement out.
"""

import types

from kimi_eagle.compat.wrapper import bare_model


def trusting(original):
    """AutoTokenizer that trusts the checkpoint's code, as the generator does for configuration and model."""

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name, *args, **kwargs):
            return original.from_pretrained(name, *args, **{"trust_remote_code": True, **kwargs})

    return AutoTokenizer


def decoder_only(original):
    """SchedulerConfig with `is_encoder_decoder=False`, which vLLM 0.12 and later require and the generator does not give."""
    return lambda *args, **kwargs: original(*args, **{"is_encoder_decoder": False, **kwargs})


def no_prefix_caching(original):
    """CacheConfig without prefix caching: the generator builds no block hasher, and a cached prefix has no states."""
    return lambda *args, **kwargs: original(*args, **{"enable_prefix_caching": False, **kwargs})


def own_dtype(original):
    """ModelConfig that keeps a float32 checkpoint in float32 where the generator asks for "auto"."""

    def model_config(*args, **kwargs):
        if kwargs.get("dtype") == "auto" and checkpoint_dtype(kwargs["model"]) == "float32":
            kwargs["dtype"] = "float32"
        return original(*args, **kwargs)

    return model_config


def checkpoint_dtype(path: str) -> str:
    """The dtype that a checkpoint's config.json names, at its top or in text_config; "" where it names none."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(path)
    named = [c.get("dtype") or c.get("torch_dtype") for c in (config, config.get("text_config") or {})]
    return next((str(d).removeprefix("torch.") for d in named if d), "")


def text_only(original):
    """ModelConfig that leaves a multimodal wrapper's towers out: only text is extracted."""

    def model_config(*args, **kwargs):
        from transformers import PretrainedConfig

        config, _ = PretrainedConfig.get_config_dict(kwargs["model"])
        if "vision_config" in config and not kwargs.get("limit_mm_per_prompt"):
            chunks = config.get("use_unified_vision_chunk") or config.get("model_type") == "kimi_k25"
            kwargs["limit_mm_per_prompt"] = {"vision_chunk": 0} if chunks else {"image": 0, "video": 0}
        return original(*args, **kwargs)

    return model_config


def memory_without_cuda(original):
    """The `torch` of the generator's module, with a `cuda.mem_get_info` that answers (free, total) bytes of RAM without CUDA."""
    torch = original

    def mem_get_info(*args):
        if torch.cuda.is_available():
            return torch.cuda.mem_get_info(*args)
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    cuda = _overlay(torch.cuda, mem_get_info=mem_get_info)
    return _overlay(torch, cuda=cuda)


def _overlay(module, **names):
    """A module-like object with `names` first and everything else from `module`."""

    class Overlay(types.ModuleType):
        def __getattr__(self, name):
            return getattr(module, name)

    layer = Overlay(module.__name__)
    vars(layer).update(names)
    return layer


def without_specs(original):
    """get_kv_cache_config_from_groups that takes, and drops, the argument `kv_cache_specs` of older versions."""

    def from_groups(*args, kv_cache_specs=None, **kwargs):
        return original(*args, **kwargs)

    return from_groups


def with_block_size(original):
    """Scheduler that takes its block size from the cache configuration, where the generator gives none."""

    def scheduler(*args, vllm_config, **kwargs):
        return original(
            *args, **{"vllm_config": vllm_config, "block_size": vllm_config.cache_config.block_size, **kwargs}
        )

    return scheduler


def two_phases(original):
    """The executor, with `sample_tokens` after every `execute_model` that left its second phase open."""

    class MultiprocExecutor(original):
        def execute_model(self, scheduler_output, *args, **kwargs):
            output = super().execute_model(scheduler_output, *args, **kwargs)
            return self.sample_tokens(None) if output is None else output

    return MultiprocExecutor


def embedding(original):
    """The worker's forward, given the embeddings where the model calls their function `embed_input_ids`."""

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        if inputs_embeds is None and intermediate_tensors is None and not hasattr(self, "get_input_embeddings"):
            inputs_embeds = self.embed_input_ids(input_ids)
        return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)

    return forward


def as_list(original):
    """The executor whose single reply (`unique_reply_rank`) comes as a list of one, as the generator indexes it."""
    return lambda self: [original(self)]


def whole_prompts(original):
    """`generate` in groups that one scheduling step takes whole, so that no prompt is cut and rows follow the list."""

    def generate(self, token_ids):
        rows = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
        scheduler, limit = self.vllm_config.scheduler_config, self.vllm_config.model_config.max_model_len - 1
        lengths = [min(len(ids), limit) for ids in rows]
        results = []
        for group in whole_groups(lengths, scheduler.max_num_batched_tokens, scheduler.max_num_seqs):
            results += original(self, [rows[i] for i in group])
        for result, length in zip(results, lengths, strict=True):
            if {len(h) for h in result["hidden_states"]} != {length}:
                raise RuntimeError(
                    f"a prompt of {length} tokens came back with {len(result['hidden_states'][0])} states"
                )
        return results

    return generate


def whole_groups(lengths: list[int], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Indices 0.. in order, cut into groups of at most `max_tokens` tokens and `max_rows` prompts.

    A prompt of one token goes alone: vLLM's runner takes it for a decode and may move it in front of the others.
    """
    groups: list[list[int]] = []
    used = 0
    for index, length in enumerate(lengths):
        alone = length == 1 or (groups and lengths[groups[-1][-1]] == 1)
        if not groups or alone or used + length > max_tokens or len(groups[-1]) == max_rows:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += length
    return groups


def model_property(_):
    """`model` of a multimodal wrapper: the inner language model's, where the generator looks for the layers."""
    return property(bare_model)
