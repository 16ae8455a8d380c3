"""Attention over paged latents."""

import torch


class BatchMLAPagedAttentionWrapper:
    """Plans a batch and attends to it, request by request."""

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        assert workspace.numel() >= 128 << 20 and backend in ("fa2", "fa3")

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, heads, latent, rotary, page_size, causal, scale, *types) -> None:
        """Takes note of the batch."""
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert types in ((torch.bfloat16,) * 2, (torch.float16,) * 2)
        assert all(a.dtype == torch.int32 for a in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        self.batch = qo_indptr.tolist(), kv_indptr.tolist(), kv_indices, kv_len_arr.tolist()
        self.page_size, self.causal, self.scale, self.type = page_size, causal, scale, types[0]

    def run(self, q_nope, q_pe, ckv, kpe, return_lse):
        """Output `[T, H, 512]` and LSE `[T, H]` in base 2; zeros at −∞ for a row without keys."""
        assert all(a.is_contiguous() and a.dtype == self.type for a in (q_nope, q_pe, ckv, kpe)) and return_lse
        starts, firsts, indices, lens = self.batch
        out = torch.zeros(q_nope.shape, dtype=torch.float32)
        lse = torch.full(q_nope.shape[:2], -torch.inf)
        for request, length in enumerate(lens):
            pages = indices[firsts[request] : firsts[request + 1]].long()
            assert (len(pages) - 1) * self.page_size < length <= len(pages) * self.page_size or length == len(pages) == 0
            values, rotary = (cache[pages].flatten(0, 1)[:length].float() for cache in (ckv, kpe))
            rows = range(starts[request], starts[request + 1])
            for row in rows:
                seen = max(0, length - (rows.stop - row - 1)) if self.causal else length
                if seen:
                    scores = q_nope[row].float() @ values[:seen].T + q_pe[row].float() @ rotary[:seen].T
                    lse[row] = (scores * self.scale).logsumexp(1) * 1.4426950408889634
                    out[row] = (scores * self.scale).softmax(1) @ values[:seen]
        return out.to(q_nope.dtype), lse
