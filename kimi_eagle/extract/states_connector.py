"""The connector class that vLLM loads by name (it imports vLLM, so nothing but vLLM imports it)."""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class _Done:
    """Stands for a copy that needs no waiting; the stock bookkeeping asks it `query`."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class StatesConnector(stock.ExampleHiddenStatesConnector):
    """vLLM's example connector that also works without CUDA, and whose files appear whole or not at all."""

    def _submit_async_write(self, pending: Any) -> None:
        if self._kv_cache is not None and self._kv_cache.is_cuda:
            return super()._submit_async_write(pending)
        if not self._is_tp_rank_zero:
            return None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = stock.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        self._write_tensors(tensors, _Done(), pending.filename, None)
        self._req_copy_events[pending.req_id] = _Done()
        return None

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        event.synchronize()
        os.makedirs(os.path.dirname(filename), exist_ok=True)
        partial = f"{filename}.partial"
        save_file(tensors, partial)
        os.replace(partial, filename)
        if lock_fd is not None:
            os.close(lock_fd)
