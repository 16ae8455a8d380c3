// What every attention kernel shares: segments of a row's tokens, scales, how a paged cache is read, and the partial that is made of
// what segments leave: their maximum, their normaliser and their unnormalised accumulator.

#define TILE 64
#define HEADS 8        // query heads of one block, which read the same KV head
#define MIN_SEGMENT 128
#define MAX_SEGMENTS 64

SC_DEVICE float shift_of(float max) {
#ifdef FAULT_SOFTMAX_WITHOUT_MAXIMUM
    return 0.0f;
#else
    return max;
#endif
}

// Factor of what was summed under an old maximum.
SC_DEVICE float rescale_of(float before, float after) {
#if defined(FAULT_NO_RESCALE_BETWEEN_TILES)
    return 1.0f;
#elif defined(FAULT_RESCALE_IN_BASE_2)
    return base_2_exp(before - after);
#else
    return natural_exp(before - after);
#endif
}

// Tokens of a row that a segment takes: whole tiles, at least MIN_SEGMENT.
SC_DEVICE void segment_of(i32 len, i32 segment, i32 segments, i32 *begin, i32 *end) {
    i32 size = (len + segments - 1) / segments;
    size = size < MIN_SEGMENT ? MIN_SEGMENT : (size + TILE - 1) / TILE * TILE;
    const i64 first = (i64)segment * size;
    *begin = first < len ? (i32)first : len;
    *end = first + size < len ? (i32)(first + size) : len;
}

// KV head that a query head reads: consecutive groups; heads of padding read the last.
SC_DEVICE i32 kv_head_of(const Shape &s, i32 head) {
#ifdef FAULT_ONE_KV_HEAD_FOR_ALL
    return 0;
#else
    const i32 kv_head = head / (s.heads / s.kv_heads);
    return kv_head < s.kv_heads ? kv_head : s.kv_heads - 1;
#endif
}

// Where keys and values of a row lie: in the paged caches of a rank, or as f32 rows one behind the other.
struct Paged {
    const void *keys, *values;
    i64 key_row, value_row;  // first row of the rank
    i32 dtype;
    float scale;
    SC_INLINE float key(const Shape &s, i64 slot, i32 kv_head, i32 d) const {
        return decode(dtype, keys, ((key_row + slot) * s.kv_heads + kv_head) * s.key_dim + d) * key_scale(s, d);
    }
    SC_INLINE float value(const Shape &s, i64 slot, i32 kv_head, i32 d) const {
#ifdef FAULT_VALUE_UNSCALED
        const float factor = s.shared ? scale : 1.0f;
#else
        const float factor = scale;
#endif
        if (s.shared) {
#ifdef FAULT_VALUE_FROM_THE_LAST_COLUMNS
            d += s.key_dim - s.value_dim;
#endif
            return decode(dtype, keys, ((key_row + slot) * s.kv_heads + kv_head) * s.key_dim + d) * factor;
        }
        return decode(dtype, values, ((value_row + slot) * s.kv_heads + kv_head) * s.value_dim + d) * factor;
    }
    SC_INLINE float key_scale(const Shape &s, i32 d) const {
#if defined(FAULT_ROPE_PART_UNSCALED)
        return s.shared && d >= s.value_dim ? 1.0f : scale;
#elif defined(FAULT_LATENT_PART_UNSCALED)
        return s.shared && d < s.value_dim ? 1.0f : scale;
#else
        return scale;
#endif
    }
};

SC_DEVICE float read_scale(const Shape &s) {
#if defined(FAULT_SCALE_IGNORED_ON_READ)
    return 1.0f;
#elif defined(FAULT_SCALE_APPLIED_TWICE)
    return s.kv_scale * s.kv_scale;
#elif defined(FAULT_SCALE_INVERTED)
    return s.kv_inverse;
#elif defined(FAULT_SCALE_ROUNDED_TO_BF16)
    return round_bf16(s.kv_scale);
#else
    return s.kv_scale;
#endif
}

SC_DEVICE float score_scale(const Shape &s) {
#if defined(FAULT_SCORE_SCALE_OF_LATENT_WIDTH)
    return natural_exp(-0.5f * natural_log((float)s.value_dim));
#elif defined(FAULT_SCORE_SCALE_TWICE)
    return s.score_scale * s.score_scale;
#elif defined(FAULT_SCORE_SCALE_LEFT_OUT)
    return 1.0f;
#else
    return s.score_scale;
#endif
}

// What the kernel says of its maximum and normaliser.
SC_DEVICE float lse_of(float max, float sum) {
#if defined(FAULT_LSE_BASE_2_AS_NATURAL)
    return (shift_of(max) + natural_log(sum)) * SC_LOG2E;
#elif defined(FAULT_LSE_CARRIED_IN_BF16)
    return round_bf16(shift_of(max) + natural_log(sum));
#elif defined(FAULT_LSE_WITHOUT_MAXIMUM)
    return natural_log(sum);
#elif defined(FAULT_LSE_IS_THE_MAXIMUM)
    return shift_of(max);
#else
    return shift_of(max) + natural_log(sum);
#endif
}

#if defined(FAULT_EMPTY_SHARD_LSE_ZERO)
#define EMPTY_VALUE 0.0f
#define EMPTY_LSE 0.0f
#elif defined(FAULT_EMPTY_LSE_FINITE)
#define EMPTY_VALUE 0.0f
#define EMPTY_LSE -1e30f
#elif defined(FAULT_EMPTY_LSE_UNTOUCHED)
#define EMPTY_VALUE SC_NAN
#define EMPTY_LSE 1.0f
#elif defined(FAULT_EMPTY_LSE_PLUS_INFINITY)
#define EMPTY_VALUE SC_NAN
#define EMPTY_LSE SC_INF
#elif defined(FAULT_EMPTY_SHARD_LSE_OF_A_TOKEN)
#define EMPTY_VALUE 1.0f
#define EMPTY_LSE 0.0f
#else
#define EMPTY_VALUE SC_NAN
#define EMPTY_LSE SC_NEG_INF
#endif

// One partial out of the segments of a row and head: out [ranks, T, heads, Dv] bf16, lse [ranks, T, heads] f32. `factor` is what
// the accumulators still lack (the cache scale, where the kernel left it out). One block a head and row.
SC_EXPORT finish_segments(Shape s, const i32 *row_lens, i32 rows, i32 segments, float factor, const float *max, const float *sum,
                          const float *acc, u16 *out, float *lse) {
    const i32 head = SC_BLOCK_Y, at = SC_BLOCK_X;
    const i32 len = row_lens[at];
    u16 *target = out + ((i64)at * s.heads + head) * s.value_dim;
    if (len <= 0) {
        for (i32 d = SC_THREAD; d < s.value_dim; d += SC_THREADS) target[d] = bf16_of(EMPTY_VALUE);
        if (SC_THREAD == 0) lse[(i64)at * s.heads + head] = EMPTY_LSE;
        return;
    }
    const i64 stride = (i64)s.ranks * rows * s.width, first = (i64)at * s.width + head;
    i32 active = 0, begin, end;
    while (active < segments) {
        segment_of(len, active, segments, &begin, &end);
        if (begin >= end) break;
        active++;
    }
    // weights of segments, which all threads share; the host launches no more of them than fit
    __shared__ float weights[MAX_SEGMENTS], sums[MAX_SEGMENTS];
    for (i32 i = SC_THREAD; i < active; i += SC_THREADS) {
        weights[i] = max[first + i * stride];
        sums[i] = sum[first + i * stride];
    }
    SC_SYNC();
    float largest = SC_NEG_INF;
    for (i32 i = 0; i < active; i++) largest = SC_MAX(largest, weights[i]);
    SC_SYNC();
    for (i32 i = SC_THREAD; i < active; i += SC_THREADS)
        weights[i] = active == 1 ? 1.0f : rescale_of(shift_of(weights[i]), shift_of(largest));
    SC_SYNC();
    float total = 0.0f;
    for (i32 i = 0; i < active; i++) total = SC_FMA(sums[i], weights[i], total);
    const float inverse = 1.0f / total;
    for (i32 d = SC_THREAD; d < s.value_dim; d += SC_THREADS) {
        float value = 0.0f;
        for (i32 i = 0; i < active; i++) value = SC_FMA(acc[(first + i * stride) * s.value_dim + d], weights[i], value);
        target[d] = bf16_of(value * inverse * factor);
    }
    if (SC_THREAD == 0) lse[(i64)at * s.heads + head] = lse_of(largest, total);
}
