"""Each break of speculators 0.3.0 on vLLM 0.16.0, with its exception: fails unpatched, passes patched, fails again undone.

The real classes of both packages are called; where a break needs a running worker, the executor is a stand-in that answers as
vLLM's worker does. The same breaks in real engines are in test_extract.py.
"""

import importlib

import pytest
import torch

from kimi_eagle import compat, tiny_kimi
from kimi_eagle.compat.speculators_probes import GENERATOR, WORKER

SYMPTOMS = {p.id: p.symptom for p in compat.patches()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_kimi.make(tmp_path_factory.mktemp("target") / "tiny-kimi"))


@pytest.fixture
def generator():
    module = importlib.import_module(GENERATOR)
    yield module
    for patch in compat.patches():
        compat.undo(patch.id)


@pytest.fixture
def worker(generator):
    return importlib.import_module(WORKER)


def three_times(patch_id, run, error, message):
    """Unpatched fails with the recorded text, patched runs, undone fails again; returns what the patched run gave."""
    with pytest.raises(error, match=message):
        run()
    assert compat.apply(patch_id).state == "applied"
    result = run()
    compat.undo(patch_id)
    with pytest.raises(error, match=message):
        run()
    return result


def config_of(generator, path, length=256):
    """What the generator's own code builds for vLLM."""
    return generator.VllmHiddenStatesGenerator._create_vllm_config(
        None, model_path=path, max_model_len=length, gpu_memory_utilization=0.5, tensor_parallel_size=1
    )


def test_tokenizer(generator, tiny):
    found = three_times(
        "spec-tokenizer", lambda: generator.AutoTokenizer.from_pretrained(tiny), ValueError, "trust_remote_code=True"
    )
    assert type(found).__name__ == "TikTokenTokenizer"


def test_scheduler_config_wants_is_encoder_decoder(generator, tiny):
    message = r"(?s)1 validation error for SchedulerConfig.*is_encoder_decoder.*Field required"
    found = three_times("spec-encoder-decoder", lambda: config_of(generator, tiny), Exception, message)
    assert found.scheduler_config.max_num_batched_tokens == 8192


def test_dtype(generator, tiny):
    compat.apply("spec-encoder-decoder")
    assert config_of(generator, tiny).model_config.dtype != torch.float32
    compat.apply("spec-dtype")
    assert config_of(generator, tiny).model_config.dtype == torch.float32
    compat.undo("spec-dtype")
    assert config_of(generator, tiny).model_config.dtype != torch.float32


def test_text_only(generator, tiny):
    for patch_id in ("spec-encoder-decoder", "spec-block-size"):
        compat.apply(patch_id)
    message = "Failed to apply MoonshotKimiVAutoProcessor"
    three_times("spec-text-only", lambda: scheduler_of(generator, config_of(generator, tiny)), ValueError, message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a GPU the call works")
def test_memory(generator):
    free, total = three_times(
        "spec-memory", lambda: generator.torch.cuda.mem_get_info(), RuntimeError, "NVIDIA driver|CUDA"
    )
    assert 0 < free <= total
    assert generator.torch.tensor([1]).item() == 1, "everything else is torch's own"


def test_kv_cache_specs(generator, tiny):
    compat.apply("spec-encoder-decoder")
    config = config_of(generator, tiny)
    three_times(
        "spec-kv-cache-specs",
        lambda: generator.get_kv_cache_config_from_groups(
            vllm_config=config, kv_cache_groups=[], kv_cache_specs={}, available_memory=1
        ),
        TypeError,
        "unexpected keyword argument 'kv_cache_specs'",
    )


def scheduler_of(generator, config):
    """The scheduler as the generator makes it, over one group of 16 blocks."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = 16
    manager = generator.StructuredOutputManager(vllm_config=config)
    return generator.Scheduler(vllm_config=config, kv_cache_config=cache, structured_output_manager=manager)


def request_of(generator, ids, name="r"):
    params = generator.SamplingParams(max_tokens=1, temperature=0.0)
    return generator.Request(
        request_id=name,
        prompt_token_ids=ids,
        sampling_params=params,
        pooling_params=None,
        eos_token_id=2,
        arrival_time=0.0,
    )


def test_scheduler_wants_a_block_size(generator, tiny):
    for patch_id in ("spec-encoder-decoder", "spec-text-only"):
        compat.apply(patch_id)
    config = config_of(generator, tiny)
    message = r"Scheduler.__init__\(\) missing 1 required positional argument: 'block_size'"
    found = three_times("spec-block-size", lambda: scheduler_of(generator, config), TypeError, message)
    assert found.block_size == 16


def test_prefix_caching(generator, tiny):
    for patch_id in ("spec-encoder-decoder", "spec-text-only", "spec-block-size"):
        compat.apply(patch_id)

    def run():
        scheduler = scheduler_of(generator, config_of(generator, tiny))
        scheduler.add_request(request_of(generator, list(range(40))))
        return scheduler.schedule()

    assert three_times("spec-prefix-caching", run, AssertionError, r"^$").total_num_scheduled_tokens == 40


class Layer(torch.nn.Module):
    def forward(self, positions, hidden_states, residual):
        return hidden_states + 1, hidden_states if residual is None else residual


def test_the_embedding_has_another_name(worker, monkeypatch):
    group = type("Group", (), {"is_first_rank": True, "is_last_rank": True, "rank_in_group": 0})()
    monkeypatch.setattr(worker, "get_pp_group", lambda: group)
    monkeypatch.setattr(worker, "get_tp_group", lambda: group)

    class LlamaModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])
            self.start_layer, self.end_layer = 0, 2
            self._extension = type("Extension", (), {"_layer_ids": frozenset(), "_store_captured_states": None})()

        def embed_input_ids(self, ids):
            return ids.float()[:, None]

        def norm(self, hidden, residual):
            return hidden + residual, None

    run = lambda: worker._patched_forward(LlamaModel(), torch.tensor([1, 2]), torch.tensor([0, 1]))  # noqa: E731
    found = three_times("spec-embedding", run, AttributeError, "has no attribute 'get_input_embeddings'")
    assert found.shape == (2, 1)


def stand_in(generator, worker):
    """A generator whose executor answers as vLLM 0.16's does: states are the token ids, one layer; two-phase steps."""
    extension = worker.HiddenStatesWorkerExtension()
    extension._layer_ids = frozenset([0])

    class Executor(generator.MultiprocExecutor):
        def __init__(self):
            self.open, self.output_rank, self.kv_output_aggregator = False, 0, None

        def collective_rpc(self, method, *args, unique_reply_rank=None, **kwargs):
            if method == "execute_model":
                if self.open:
                    raise RuntimeError(
                        "State error: sample_tokens() must be called after execute_model() returns None."
                    )
                self.open = True
                ids = [t for part in kwargs["args"][0].parts for t in part]
                extension._store_captured_states([torch.tensor(ids).float()[:, None]])
                return None
            if method == "sample_tokens":
                self.open = False
                return None
            return getattr(extension, method)(*args)

        def shutdown(self):
            """There is no worker to end."""

    class Scheduler:
        """Takes requests in order, up to the budget; a request may be cut."""

        def __init__(self, budget):
            self.budget, self.waiting = budget, {}

        def add_request(self, request):
            self.waiting[request.request_id] = list(request.prompt_token_ids)

        def finish_requests(self, names, status):
            for name in names:
                self.waiting.pop(name)

        def schedule(self):
            left, parts = self.budget, {}
            for name, ids in self.waiting.items():
                if left:
                    parts[name] = ids[:left]
                    left -= len(parts[name])
            out = type("Out", (), {})()
            out.parts, out.num_scheduled_tokens = list(parts.values()), {n: len(p) for n, p in parts.items()}
            out.total_num_scheduled_tokens = sum(out.num_scheduled_tokens.values())
            return out

    config = type("Config", (), {})()
    config.model_config = type("Model", (), {"max_model_len": 101})()
    config.scheduler_config = type("Limits", (), {"max_num_batched_tokens": 100, "max_num_seqs": 8})()
    made = object.__new__(generator.VllmHiddenStatesGenerator)
    made.vllm_config, made._request_counter = config, 0
    made.tokenizer = type("Tokenizer", (), {"eos_token_id": 2})()
    made.scheduler, made.executor = Scheduler(100), Executor()
    return made


def prompts_of(lengths):
    return [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]


def right(results, prompts):
    return [r["hidden_states"][0][:, 0].long().tolist() for r in results] == prompts


def test_one_reply_is_not_a_list(generator, worker):
    compat.apply("spec-sample-tokens")
    prompts = prompts_of([5, 7])
    found = three_times(
        "spec-single-reply",
        lambda: stand_in(generator, worker).generate(prompts),
        RuntimeError,
        "Boolean value of Tensor with more than one value is ambiguous",
    )
    assert right(found, prompts)


def test_a_second_step_needs_sample_tokens(generator, worker):
    compat.apply("spec-single-reply")
    prompts = prompts_of([5, 7])

    def twice():
        made = stand_in(generator, worker)
        made.generate(prompts)
        return made.generate(prompts)

    message = r"State error: sample_tokens\(\) must be called after execute_model\(\) returns None"
    assert right(three_times("spec-sample-tokens", twice, RuntimeError, message), prompts)


def test_a_batch_above_the_budget_is_cut_and_sliced_wrong(generator, worker):
    compat.apply("spec-single-reply")
    compat.apply("spec-sample-tokens")
    prompts = prompts_of([60, 60, 60, 1, 30])
    run = lambda: stand_in(generator, worker).generate(prompts)  # noqa: E731
    assert not right(run(), prompts)
    compat.apply("spec-whole-prompts")
    assert right(run(), prompts)
    compat.undo("spec-whole-prompts")
    assert not right(run(), prompts)


def kimi_stub():
    """An instance of vLLM's own wrapper class around its own inner class, without their `__init__`."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
    from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration

    outer, inner, bare = (
        object.__new__(c) for c in (KimiK25ForConditionalGeneration, DeepseekV2ForCausalLM, torch.nn.Module)
    )
    for module in (outer, inner, bare):
        torch.nn.Module.__init__(module)
    bare.layers = torch.nn.ModuleList([Layer() for _ in range(8)])
    inner.model = bare
    outer.language_model = inner
    outer._language_model_names = ["language_model"]
    inner.embed_input_ids = lambda ids: ids
    return outer


@pytest.mark.parametrize("patch_id", ["vllm-kimi-eagle3", "vllm-deepseek-eagle3"])
def test_supports_eagle3(generator, worker, patch_id):
    def run():
        outer = kimi_stub()
        model = outer if patch_id == "vllm-kimi-eagle3" else outer.language_model
        if not worker.supports_eagle3(model):
            raise ValueError(f"Model {type(model).__name__} does not support hidden state extraction")
        return model

    model = three_times(patch_id, run, ValueError, "does not support hidden state extraction")
    compat.apply(patch_id)
    assert model.get_eagle3_aux_hidden_state_layers() == (2, 4, 5)
    compat.apply("vllm-deepseek-eagle3")
    with pytest.raises(RuntimeError, match="hands out no auxiliary states"):
        model.set_aux_hidden_state_layers((2, 4, 5))


def test_the_wrapper_has_no_model(generator, worker):
    compat.apply("vllm-kimi-eagle3")

    def run():
        extension = worker.HiddenStatesWorkerExtension()
        extension.model_runner = type("Runner", (), {"model": kimi_stub()})()
        extension._setup_hidden_states_capture([1, 3])
        return extension.model_runner.model.language_model.model

    message = "'KimiK25ForConditionalGeneration' object has no attribute 'model'"
    assert three_times("spec-wrapper-model", run, AttributeError, message)._extension is not None


def test_every_patch_of_speculators_is_needed_here_and_every_break_is_tested():
    needed = {r["id"] for r in compat.compat_rows() if r["package"] == "speculators"}
    assert {r["verdict"] for r in compat.compat_rows() if r["package"] == "speculators"} == {"needed"}
    source = open(__file__).read()
    assert [p for p in needed if f'"{p}"' not in source] == []


def test_extraction_is_refused_where_a_patch_is_switched_off(tiny, monkeypatch):
    from kimi_eagle.errors import MissingCapability
    from kimi_eagle.extract.speculators import GeneratorHost

    monkeypatch.setenv(compat.SELECTION, "auto,-spec-whole-prompts")
    with pytest.raises(MissingCapability, match="spec-whole-prompts is off"):
        GeneratorHost(tiny)
