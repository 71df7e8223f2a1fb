"""Writes a request's hidden states to one file when it ends, on CPU as well as on accelerators.

vLLM's own `ExampleHiddenStatesConnector` copies through pinned memory and CUDA events, which a CPU has not,
and its file is visible before it is whole. Here a file appears under its name only when it is whole (a
client may simply wait for it), and a failed write leaves `<name>.error` with the reason.

A file holds `hidden_states [T, layers, H]` and `token_ids [T]`; T counts prompt and output without the last
sampled token, which was never an input and so has no state. A request with
`"kv_transfer_params": {"save_hidden_states": false}` writes none.

    --kv-transfer-config '{"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "fledge_vllm.connector",
      "kv_connector_extra_config": {"shared_storage_path": DIR, "use_synchronization_lock": false}}'
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _Done:
    """A copy event of a device that copies at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """The stock connector, made to work on CPU and to show whole files only."""

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As the stock one, except that a request may say that nobody wants its states."""
        if (request.kv_transfer_params or {}).get("save_hidden_states", True):
            return super().request_finished(request, block_ids)
        self._request_filenames.pop(request.request_id, None)
        return False, None

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Copy the states out of the cache now (its blocks are freed next), write the file in a thread."""
        assert self._kv_cache is not None
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        num_tokens = len(pending.token_ids)
        blocks = self._kv_cache[torch.tensor(pending.block_ids)]  # [blocks, layers, block size, H]
        states = blocks.transpose(1, 2).flatten(0, 1)[:num_tokens].contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        event: Any = _Done()
        future = self._executor.submit(self._write_tensors, tensors, event, pending.filename, None)
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    @staticmethod
    def _write_tensors(
        tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        """Write beside the final name, then rename: whoever sees the file sees all of it."""
        partial_path = Path(f"{filename}.partial")
        try:
            event.synchronize()
            save_file(tensors, partial_path)
            os.replace(partial_path, filename)
        except Exception as error:
            partial_path.unlink(missing_ok=True)
            with contextlib.suppress(
                OSError
            ):  # the disk may be too full even for this; the empty file says so
                Path(f"{filename}.error").write_text(f"{type(error).__name__}: {error}")
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)
