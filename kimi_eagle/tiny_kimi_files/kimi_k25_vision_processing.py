"""The image processor's place in the tiny Kimi checkpoint: vLLM wants one to exist; images themselves are refused.

Copied into the checkpoint; imports nothing from kimi_eagle.
"""

from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    """Answers what vLLM asks while it sets up a text-only run."""

    model_input_names = ["pixel_values", "grid_thws"]  # noqa: RUF012
    num_frames_per_chunk = 4

    def __init__(self, media_proc_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg or {}

    def media_tokens_calculator(self, media):
        """Number of tokens that stand for one image or video chunk."""
        return self.num_frames_per_chunk

    def preprocess(self, medias, **kwargs):
        """Images cannot be read: the tiny checkpoint has no vision weights."""
        raise ValueError("the tiny Kimi checkpoint has no vision tower: send text only.")
