"""What a target checkpoint is, read from its files alone: no vLLM, and no torch until a tensor is asked for.

A multimodal wrapper such as KimiK25ForConditionalGeneration keeps the language model's numbers in `text_config` and its
tensors under `language_model.`; `describe` unwraps both once, so that nothing else needs to know.
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import paths
from kimi_eagle.errors import BadInput, MissingCapability

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

MADE = ("smollm2", "tiny-kimi")
SUFFIXES = {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Target:
    """A target checkpoint: its folder, its text model's configuration and where its tensors are."""

    name: str
    path: Path
    architecture: str
    config: dict[str, Any] = field(repr=False)
    text_config: dict[str, Any] = field(repr=False)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the text model (N)."""
        return int(self.text_config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        return int(self.text_config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Rows V of the embedding, padding rows included."""
        return int(self.text_config["vocab_size"])

    @property
    def is_wrapper(self) -> bool:
        """True where the text model sits inside a multimodal wrapper."""
        return self.text_config is not self.config

    @property
    def is_mla(self) -> bool:
        """True where the text model has multi-head latent attention (DeepSeek-V2/V3, Kimi-K2)."""
        return bool(self.text_config.get("kv_lora_rank"))

    @property
    def num_attention_heads(self) -> int:
        """Query heads; a tensor-parallel size must divide them."""
        return int(self.text_config["num_attention_heads"])

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads (equal to the query heads where the config is silent)."""
        return int(self.text_config.get("num_key_value_heads") or self.num_attention_heads)

    @property
    def tied(self) -> bool:
        """True where lm_head is the embedding."""
        return bool(self.text_config.get("tie_word_embeddings", self.config.get("tie_word_embeddings", False)))

    @property
    def quantization(self) -> str:
        """Quantization method of the checkpoint, `none` where it has none."""
        entry = self.text_config.get("quantization_config") or self.config.get("quantization_config") or {}
        return str(entry.get("quant_method") or entry.get("quant_algo") or "none")

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name, of every tensor in the checkpoint."""
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        from safetensors import safe_open

        names: dict[str, str] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                names.update(dict.fromkeys(tensors.keys(), file.name))
        if not names:
            raise BadInput(f"target {self.name}: no *.safetensors in its folder; give a complete checkpoint.")
        return names

    def tensor_name(self, part: str) -> str:
        """Checkpoint name of `embed_tokens`, `norm` (final) or `lm_head`; a tied lm_head is the embedding.

        The shortest name with the right ending wins: a wrapper may keep other norms in its vision tower.
        """
        suffix = SUFFIXES[part]
        found = sorted(
            (n for n in self.weight_map if n == suffix or n.endswith("." + suffix)), key=lambda n: (len(n), n)
        )
        if found:
            return found[0]
        if part == "lm_head" and self.tied:
            return self.tensor_name("embed_tokens")
        raise BadInput(
            f"target {self.name}: no tensor named *{suffix} in its files, and its config does not tie the embeddings."
        )

    def load_tensor(self, part: str) -> "torch.Tensor":
        """`embed_tokens` [V, H], final `norm` [H] or `lm_head` [V, H], in the checkpoint's dtype, on the CPU."""
        from safetensors import safe_open

        name = self.tensor_name(part)
        with safe_open(self.path / self.weight_map[name], "pt") as tensors:
            return tensors.get_tensor(name)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The target's tokenizer. `trust_remote_code` always: Kimi's exists only as code in its checkpoint.

        A slow tiktoken tokenizer must stay slow: transformers 5 would convert it and shift its special ids.
        """
        from transformers import AutoTokenizer

        slow = not (self.path / "tokenizer.json").is_file()
        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=True, **({"use_fast": False} if slow else {}))

    @cached_property
    def stop_ids(self) -> set[int]:
        """Token ids that end an answer in an engine: those of the configurations and the tokenizer's own (Kimi's differ)."""
        file = self.path / "generation_config.json"
        generation = json.loads(file.read_text()) if file.is_file() else {}
        found: set[int] = {self.tokenizer.eos_token_id}
        for place in (generation, self.config, self.text_config):
            ids = place.get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
        return found - {None}

    def identity(self) -> dict[str, str]:
        """What must be equal for stored states, maps and heads to stay valid for this target."""
        return {
            "architecture": self.architecture,
            "config_sha256": _digest(json.dumps(self.config, sort_keys=True).encode()),
            "quantization": self.quantization,
            "tokenizer_sha256": self.tokenizer_sha256,
        }

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Digest over the tokenizer's files (names and bytes)."""
        parts = [n.encode() + (self.path / n).read_bytes() for n in TOKENIZER_FILES if (self.path / n).is_file()]
        return _digest(b"".join(parts))


def describe(name: str | Path) -> Target:
    """The Target that `name` stands for: `smollm2` or `tiny-kimi` (made if need be), a checkpoint folder, or a Hub name.

    Raises BadInput where there is no such folder or its config is unusable, MissingCapability where the Hub is out of reach.
    """
    text = str(name)
    if text in MADE:
        from kimi_eagle.made_targets import make

        return _from_folder(text, make(text))
    folder = paths.resolve(text)
    if folder.is_dir():
        return _from_folder(folder.name, folder)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return _from_folder(text, _from_hub(text))
    raise BadInput(
        f"target {text!r}: no such checkpoint folder; give a folder, a Hub name, or one of {', '.join(MADE)}."
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a config: itself, or the nested one of a multimodal wrapper (a dict or an object)."""
    for key in ("text_config", "language_config", "llm_config"):
        nested = config.get(key)
        if nested:
            return nested if isinstance(nested, dict) else nested.to_dict()
    return config


def _from_folder(name: str, folder: Path) -> Target:
    file = folder / "config.json"
    if not file.is_file():
        raise BadInput(f"target {name}: no config.json in its folder; give a Hugging Face checkpoint folder.")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise BadInput(f"target {name}: its config.json is not JSON ({error}).") from None
    if not isinstance(config, dict):
        raise BadInput(f"target {name}: its config.json is not a JSON object; give a Hugging Face checkpoint folder.")
    text = text_config(config)
    missing = [k for k in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads") if not text.get(k)]
    if missing:
        raise BadInput(f"target {name}: its config.json lacks {', '.join(missing)}, so it is not a language model.")
    architectures = config.get("architectures") or text.get("architectures") or ["unknown"]
    return Target(name, folder, architectures[0], config, text)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:
        raise MissingCapability(
            f"target {name}: neither in the Hub's local cache nor to be fetched from here ({type(error).__name__}); "
            "give a checkpoint folder, or fetch it where there is a network."
        ) from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
