"""The progress of an engine's calls in a saved notebook."""

from kimi_eagle.extract import session


def test_a_short_call_leaves_no_line_and_a_long_one_a_bar(capsys, monkeypatch):
    progress = session.Progress("plain")
    for done in (0, 3, 8):
        progress(done, 8)
    assert capsys.readouterr().err == "" and progress.bar is None
    monkeypatch.setattr(session, "PATIENCE_S", -1.0)
    for done in (0, 3, 8):
        progress(done, 8)
    assert "8/8" in capsys.readouterr().err and progress.bar is None


def test_only_declared_parameters_reach_the_engine():
    class Cfg:
        """A stage's parameters, some of them the engine's."""

    cfg = Cfg()
    cfg.__dict__.update(dtype="bfloat16", engine_port=9000, temperature=0.3)
    assert session.options(cfg) == {"dtype": "bfloat16", "port": 9000}


def test_only_engines_own_folders_are_touched(tmp_path, monkeypatch):
    """KIMI_EAGLE_ENGINES may point to a home folder: listing engines must not clear it."""
    import os
    import time

    from kimi_eagle.extract import engine

    monkeypatch.setenv("KIMI_EAGLE_ENGINES", str(tmp_path))
    for name in ("precious", "0123456789ab", "ba9876543210"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("x")
    os.utime(tmp_path / "0123456789ab", (time.time() - 100,) * 2)  # a dead engine's; the other is being started
    assert engine.running() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ba9876543210", "precious"]
