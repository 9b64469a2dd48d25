"""Patches as data: probed, applied once, undone, refused by name, armed without imports, carried by the environment."""

import importlib
import subprocess
import sys
import textwrap

import pytest

from kimi_eagle import compat
from kimi_eagle.compat import registry, source, vllm_patches
from kimi_eagle.compat.patch import Change, Patch, Verdict
from kimi_eagle.errors import BadInput, MissingCapability

TEXT = """
def greet(name):
    return "hello " + name


class Box:
    def open(self):
        return "shut"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package `kimi_fake` with `things.py`, and patches for it as the only known ones."""
    site = tmp_path / "site"
    folder = site / "kimi_fake"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "_version.py").write_text("__version__ = version = '1.2.0+cpu'\n")
    (folder / "things.py").write_text(TEXT)
    monkeypatch.syspath_prepend(site)
    known = []
    monkeypatch.setattr(registry, "patches", lambda: known)
    monkeypatch.setattr(compat, "patches", lambda: known)
    yield folder, known
    for patch in known:
        registry.undo(patch.id)
        registry._states.pop(patch.id)
    for name in [n for n in sys.modules if n.startswith("kimi_fake")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def known_digest(name):
    return compat.open_source(package="kimi_fake").find("kimi_fake.things", name).digest


def make(known, patch_id="loud", versions=">=1.0,<2", needed=True, changes=None, **more):
    digests = {known_digest("greet"): "1.2.0"}
    changes = changes or (Change("kimi_fake.things", "greet", lambda old: lambda name: old(name).upper(), digests),)
    patch = Patch(
        patch_id,
        "kimi_fake",
        versions,
        "TypeError: x",
        "greets loudly.",
        lambda own, vllm: Verdict(needed, "read."),
        changes,
        **more,
    )
    known.append(patch)
    return patch


def things():
    return importlib.import_module("kimi_fake.things")


def test_apply_twice_is_once_and_undo_puts_back(package):
    make(package[1])
    assert things().greet("a") == "hello a"
    before = things().greet
    assert compat.apply("loud").state == "applied"
    patched = things().greet
    assert compat.apply("loud").state == "applied" and things().greet is patched
    assert things().greet("a") == "HELLO A"
    assert compat.undo("loud").state == "off" and things().greet is before
    assert compat.apply("loud").state == "applied" and things().greet("a") == "HELLO A"


def test_one_changed_line_is_refused_with_package_version_and_function(package):
    folder, known = package
    make(known)
    (folder / "things.py").write_text(TEXT.replace('"hello "', '"hallo "'))
    with pytest.raises(MissingCapability, match=r"kimi_fake\.things\.greet of kimi_fake 1\.2\.0"):
        compat.apply("loud")
    assert things().greet("a") == "hallo a"
    assert compat.activate()["loud"].state == "refused"
    row = {r["id"]: r for r in compat.check()}["loud"]
    assert row["state"] == "refused" and "kimi_fake 1.2.0" in row["detail"]


def test_a_missing_function_and_an_unknown_shape_are_refused(package):
    make(package[1], changes=(Change("kimi_fake.things", "gone", lambda old: old, {"0" * 16: "0.9"}),))
    with pytest.raises(MissingCapability, match=r"has no kimi_fake\.things\.gone"):
        compat.apply("loud")
    make(package[1], "odd", needed=None)
    with pytest.raises(MissingCapability, match="read"):
        compat.apply("odd")


def test_not_needed_outside_its_versions_or_by_the_probe(package):
    make(package[1], "late", versions=">=2")
    make(package[1], "clean", needed=False)
    states = compat.activate()
    assert states["late"].state == states["clean"].state == "not needed"
    assert "1.2.0+cpu is outside" in states["late"].detail
    assert things().greet("a") == "hello a"


def test_activate_imports_nothing_and_changes_at_import(package):
    make(package[1])
    assert compat.activate()["loud"].state == "armed"
    assert "kimi_fake.things" not in sys.modules
    assert things().greet("a") == "HELLO A"
    assert registry._states["loud"].state == "applied"


def test_selection_by_environment(package, monkeypatch):
    make(package[1])
    make(package[1], "second", changes=(Change("kimi_fake.things", "extra", lambda _: 1, adds=True),))
    monkeypatch.setenv(compat.SELECTION, "off")
    assert {s.state for s in compat.activate().values()} == {"off"}
    monkeypatch.setenv(compat.SELECTION, "auto,-loud")
    assert [p.id for p in registry.selected()] == ["second"]
    monkeypatch.setenv(compat.SELECTION, "loud")
    assert [p.id for p in registry.selected()] == ["loud"]
    monkeypatch.setenv(compat.SELECTION, "lout")
    with pytest.raises(BadInput, match="no patch 'lout'"):
        registry.selected()


def test_two_patches_of_one_attribute_come_off_in_any_order(package):
    digests = {known_digest("greet"): "1.2.0"}
    make(package[1], "loud")
    more = Change("kimi_fake.things", "greet", lambda old: lambda name: old(name) + "!", digests)
    make(package[1], "keen", changes=(more,))
    before = things().greet
    compat.apply("loud")
    compat.apply("keen")
    assert things().greet("a") == "HELLO A!"
    compat.undo("loud")
    assert things().greet("a") == "hello a!"
    assert {r["id"]: r["state"] for r in compat.check()} == {"loud": "off", "keen": "applied"}
    compat.undo("keen")
    assert things().greet is before


def test_an_addition_is_taken_away_again_and_refused_where_something_is(package):
    lid = Change("kimi_fake.things", "Box.lid", lambda _: "oak", adds=True)
    taken = Change("kimi_fake.things", "Box.open", lambda _: None, adds=True)
    make(package[1], "lid", changes=(lid,))
    make(package[1], "both", changes=(Change("kimi_fake.things", "Box.hinge", lambda _: 1, adds=True), taken))
    compat.apply("lid")
    assert things().Box.lid == "oak"
    compat.undo("lid")
    assert not hasattr(things().Box, "lid")
    with pytest.raises(MissingCapability, match=r"Box\.open is there already"):
        compat.apply("both")
    assert not hasattr(things().Box, "hinge"), "a patch is made whole or not at all"


def test_someone_elses_replacement_is_not_overwritten_and_a_lost_patch_is_seen(package):
    make(package[1])
    things().greet = eval("lambda name: 'mine'")
    with pytest.raises(MissingCapability, match="replaced by someone else"):
        compat.apply("loud")
    assert things().greet("a") == "mine"
    importlib.reload(things())
    compat.apply("loud")
    things().greet = eval("lambda name: 'mine'")
    assert compat.check()[0]["state"] == "lost"


def test_a_failing_proof_is_told(package):
    def proof():
        raise AssertionError("still off by 3")

    make(package[1], proof=proof)
    compat.apply("loud")
    row = compat.check()[0]
    assert row["state"] == "failed" and "off by 3" in row["detail"] and row["pid"] > 0


def test_rows_of_workers_are_combined():
    one = [{"id": "a", "state": "applied", "detail": "", "pid": 1}]
    two = [{"id": "a", "state": "armed", "detail": "later", "pid": 2}]
    assert compat.combine([one, one])[0] == {"id": "a", "state": "applied", "pids": [1, 1], "detail": ""}
    assert compat.combine([one, two])[0]["state"] == "mixed"


def test_compat_rows_have_the_declared_keys_and_ten_or_more_patches():
    rows = compat.compat_rows()
    assert len(rows) >= 10 and len({r["id"] for r in rows}) == len(rows)
    for row in rows:
        assert {"id", "package", "versions", "symptom", "verdict", "state"} <= set(row)
        assert row["symptom"].startswith("silent: ") or row["symptom"].partition(":")[0].partition(" ")[0].endswith(
            "Error"
        )
    states = {r["id"]: r["state"] for r in rows}
    assert states["vllm-cpu-rotary"] == states["vllm-kernel-scan"] == "would apply"


def test_the_digest_sees_every_line_but_not_indentation_or_blanks_at_its_end():
    text = "def f():\n    return 1\n"
    assert source.digest(text) == source.digest(textwrap.indent(text, "    ").replace("1\n", "1  \n"))
    assert source.digest(text) != source.digest(text.replace("1", "2"))
    assert source.digest(text) != source.digest(text.replace("return", "# said\n    return"))


def test_registering_the_plugin_imports_neither_vllm_nor_torch():
    code = (
        "import sys; from kimi_eagle.compat.plugin import register; register(); register();"
        "from kimi_eagle.compat import registry; print(registry._states['vllm-cpu-rotary'].state,"
        " 'vllm' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["armed", "False", "False"]


def test_the_plugin_never_raises_and_off_leaves_everything_alone(monkeypatch, caplog):
    from kimi_eagle.compat import plugin

    monkeypatch.setenv(compat.SELECTION, "no-such-patch")
    plugin.register()
    assert "no patch 'no-such-patch'" in caplog.text
    monkeypatch.setenv(compat.SELECTION, "off")
    called = []
    monkeypatch.setattr(registry, "activate", lambda: called.append(1))
    plugin.register()
    assert not called


def test_a_changed_vllm_on_disk_is_reported_as_refused(tmp_path):
    installed = compat.open_source()
    base = tmp_path / "vllm"
    for module in (vllm_patches.ROTARY, vllm_patches.DISPATCHER):
        target = tmp_path / (module.replace(".", "/") + ".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(installed.read(installed.module_path(module)))
    (base / "__init__.py").write_text("")
    (base / "_version.py").write_text("__version__ = '0.32.0'\n")
    states = {r["id"]: r for r in compat.compat_rows(tmp_path)}
    assert states["vllm-cpu-rotary"]["state"] == "would apply"
    rotary = tmp_path / (vllm_patches.ROTARY.replace(".", "/") + ".py")
    text = rotary.read_text()
    start = text.index("def forward_cpu")
    rotary.write_text(text[:start] + text[start:].replace("return query, key", "return query, key  # edited", 1))
    row = {r["id"]: r for r in compat.compat_rows(tmp_path)}["vllm-cpu-rotary"]
    assert row["state"] == "refused"
    assert "RotaryEmbedding.forward_cpu of vllm 0.32.0" in row["reason"]


def _rows_from_child(queue):
    from kimi_eagle.compat.plugin import register

    register()
    queue.put([row for row in registry.check() if row["id"] == "loud"])


def test_a_forked_child_has_the_patch_and_answers_with_its_own_process(package):
    import multiprocessing
    import os

    make(package[1])
    compat.apply("loud")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_rows_from_child, args=(queue,))
    child.start()
    (row,) = queue.get(timeout=60)
    child.join()
    assert row["state"] == "applied" and row["pid"] == child.pid != os.getpid()


def test_the_preload_names_are_seen_during_the_call_only(monkeypatch):
    import os

    seen = []
    start = vllm_patches._without_preload(lambda self: seen.append(os.environ["LD_PRELOAD"]))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    start(None)
    assert "libtcmalloc" in seen[0] and "libiomp" in seen[0] and "LD_PRELOAD" not in os.environ
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    start(None)
    assert seen[1].startswith("mine.so ") and os.environ["LD_PRELOAD"] == "mine.so"


def test_the_experts_silu_needs_no_config_any_more():
    """vLLM 0.20 to 0.24 on a CPU: the entry made a custom op in the forward pass, which asks for a config that is not set there."""
    from enum import Enum

    import torch

    from kimi_eagle.compat import cpu_moe

    Activation = Enum("Activation", ["SILU", "GELU"])

    def in_the_forward_pass(x):
        raise AssertionError("Current vLLM config is not set.")

    table = {Activation.SILU: in_the_forward_pass, Activation.GELU: torch.abs}
    x = torch.linspace(-3, 3, 16).reshape(2, 8)
    with pytest.raises(AssertionError, match=cpu_moe.PATCH.symptom.split(": ")[1]):
        table[Activation.SILU](x)
    made = cpu_moe._plain_silu(table)
    assert torch.allclose(made[Activation.SILU](x), x[:, :4] * x[:, :4].sigmoid() * x[:, 4:], atol=1e-6)
    assert made[Activation.GELU] is torch.abs and table[Activation.SILU] is in_the_forward_pass
