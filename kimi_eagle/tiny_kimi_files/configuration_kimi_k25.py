"""Configuration classes of the tiny Kimi checkpoint, for versions of transformers that do not know `kimi_k25` themselves.

Copied into the checkpoint; imports nothing from kimi_eagle.
"""

from transformers import DeepseekV3Config, PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    """The vision tower's settings, kept as they are written (nothing here builds the tower)."""

    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    """A DeepSeek-V3 text model under `text_config` and a vision tower under `vision_config`."""

    model_type = "kimi_k25"

    def __init__(self, text_config=None, vision_config=None, media_placeholder_token_id=163605, **kwargs):
        if text_config is None or isinstance(text_config, dict):
            text_config = DeepseekV3Config(**(text_config or {}))
        if vision_config is None or isinstance(vision_config, dict):
            vision_config = KimiK25VisionConfig(**(vision_config or {}))
        self.text_config = text_config
        self.vision_config = vision_config
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**kwargs)
