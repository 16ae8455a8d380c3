// Writes into the paged caches. key [N, K, Dk] and value [N, K, Dv] are bf16; a cache row is [K, D] codes.

// slots [ranks, N]: where each rank stores each token, -1 for none. winners [ranks, blocks·B], -1 before: of several tokens
// for one slot the last one wins, as when they are written one after the other.
SC_EXPORT write_slots(Shape s, const Batch *batch, const i32 *table, const i64 *positions, const i32 *requests, i32 tokens,
                      i64 *slots, i32 *winners, i32 *error) {
    const Batch b = *batch;
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * tokens) return;
    const i32 rank = (i32)(index / tokens), token = (i32)(index % tokens);
    i32 request = requests[token];
    const i64 position = positions[token];
    slots[index] = -1;
#ifdef FAULT_PADDING_ROW_WRITTEN
    if (request < 0) request = 0;
#endif
    // padding rows may carry any position; only those of a request are looked at
    if (request < 0 || position < 0) return;
    const i32 owner = owner_of(s, position), member = member_of(s, rank);
#if defined(FAULT_WRITTEN_BY_EVERY_RANK)
    const bool writes = true;
#elif defined(FAULT_WRITTEN_BY_THE_NEXT_RANK)
    const bool writes = (owner + 1) % s.world == member;
#elif defined(FAULT_WRITTEN_BY_THE_PREVIOUS_RANK)
    const bool writes = owner == member + 1;
#else
    const bool writes = owner == member;
#endif
    if (!writes) return;
    const i64 slot = slot_of_position(s, b, table, request, position, error);
    slots[index] = slot;
    if (slot >= 0) SC_ATOMIC_MAX(&winners[(i64)rank * s.blocks * s.block + slot], token);
}

SC_DEVICE void store_code(i32 dtype, void *codes, i64 at, float value) {
    const u32 code = encode(dtype, value);
    if (dtype == CODE_F32) ((u32 *)codes)[at] = code;
    else if (dtype <= CODE_F16) ((u16 *)codes)[at] = (u16)code;
    else ((u8 *)codes)[at] = (u8)code;
}

// Stores the tokens. One block a rank and token.
SC_EXPORT write_tokens(Shape s, const u16 *key, const u16 *value, i32 tokens, const i64 *slots, const i32 *winners,
                       void *key_cache, void *value_cache) {
    const i32 token = SC_BLOCK_X, rank = SC_BLOCK_Y;
    const i64 slot = slots[(i64)rank * tokens + token], slots_of_rank = (i64)s.blocks * s.block;
    if (slot < 0 || winners[rank * slots_of_rank + slot] != token) return;
#if defined(FAULT_SCALE_IGNORED_ON_WRITE)
    const float factor = 1.0f;
#elif defined(FAULT_SCALE_INVERTED_ON_WRITE)
    const float factor = s.kv_scale;
#else
    const float factor = s.kv_inverse;
#endif
#ifdef FAULT_WRITE_SPILLS_OVER
    const i64 last = (slot + 1) % s.block == 0 ? slot : slot + 1;
#else
    const i64 last = slot;
#endif
    for (i64 target = slot; target <= last; target++) {
        const i64 row = rank * slots_of_rank + target;
        const i32 key_width = s.kv_heads * s.key_dim, value_width = s.shared ? 0 : s.kv_heads * s.value_dim;
        for (i32 d = SC_THREAD; d < key_width; d += SC_THREADS)
            store_code(s.dtype, key_cache, row * key_width + d, of_bf16(key[(i64)token * key_width + d]) * factor);
        for (i32 d = SC_THREAD; d < value_width; d += SC_THREADS)
            store_code(s.dtype, value_cache, row * value_width + d,
                       of_bf16(value[(i64)token * value_width + d]) * factor);
    }
}

// Fills words [count] with a pattern: what an output holds before anything is written to it.
SC_EXPORT fill_words(u32 *words, u32 pattern, i64 count) {
    const i64 index = SC_INDEX;
    if (index < count) words[index] = pattern;
}

// out [count] f32, row-major, from a given tensor of up to four axes with strides in elements; dtype bf16, f16 or f32.
SC_EXPORT read_strided(const void *in, i32 dtype, i64 count, i32 e1, i32 e2, i32 e3, i64 s0, i64 s1, i64 s2, i64 s3,
                       float *out) {
    const i64 index = SC_INDEX;
    if (index >= count) return;
    const i64 i3 = index % e3, i2 = index / e3 % e2, i1 = index / ((i64)e3 * e2) % e1, i0 = index / ((i64)e3 * e2 * e1);
#ifdef FAULT_STRIDED_STATE_READ_AS_CONTIGUOUS
    out[index] = decode(dtype, in, index);
#else
    out[index] = decode(dtype, in, i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3);
#endif
}

// Codes of the 16-bit `WireType` `half` of f32 values that are numbers of it.
SC_EXPORT narrow(const float *in, i64 count, i32 half, u16 *out) {
    const i64 index = SC_INDEX;
    if (index < count) out[index] = half_of(half, in[index]);
}
