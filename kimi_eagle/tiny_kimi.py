"""A random Kimi-K2.5 checkpoint at toy size: the real structure, names and traps, 35 MB instead of 551 GB.

Text of a random model is noise; what it is good for is every step that depends on the *structure*: the multimodal wrapper
around a DeepSeek-V3 text model, multi-head latent attention, sigmoid routing with a correction bias, a tokenizer that only
`trust_remote_code` loads. Weights live under `language_model.` with one tensor per expert, as the real checkpoint has them.
There are no vision weights: vLLM leaves the tower out with `limit_mm_per_prompt={"vision_chunk": 0}` (`ENGINE_ARGUMENTS`).
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from kimi_eagle.errors import BadInput

FILES = Path(__file__).parent / "tiny_kimi_files"
MANIFEST = "kimi_eagle.json"
RECIPE = 1  # raise when the same seed would give other weights
RANKS = 1792  # byte sequences in tiktoken.model; the 256 special ids follow
VOCABULARY = RANKS + 256

# What vLLM needs beside the folder: text only, remote code for the tokenizer, and no half precision on a CPU.
ENGINE_ARGUMENTS = {"trust_remote_code": True, "limit_mm_per_prompt": {"vision_chunk": 0}, "dtype": "float32"}

# Kimi-K2.5's own values where they decide code paths (latent rank 512 and rope 64 are what vLLM's CPU MLA asks for, sigmoid
# noaux_tc routing, one dense layer first, one shared expert); widths and counts are made small. Plain RoPE over 4,096
# positions: the real one adds YaRN x64 on top, which vLLM computes by another class.
TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": RANKS,
    "dtype": "float32",
    "eos_token_id": RANKS + 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.05,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "pad_token_id": RANKS + 255,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 64,
    "vocab_size": VOCABULARY,
}

# The tower is described and not built. Names of the hub's schema and those of vLLM 0.16's own configuration class.
VISION = {
    "hidden_size": 64,
    "init_pos_emb_height": 8,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 8,
    "intermediate_size": 128,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": 64,
    "mm_projector_type": "patchmerger",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": TEXT["hidden_size"],
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 1,
}

CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": RANKS,
    "dtype": "float32",
    "eos_token_id": RANKS + 1,
    "ignore_index": -100,
    "image_token_id": RANKS + 21,
    "media_placeholder_token_id": RANKS + 21,
    "model_type": "kimi_k25",
    "pad_token_id": RANKS + 255,
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": VISION,
}

# The tokenizer stops at [EOS] and the generation configuration at <|im_end|>: the disagreement is Kimi's own.
GENERATION = {"bos_token_id": RANKS, "eos_token_id": RANKS + 2, "pad_token_id": RANKS + 255}

TOKENIZER = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "clean_up_tokenization_spaces": False,
    "eos_token": "[EOS]",
    "model_max_length": 4096,
    "pad_token": "[PAD]",
    "tokenizer_class": "TikTokenTokenizer",
    "unk_token": "[UNK]",
}

IMAGES = {
    "auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"},
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 1024,
        "in_patch_limit_each_frame": 256,
        "in_patch_limit_video": 1024,
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 64,
        "patch_size": 14,
        "temporal_merge_kernel_size": 4,
    },
}


def make(folder: str | os.PathLike, seed: int = 0) -> Path:
    """Write the checkpoint to `folder` (created; atomic) and return its path; an equal one that is there is kept.

    Raises BadInput where the folder holds something else.
    """
    folder = Path(folder)
    manifest = {"kind": "tiny-kimi", "recipe": RECIPE, "seed": int(seed)}
    if folder.exists():
        return _kept(folder, manifest)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name in ("tokenization_kimi.py", "configuration_kimi_k25.py", "kimi_k25_vision_processing.py",
                     "chat_template.jinja", "tiktoken.model"):  # fmt: skip
            shutil.copyfile(FILES / name, building / name)
        for name, content in (("config", CONFIG), ("generation_config", GENERATION), ("tokenizer_config", TOKENIZER),
                              ("preprocessor_config", IMAGES)):  # fmt: skip
            (building / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        _write_weights(building, seed)
        (building / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        building.chmod(0o755)
        building.rename(folder)
    except OSError:
        if not folder.exists():  # another process may have been first: its checkpoint is as good
            raise
        return _kept(folder, manifest)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def text_model(folder: str | os.PathLike):
    """The text model in Hugging Face's own class (DeepseekV3ForCausalLM, float32, eval), to compare engines with."""
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3ForCausalLM

    folder = Path(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    with tempfile.TemporaryDirectory() as plain:
        # A plain folder without the prefix, so that transformers fuses the experts as its version does.
        tensors = load_file(folder / "model.safetensors")
        stripped = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
        save_file(stripped, Path(plain) / "model.safetensors", metadata={"format": "pt"})
        (Path(plain) / "config.json").write_text(json.dumps({**text, "model_type": "deepseek_v3"}))
        shutil.copyfile(folder / "generation_config.json", Path(plain) / "generation_config.json")
        return DeepseekV3ForCausalLM.from_pretrained(plain).float().eval()


def _kept(folder: Path, manifest: dict) -> Path:
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        found = None
    if found != manifest:
        raise BadInput(
            f"{folder} is not the tiny Kimi checkpoint of seed {manifest['seed']}: remove it or name another."
        )
    return folder


def _write_weights(folder: Path, seed: int) -> None:
    """model.safetensors in `folder`: saved by transformers (which splits the fused experts), then put under the prefix."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as plain:
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**TEXT, "model_type": "deepseek_v3"})).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter.normal_(0.0, 0.5)  # routing that differs from token to token
                elif name == "lm_head.weight":
                    parameter.normal_(
                        0.0, 0.15
                    )  # log-probs as peaked as a trained model's, so greedy text has few ties
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.uniform_(0.0, 0.1)
        model.save_pretrained(plain)
        tensors = {}
        for file in sorted(Path(plain).glob("*.safetensors")):
            tensors.update(load_file(file))
    named = {f"language_model.{name}": tensor.contiguous() for name, tensor in sorted(tensors.items())}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
