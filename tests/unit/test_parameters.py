"""Declared parameters are read from notebooks, and a parameter file is held against them before anything runs."""

import re
from pathlib import Path

import pytest
import toy_notebooks

from kimi_eagle.errors import BadInput
from kimi_eagle.notebook import parameters


@pytest.fixture
def notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "notebooks"
    monkeypatch.setenv("KIMI_EAGLE_NOTEBOOKS", str(folder))
    toy_notebooks.pair(folder)
    return folder


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    return file


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(BadInput) as caught:
        parameters.validate(parameters.load(written(tmp_path, text)), parameters.declared_everywhere(), "p.yaml")
    message = str(caught.value)
    assert ("\n" not in message and message.endswith(".")) or message.endswith("?")
    return message


def test_declared_reads_default_meaning_and_order(notebooks: Path) -> None:
    found = parameters.declared("00_make")
    assert list(found) == ["target", "run", "seed", "count", "rate", "sizes"]
    assert (found["rate"].default, found["rate"].meaning) == (0.5, "a share (1)")


def test_everywhere_lists_the_notebooks_of_a_shared_name(notebooks: Path) -> None:
    found = parameters.declared_everywhere()
    assert found["seed"].notebooks == ("00_make", "01_draw")
    assert found["width"].notebooks == ("01_draw",)


def test_one_name_with_two_defaults_is_refused(notebooks: Path) -> None:
    toy_notebooks.write(notebooks, "02_more", ["count = 4  # other default"], [])
    with pytest.raises(BadInput, match="count: default 3 in 00_make and 4 in 02_more"):
        parameters.declared_everywhere()


@pytest.mark.parametrize(
    "line", ["a: int = 3", "a, b = 1, 2", "a = 2 * 3", "import os", "a = None", "a = {'x': 1}", "seed = 4"]
)
def test_cells_with_anything_but_one_new_literal_a_line_are_refused(notebooks: Path, line: str) -> None:
    toy_notebooks.write(notebooks, "02_more", [line], [])
    with pytest.raises(BadInput, match="line 4 of its parameters cell"):
        parameters.declared("02_more")


def test_a_second_tagged_cell_is_refused(notebooks: Path) -> None:
    import nbformat

    path = notebooks / "00_make.ipynb"
    book = nbformat.read(path, as_version=4)
    book.cells.append(nbformat.v4.new_code_cell("count = 9", metadata={"tags": ["parameters"]}))
    nbformat.write(book, path)
    with pytest.raises(BadInput, match="2 cells are tagged"):
        parameters.declared("00_make")


def test_good_values_pass_and_integers_become_floats(notebooks: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "count: 7\nrate: 1\nsizes: [4]\nwidth: 1.0e-4\nrun: again\n")
    values = parameters.validate(parameters.load(file), parameters.declared_everywhere(), "p.yaml")
    assert values == {"count": 7, "rate": 1.0, "sizes": [4], "width": 1e-4, "run": "again"}
    assert isinstance(values["rate"], float)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuont: 3", "cuont.*did you mean count"),
        ("zzzz: 3", "no notebook declares.*kimi-eagle params"),
        ("rate: 1e-4", r"write 1\.0e-4"),
        ("rate: 1E5", r"write 1\.0e\+5"),
        ("rate: '0.5'", "write 0.5 without quotes"),
        ("rate: high", "the text 'high' but must be a number"),
        ("count: 2.5", "count is a number 2.5 but must be an integer"),
        ("count: true", "count is true/false True but must be an integer"),
        ("target: 7", 'put quotes around it: "7"'),
        ("count:", "count has no value"),
        ("rate: .nan", "give a finite number"),
        ("sizes: 3", "sizes is an integer 3 but must be a list"),
        ("sizes: [1, x]", r"sizes\[1\] is the text 'x'"),
        ("sizes: [1, [2]]", r"sizes\[1\] is a list"),
        ("count: 1\ncount: 2", "line 2: the key count is written twice"),
        ("- count", "holds a list where"),
        ("", "holds nothing where"),
        ("count: [1", "line"),
        ("7: 3", "the key 7 is not a text"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(notebooks: Path, tmp_path: Path, text: str, words: str) -> None:
    assert re.search(words, refused(tmp_path, text))


@pytest.mark.parametrize(
    "text", ["hf_token: abc", "apiKey: abc", "wandb_api_key: abc", "password: abc", "target: hf_ABCDEFGHIJKLMNOPQRSTUV"]
)
def test_secrets_are_refused_and_not_repeated(notebooks: Path, tmp_path: Path, text: str) -> None:
    message = refused(tmp_path, text)
    assert "looks like a secret" in message and text.split(": ")[1] not in message


@pytest.mark.parametrize("name", ["answer_tokens", "row_tokens", "keys_per_row", "tokenizer", "monkey"])
def test_counts_of_tokens_are_no_secrets(name: str) -> None:
    assert not parameters.looks_secret(name)


def test_a_missing_file_names_those_that_there_are(notebooks: Path, tmp_path: Path) -> None:
    written(tmp_path, "count: 1")
    with pytest.raises(BadInput, match=r"q\.yaml: no such parameter file.*p\.yaml"):
        parameters.load(tmp_path / "q.yaml")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b"])
def test_run_names_that_would_leave_outputs_are_refused(name: str) -> None:
    with pytest.raises(BadInput):
        parameters.check_run_name(name)


def test_the_choices_that_preflight_knows_are_those_of_the_modules_that_read_them():
    from typing import get_args

    from kimi_eagle.eagle3.loss import LOSSES
    from kimi_eagle.extract.backends import ORDER
    from kimi_eagle.notebook import preflight
    from kimi_eagle.training.settings import TrainConfig

    def literal(field):
        return get_args(TrainConfig.model_fields[field].annotation)

    assert set(preflight.CHOICES["loss"]) == set(LOSSES)
    assert preflight.CHOICES["extract_backend"] == ("auto", *ORDER)
    assert preflight.CHOICES["head_attention"] == literal("head_attention")
    assert preflight.CHOICES["initial_weights"] == literal("initial")
    assert preflight.CHOICES["parallel"] == literal("parallel")
    assert preflight.CHOICES["head_dtype"] == literal("head_dtype")
    known = parameters.declared_everywhere()
    assert {*preflight.CHOICES, *preflight.RANGES} <= set(known)
    assert len(preflight.STAGES) == len(parameters.stages())


@pytest.mark.parametrize(("name", "value", "words"), [
    ("loss", "kll", "did you mean kl"),
    ("dtype", "float99", "use one of float32"),
    ("extract_backend", "magic", "use one of auto"),
    ("tensor_parallel", 0, "give 1 or more"),
    ("held_out_fraction", 7.0, "give from 0 to 0.9"),
    ("max_prompts", -5, "give 0 or more"),
    ("expected_minutes", [], "give 6 numbers"),
])  # fmt: skip
def test_a_value_that_would_fail_hours_later_is_refused_at_once(name, value, words):
    from kimi_eagle.notebook import preflight

    with pytest.raises(BadInput, match=words):
        preflight.check({name: value})
