"""The tokenizer of the tiny Kimi checkpoint: like the real one a slow class that only `trust_remote_code` can load.

`tiktoken.model` holds one byte sequence (base64) and its rank a line, after one comment line. That line is there because
transformers 5 knows the model type `kimi_k25` and, without `trust_remote_code`, converts a tiktoken file by itself to a fast
tokenizer in which every special id has moved; here it fails instead, with the comment in its message. The 256 special ids follow the last rank, in the order
of the real Kimi-K2.5 vocabulary: [BOS] is the first, [PAD] the last. This file is copied into the checkpoint and imports
nothing from kimi_eagle.
"""

import base64
import os
import shutil

import tiktoken
from transformers import PreTrainedTokenizer

VOCABULARY = "tiktoken.model"
SPECIAL_IDS = 256
# Offsets from the first special id, as in Kimi-K2.5 (163,584 + offset there); the others are reserved.
NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
# Han characters together; words with their leading space and an English suffix; numbers in threes; signs; line ends; blanks.
PATTERN = r"\p{Han}+| ?[\p{L}\p{M}]+(?:'[a-z]{1,2})?|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _printable_bytes():
    """Byte -> one printable character, the mapping that byte-level BPE vocabularies use to show bytes as text."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {**{b: chr(b) for b in shown}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


class TikTokenTokenizer(PreTrainedTokenizer):
    """Byte-level BPE over a tiktoken rank file; special ids are fixed by position and never move."""

    vocab_files_names = {"vocab_file": VOCABULARY}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file, **kwargs):
        with open(vocab_file, encoding="ascii") as file:
            rows = [line.split() for line in file if line.strip() and not line.startswith("#")]
        ranks = {base64.b64decode(word): int(rank) for word, rank in rows}
        first = len(ranks)
        special = {NAMED.get(i, f"<|reserved_token_{first + i}|>"): first + i for i in range(SPECIAL_IDS)}
        self.vocab_file = vocab_file
        self.special_ids = special
        self.model = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self.byte_to_char = _printable_bytes()
        self.char_to_byte = {c: b for b, c in self.byte_to_char.items()}
        self.id_to_piece = {rank: "".join(self.byte_to_char[b] for b in word) for word, rank in ranks.items()}
        self.id_to_piece.update({i: name for name, i in special.items()})
        self.piece_to_id = {piece: i for i, piece in self.id_to_piece.items()}
        super().__init__(**kwargs)
        # Every special token splits the text before BPE sees it, under its own id, whatever the version of transformers.
        self.add_tokens(list(special), special_tokens=True)

    @property
    def vocab_size(self):
        return len(self.id_to_piece)

    def get_vocab(self):
        return {**self.piece_to_id, **getattr(self, "_added_tokens_encoder", {})}

    def _tokenize(self, text, **kwargs):
        return [self.id_to_piece[i] for i in self.model.encode_ordinary(text)]

    def _convert_token_to_id(self, token):
        return self.piece_to_id.get(token, self.special_ids["[UNK]"])

    def _convert_id_to_token(self, index):
        return self.id_to_piece[index]

    def convert_tokens_to_string(self, tokens):
        out = bytearray()
        for token in tokens:
            if token in self.special_ids:
                out += token.encode("utf-8")
            else:
                out += bytes(self.char_to_byte[c] for c in token)
        return out.decode("utf-8", errors="replace")

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return token_ids_0 + (token_ids_1 or [])

    def save_vocabulary(self, save_directory, filename_prefix=None):
        target = os.path.join(save_directory, (filename_prefix + "-" if filename_prefix else "") + VOCABULARY)
        if os.path.abspath(self.vocab_file) != os.path.abspath(target):
            shutil.copyfile(self.vocab_file, target)
        return (target,)
