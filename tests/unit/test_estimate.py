"""The estimate is arithmetic on parameters and configuration: held against the figures that are known."""

import ast
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_eagle import estimate, paths
from kimi_eagle.errors import BadInput
from kimi_eagle.notebook import parameters


def values(name: str) -> dict:
    known = parameters.declared_everywhere()
    given = parameters.validate(parameters.load(paths.REPOSITORY / "params" / name), known, name)
    return {key: given.get(key, parameter.default) for key, parameter in known.items()}


def test_kimis_states_take_what_arithmetic_says() -> None:
    found = estimate.estimate(values("kimi_k2.5_8gpu.yaml"))
    assert abs(found["bytes_per_token"] / (4 * 7168 * 2) - 1) < 0.01
    assert found["states_gb"] == pytest.approx(found["tokens"] * found["bytes_per_token"] / 1e9)
    assert found["states_gb"] == pytest.approx(found["tokens"] * 57_344 / 1e9, rel=0.01)
    assert found["tokens_that_fit"] == pytest.approx(found["disk_free_gb"] * 1e9 / 57_344, rel=0.01)


def test_kimis_head_is_its_matrices() -> None:
    """fc 3 x 7168 x 7168; MLA on 2 x 7168: q 1536 deep, 64 heads of 192, latent 512 + 64, values of 128; MLP of 18432; 32768 rows."""
    q, kv = 2 * 7168 * 1536 + 1536 * 64 * 192, 2 * 7168 * (512 + 64) + 512 * 64 * (128 + 128)
    expected = 3 * 7168 * 7168 + q + kv + 64 * 128 * 7168 + 3 * 7168 * 18432 + 32768 * 7168
    found = estimate.estimate(values("kimi_k2.5_8gpu.yaml"))
    assert found["head_parameters"] == expected and found["head_gb"] == pytest.approx(2 * expected / 1e9)


def test_loads_are_those_of_the_notebooks() -> None:
    """The engines that cells open, and in which order they use them: a change of engine is a load where one fits at a time."""
    for stage, declared in estimate.ENGINES.items():
        (book,) = (paths.REPOSITORY / "notebooks").glob(f"{stage}_*.ipynb")
        cells = [c for c in json.loads(book.read_text())["cells"] if c["cell_type"] == "code"]
        text = "\n".join("".join(c["source"]) for c in cells)
        if stage in ("00", "01"):  # one function opens its engines and ends them
            assert (
                text.count({"00": "serving.known_answer(", "01": "capture.capture_all("}[stage]) == len(declared) == 1
            )
            continue
        assert "known_answer(" not in text and "capture_all(" not in text
        tree, opened = ast.parse(text), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("session."):
                call = ast.unparse(node.value)
                if call.startswith(("session.open_engine", "session.start")):
                    opened[node.targets[0].id] = next(
                        (r for r in ("plain", "extract") if f"'{r}'" in call), "speculative"
                    )
        assert text.count("session.open_engine(") + text.count("session.start(") == len(opened) == len(declared)
        names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in opened]
        used = [opened[n.id] for n in sorted(names, key=lambda n: (n.lineno, n.col_offset))]
        assert [role for role, _ in itertools.groupby(used)] == [*declared, *estimate.CALLED_AGAIN.get(stage, ())]


def test_loads_where_one_engine_fits_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi's file: one in 00 and 01, four in 02, and three and two for each of three concurrencies in 05, of 27 minutes each."""
    monkeypatch.setenv("KIMI_EAGLE_OUTPUTS", str(tmp_path))
    given = values("kimi_k2.5_8gpu.yaml")
    found = estimate.estimate(given)
    assert found["engine_loads"] == {"00": 1, "01": 1, "02": 4, "03": 0, "04": 0, "05": 9}
    assert "15 in all (27 minutes each, 405 in all)" in estimate.text(found)
    apart = estimate.engine_loads(given | {"engines_together": True, "profile_graphs": [True, False]})
    assert apart == {"00": 1, "01": 2, "02": 2, "03": 0, "04": 0, "05": 3}


def test_hours_are_those_of_an_earlier_run_of_the_same_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_EAGLE_OUTPUTS", str(tmp_path))
    given = values("smollm2_cpu.yaml")
    nothing = estimate.estimate(given)
    assert nothing["extraction_hours"] is nothing["load_minutes"] is None
    assert "no rate measured yet" in estimate.text(nothing) and "no load timed yet" in estimate.text(nothing)

    def run(name: str, speed: object, age: float, **changed: object) -> None:
        store = tmp_path / name / "02_extract_hidden_states" / "states" / "key" / "train"
        store.mkdir(parents=True)
        (tmp_path / name / "logs").mkdir()
        (tmp_path / name / "logs" / "02.log").write_text("engine 9b7ac5ec488e: ready after 90 s\nengine is ready\n")
        manifest = {"target": {"name": "smollm2"}, "hidden_size": 576, "dtype": "float32"} | changed
        (store / "manifest.json").write_text(json.dumps(manifest))
        (store / "speed.json").write_text(json.dumps(speed))
        os.utime(store / "speed.json", (age, age))

    run("old", {"tokens_per_second": 5.0}, 1e9)
    run("new", {"tokens_per_second": 100.0}, 2e9)
    run("other-target", {"tokens_per_second": 7.0}, 3e9, target={"name": "tiny-kimi"})
    run("other-dtype", {"tokens_per_second": 7.0}, 3e9, dtype="bfloat16")
    run("other-width", {"tokens_per_second": 7.0}, 3e9, hidden_size=64)
    run("torn", [], 3e9)
    found = estimate.estimate(given)
    assert found["tokens_per_second"] == 100 and found["load_minutes"] == 1.5
    assert found["extraction_hours"] == pytest.approx(found["tokens"] / 100 / 3600)
    assert "hours at 100 tokens/s" in estimate.text(found)


def test_the_head_has_the_size_of_its_matrices(tmp_path: Path) -> None:
    """SmolLM2, Llama head: fc 3HxH, attention on 2H, MLP 3xHxI, lm_head over 8192 rows (norms are not counted)."""
    h, wide = 576, 1536
    attention = 2 * h * 64 * (9 + 2 * 3) + 9 * 64 * h
    expected = 3 * h * h + attention + 3 * h * wide + 8192 * h
    assert estimate.estimate(values("smollm2_cpu.yaml"))["head_parameters"] == expected


def test_the_known_configuration_of_smollm2_is_the_made_ones() -> None:
    folder = paths.cache() / "targets" / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip("the target is not made here; the demo makes it")
    made = json.loads((folder / "config.json").read_text())
    assert {key: made[key] for key in estimate.SMOLLM2} == estimate.SMOLLM2


def test_more_than_the_disk_holds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "free_bytes", lambda: 1000)
    found = estimate.estimate(values("smollm2_cpu.yaml"))
    assert not found["fits"] and "DOES NOT FIT" in estimate.text(found)


@pytest.mark.parametrize("name", ["nobody/nothing", "./nowhere"])
def test_a_target_that_nothing_here_describes_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="no configuration"):
        estimate.configuration(name)


def test_a_wrapper_is_unwrapped(tmp_path: Path) -> None:
    text = {"hidden_size": 7, "num_hidden_layers": 2, "vocab_size": 9, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert estimate.configuration(str(tmp_path)) == text
    for broken in ("{}", "[]", "no"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(BadInput, match=r"config\.json"):
            estimate.configuration(str(tmp_path))


def test_it_answers_without_torch_and_vllm() -> None:
    code = (
        "import sys\nsys.argv = ['kimi-eagle', 'estimate', 'params/kimi_k2.5_8gpu.yaml']\n"
        "from kimi_eagle import cli\ntry:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and "bytes per token" in done.stdout, done.stderr
