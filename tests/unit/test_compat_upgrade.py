"""What changes between two vLLM on disk, and the matrix as text."""

import json

import fake_vllm

from kimi_eagle import paths
from kimi_eagle.compat.upgrade import compare, upgrade_text
from kimi_eagle.matrix import page

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
UTILS = "vllm/v1/core/kv_cache_utils.py"
PLANNING = "vllm/v1/core/kv_cache_planning.py"
FUNCTION = "def get_kv_cache_config_from_groups(vllm_config, kv_cache_groups):\n    return 1\n"
CLASS = "class Scheduler:\n    def __init__(self, vllm_config, {extra}log_stats=False):\n        pass\n"


def pair(tmp_path):
    old = fake_vllm.write_site(tmp_path / "old", extra={SCHEDULER: CLASS.format(extra=""), UTILS: FUNCTION})
    more = {SCHEDULER: CLASS.format(extra="block_size, "), PLANNING: FUNCTION}
    return old, fake_vllm.write_site(tmp_path / "new", "0.33.0", new=True, extra=more)


def test_moved_and_changed_symbols_are_named(tmp_path):
    old, new = pair(tmp_path)
    found = {row["symbol"].rpartition("vllm.v1.core.")[2]: row for row in compare(old, new)["symbols"]}
    assert found["kv_cache_utils.get_kv_cache_config_from_groups"]["change"] == "moved"
    assert PLANNING in found["kv_cache_utils.get_kv_cache_config_from_groups"]["detail"]
    assert found["sched.scheduler.Scheduler.__init__"] == {
        "symbol": "vllm.v1.core.sched.scheduler.Scheduler.__init__", "change": "signature", "detail": "+ block_size",
    }  # fmt: skip
    text = upgrade_text(compare(old, new))
    assert "from vllm 0.16.0 to 0.33.0" in text and "kv_cache_planning.py" in text


def test_the_same_files_show_no_change(tmp_path):
    old, _ = pair(tmp_path)
    assert {row["change"] for row in compare(old, old)["symbols"]} <= {"same", "gone"}
    assert {(row["from"] == row["to"]) for row in compare(old, old)["patches"]} == {True}


def row(version, target, backend, verdict, error=None):
    return {
        "vllm": version,
        "target": target,
        "backend": backend,
        "verdict": verdict,
        "error": error,
        "sentence": f"said {backend}",
    }


def test_matrix_table_page_and_faults():
    rows = [
        row("0.16.0", "smollm2", "connector", "refused"),
        row("0.16.0", "smollm2", "hooks", "right", 3e-6),
        row("0.16.0", "tiny-kimi", "connector", "refused"),
        row("0.16.0", "tiny-kimi", "hooks", "wrong", 0.3),
    ]
    assert "| 0.16.0 | smollm2 | refused | right (3e-06) |  |" in page.table(rows)
    assert "tiny-kimi, hooks: **wrong**. said hooks" in page.page(rows)
    assert page.faults(rows) == [
        "wrong: vLLM 0.16.0, tiny-kimi, hooks: said hooks",
        "no right cell: vLLM 0.16.0, tiny-kimi",
    ]
    assert page.faults(rows[:2]) == []


def test_a_cell_is_measured_by_its_worst_row_and_never_passes_on_other_tokens_or_shapes(tmp_path):
    import torch
    from safetensors.torch import save_file

    from kimi_eagle.extract.states import FileStates
    from kimi_eagle.matrix.cell import BAR, _worst

    prompts = [[1, 2, 3], [4, 5]]
    right = {
        str(i): torch.randn(len(p), 4, 8, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(prompts)
    }
    save_file(right, tmp_path / "reference.safetensors")

    def worst(change):
        paths = {}
        for name, states in right.items():
            found = {"hidden_states": states.clone(), "token_ids": torch.tensor(prompts[int(name)])}
            change(name, found)
            paths[name] = str(tmp_path / f"{name}.safetensors")
            save_file(found, paths[name])
        return _worst(FileStates(paths), prompts, tmp_path / "reference.safetensors")

    def scale_one_row(name, found):
        if name == "1":
            found["hidden_states"][1, 2] *= 1.5

    assert worst(lambda *_: None) == 0 < BAR
    assert abs(worst(scale_one_row) - 0.5) < 1e-5
    assert worst(lambda _, f: f.update(token_ids=f["token_ids"] + 1)) == float("inf")
    assert worst(lambda _, f: f.update(hidden_states=f["hidden_states"][:, :3].contiguous())) == float("inf")


def test_a_cells_sentence_names_the_exception_and_no_folder_of_the_machine():
    from kimi_eagle.matrix.cell import _sentence

    error = RuntimeError(
        "engine ended, see /srv/someone/.cache/kimi_eagle/log.txt\nstuff\nValueError: /opt/a-b/x.py is odd"
    )
    assert _sentence(error) == "RuntimeError: engine ended, see log.txt ValueError: x.py is odd"


def test_the_readme_shows_the_matrix_as_it_is_and_no_cell_is_wrong():
    rows = json.loads((paths.REPOSITORY / "docs" / "compat" / "matrix.json").read_text())["cells"]
    readme = (paths.REPOSITORY / "README.md").read_text()
    assert page.in_readme(readme, rows) == readme
    assert page.faults(rows) == []
    assert "0.16.0" in {row["vllm"] for row in rows}, "the reported stack"
