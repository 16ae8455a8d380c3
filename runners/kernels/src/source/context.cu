// A cached context, gathered from all ranks chunk by chunk: every rank reads the same rows, padding included, so that one
// all-gather serves all; the padding is dropped afterwards. Codes travel as they lie in the cache.

// sent [ranks, rows of the chunk, token bytes]. befores [n + 1]: rows of earlier requests; `begin`: first local row of the window.
// One block a rank and row.
SC_EXPORT read_chunk(Shape s, const Batch *batch, const i32 *table, const i32 *befores, i32 begin, i32 rows, const u8 *keys,
                     const u8 *values, i32 key_bytes, i32 value_bytes, u8 *sent, i32 *error) {
    const Batch b = *batch;
    const i32 at = SC_BLOCK_X, rank = SC_BLOCK_Y;
    i32 low = 0, high = b.requests;
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (befores[middle + 1] <= at) low = middle + 1;
        else high = middle;
    }
    const i32 local = begin + at - befores[low];
#ifdef FAULT_CONTEXT_PAGE_OF_VIRTUAL_BLOCK
    const i32 id = block_of(s, b, table, low, local / (s.block * s.world), error);
    const i64 slot = id < 0 ? -1 : (i64)id * s.block + local % s.block;
#else
    const i64 slot = slot_of_local(s, b, table, low, local, error);
#endif
    if (slot < 0) return;
    u8 *target = sent + ((i64)rank * rows + at) * (key_bytes + value_bytes);
    const i64 row = (i64)rank * s.blocks * s.block + slot;
    for (i32 i = SC_THREAD; i < key_bytes; i += SC_THREADS) target[i] = keys[row * key_bytes + i];
    for (i32 i = SC_THREAD; i < value_bytes; i += SC_THREADS) target[key_bytes + i] = values[row * value_bytes + i];
}

// keys [ranks, total, K, Dk] and values [ranks, total, K, Dv] in f32, tokens of each request together, rank-major within it, from
// row `base` of each rank on. gathered [ranks, W, rows, token bytes]. kept [n, W]: tokens of each member; firsts [n·W + 1]: first
// token of each. One block a rank and token.
SC_EXPORT reorganise_chunk(Shape s, const u8 *gathered, const i32 *befores, const i32 *firsts, i32 requests, i32 rows,
                           i32 key_bytes, i32 value_bytes, i64 total, i64 base, float *keys, float *values) {
    const i32 token = SC_BLOCK_X, rank = SC_BLOCK_Y;
    i32 low = 0, high = requests * s.world;
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (firsts[middle + 1] <= token) low = middle + 1;
        else high = middle;
    }
    const i32 request = low / s.world, member = low % s.world, row = token - firsts[low];
#if defined(FAULT_REORG_FORGETS_EARLIER_REQUESTS)
    const i64 source = (i64)member * rows + row;
#elif defined(FAULT_GATHERED_CONTEXT_TOKEN_MAJOR)
    const i64 source = (i64)(befores[request] + row) * s.world + member;
#else
    const i64 source = (i64)member * rows + befores[request] + row;
#endif
    const u8 *codes = gathered + ((i64)rank * s.world * rows + source) * (key_bytes + value_bytes);
    const i64 to = rank * total + base + token;
    const i32 key_width = s.kv_heads * s.key_dim, value_width = s.shared ? 0 : s.kv_heads * s.value_dim;
#if defined(FAULT_CONTEXT_UNSCALED)
    const float scale = 1.0f;
#elif defined(FAULT_CONTEXT_SCALED_TWICE)
    const float scale = s.kv_scale * s.kv_scale;
#else
    const float scale = s.kv_scale;
#endif
    // a token's bytes are copied through bytes where its start is not aligned to its codes
    for (i32 d = SC_THREAD; d < key_width; d += SC_THREADS)
        keys[to * key_width + d] = decode_bytes(s.dtype, codes, d) * scale;
    for (i32 d = SC_THREAD; d < value_width; d += SC_THREADS)
        values[to * value_width + d] = decode_bytes(s.dtype, codes + key_bytes, d) * scale;
}

// What each row of the new tokens sees of a gathered chunk: firsts [rows] and counts [rows] out of those of requests. Context attention has no
// mask. One thread a row.
SC_EXPORT rows_of_chunk(const Batch *batch, const i32 *starts, i32 rows, i64 base, const i32 *request_firsts,
                        const i32 *request_counts, i32 *firsts, i32 *counts) {
    const i64 index = SC_INDEX;
    if (index >= rows) return;
    const Row row = row_of(*batch, starts, (i32)index);
    firsts[index] = row.request < 0 ? 0 : (i32)base + request_firsts[row.request];
    i32 count = row.request < 0 ? 0 : request_counts[row.request];
#ifdef FAULT_CONTEXT_MASKED_IN_GATHER_ORDER
    const i32 behind = row.query_len - 1 - row.row;
    count = count > behind ? count - behind : 0;
#endif
    counts[index] = count;
}

// What each row of the new tokens sees of them: those of its request up to itself. One thread a row.
SC_EXPORT rows_of_suffix(const Batch *batch, const i32 *starts, i32 rows, i32 *firsts, i32 *counts) {
    const i64 index = SC_INDEX;
    if (index >= rows) return;
    const Row row = row_of(*batch, starts, (i32)index);
    firsts[index] = row.request < 0 ? 0 : starts[row.request];
#if defined(FAULT_SUFFIX_NOT_CAUSAL)
    const i32 seen = row.query_len;
#elif defined(FAULT_SUFFIX_MISSES_ITSELF)
    const i32 seen = row.row;
#elif defined(FAULT_SHORT_SUFFIX_TAKEN_FOR_DECODE)
    const i32 seen = row.query_len <= 3 ? 0 : row.row + 1;
#elif defined(FAULT_LONG_SUFFIX_UNMASKED)
    const i32 seen = row.query_len > 2 ? row.query_len : row.row + 1;
#elif defined(FAULT_SUFFIX_SEES_ITS_SUCCESSOR)
    const i32 seen = row.row + 2 < row.query_len ? row.row + 2 : row.query_len;
#else
    const i32 seen = row.row + 1;
#endif
    counts[index] = row.request < 0 ? 0 : seen;
}
