"""States out of a real engine on the toy Kimi: both back ends, resume, and a verification that cannot be fooled."""

import pytest
import torch

from kimi_eagle import chat, conversations, regenerate, turns
from kimi_eagle.extract import canary, engine, loop, verify
from kimi_eagle.extract.configure import engine_config
from kimi_eagle.target import describe

pytestmark = pytest.mark.timeout(600)
KIMI = describe("tiny-kimi")
SMALL = {"max_model_len": 256, "max_batched_tokens": 256}


@pytest.fixture(scope="module")
def rows():
    """Rows of several lengths, one of them longer than a step's budget of the hooks engine, the last a conversation of two answers."""
    prompts = chat.render(KIMI, conversations.read("data/prompts.jsonl", 40), 0.5, 200)[:10]
    said = [
        ("user", "Two and two?"),
        ("assistant", "It is four."),
        ("user", "And three?"),
        ("assistant", "Then seven."),
    ]
    talk = {"id": "talk", "messages": [{"role": role, "content": content} for role, content in said]}
    given = turns.prepare(KIMI, [talk], 0.0, 200, 10).answers
    return [
        *(chat.Answer(p.prompt_id, p.prompt_id, p.split, p.token_ids, len(p.token_ids) // 2, "stop") for p in prompts),
        *given,
    ]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Starts engines in a folder of this module's own, and ends them."""
    patch = pytest.MonkeyPatch()
    patch.setenv("KIMI_EAGLE_ENGINES", str(tmp_path_factory.mktemp("e")))
    yield lambda role, **llm: engine.start(engine_config(KIMI, role, **{**SMALL, **llm}), say=lambda _: None)
    engine.down_all()
    patch.undo()


@pytest.fixture(scope="module")
def plain(engines):
    return engines("plain")


def plan_of(backend):
    return loop.plan(KIMI, [], backend=backend, dtype="float32")


@pytest.mark.parametrize("backend", ["connector", "hooks"])
def test_states_pass_every_check_through_the_wrapper(backend, rows, engines, plain, tmp_path):
    """T05, T08, T10: a multimodal wrapper around a DeepSeek-type model, in this vLLM's own engine, by both back ends."""
    plan = plan_of(backend)
    extractor = engines("extract", **plan.engine_options)
    store = loop.extract(plan, extractor, rows, tmp_path / "states")
    assert store.check() == [] and sorted(store.sample_ids) == sorted(r.sample_id for r in rows)
    talk = rows[-1]
    assert len(talk.spans) == 2 and store.row(talk.sample_id).loss_mask.tolist() == talk.loss_mask
    found = verify.verify(plan, store, plain, extractor, rows, tmp_path / "again", count=6)
    assert found["right"], found
    assert len(canary.read(store.folder).rows) == canary.ROWS
    assert max(found["hugging_face"]["relative_l2"].values()) < 1e-4
    assert found["order"]["max_relative_l2"] < 1e-5 and found["reconstruction"]["mean_abs_nats"] < 1e-3
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "states").glob("shard-*")}
    loop.extract(plan, extractor, rows, tmp_path / "states")  # all there: nothing is written again
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "states").glob("shard-*")} == before
    extractor.down()


def test_the_check_finds_a_wrong_layer(rows, engines, plain, tmp_path):
    """T05: the state before the last layer in place of the final one."""
    plan = plan_of("hooks")
    extractor = engines("extract", **plan.engine_options)
    wrong = loop.Plan(KIMI, [2, 4, 5, KIMI.num_layers - 1], "hooks", "", "float32")
    store = loop.extract(wrong, extractor, rows, tmp_path / "wrong")
    found = verify.reconstruction(KIMI, store, plain, [r.sample_id for r in rows[:4]])
    assert found["mean_abs_nats"] > 10 * verify.BARS["float32"].reconstruction
    extractor.down()


def test_without_the_rotary_patch_the_verification_fails(rows, engines, plain, tmp_path):
    """vLLM's CPU rotary kernel is wrong for MLA's layout: Hugging Face's states show it, and `require` stops the run."""
    plan = plan_of("connector")
    config = engine_config(KIMI, "extract", **SMALL, **plan.engine_options)
    config = engine.EngineConfig(
        config.role, config.target, config.llm, {**config.env, "KIMI_EAGLE_PATCHES": "vllm-kernel-scan"}
    )
    unpatched = engine.start(config, say=lambda _: None)
    store = loop.extract(plan, unpatched, rows, tmp_path / "unpatched")
    errors = verify.hugging_face(KIMI, store, [r.sample_id for r in rows[:3]])["relative_l2"]
    assert max(errors.values()) > 1e-2
    found = verify.verify(plan, store, plain, unpatched, rows, tmp_path / "again", count=3)
    assert not found["right"] and not (store.folder / canary.FILE).exists()
    with pytest.raises(verify.StageFailed, match="not the target's"):
        verify.require(found)
    unpatched.down()


def test_log_probs_from_states_equal_a_plain_softmax():
    head = verify.FinalHead(KIMI)
    states, tokens = torch.randn(5, KIMI.hidden_size), torch.tensor([1, 7, 100, 0, KIMI.vocab_size - 1])
    normed = torch.nn.functional.rms_norm(states, (KIMI.hidden_size,), head.norm, head.eps)
    expected = (normed @ head.lm_head.float().T).log_softmax(-1)[torch.arange(5), tokens]
    assert torch.allclose(head.log_probs(states, tokens), expected, atol=1e-4)


def test_other_layers_get_another_store():
    assert plan_of("hooks").key != loop.Plan(KIMI, [1, 4, 5, 8], "hooks", "", "float32").key


def test_regenerated_turns_are_the_engines_tokens_and_are_taken_as_they_are(plain, tmp_path):
    """Every answer is what the engine says to the ids before it, and reaches the rows unchanged."""
    given = [{"role": role, "content": "Two and two?"} for role in ("user", "assistant", "user")]
    talks = [{"id": "talk", "messages": given}, {"id": "other", "prompt": "Name three."}]
    made = {"target": KIMI.identity(), "answer_tokens": 6, "temperature": 0.0, "seed": 0, "reasoning": "keep"}
    out, source = tmp_path / "out.jsonl", regenerate.Source(plain.generate, 256, 2, 1)
    assert regenerate.regenerate(KIMI, talks, out, source, made) == {}
    answers = turns.prepare(KIMI, conversations.read(out), 0.0, 256, 6).answers
    assert {a.prompt_id for a in answers} == {"talk", "other"}
    for answer in answers:
        for begin, end in answer.spans:
            request = {"id": "again", "prompt_token_ids": answer.token_ids[:begin]}
            (again,) = plain.generate([request], max_tokens=6)
            assert answer.token_ids[begin:end] == again["token_ids"] and len(again["token_ids"]) > 0
