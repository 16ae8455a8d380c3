// Merges of given states: two states, and the segments of a split kernel.

// Weights of a first and a second state, and the LSE of their merge. `step` says which merge of a context it is.
enum MergeStep { MERGE_CHUNK = 0, MERGE_SUFFIX = 1 };

SC_DEVICE float weigh_states(float prefix, float suffix, i32 step, float *weights) {
    weights[0] = sanitised(prefix);
    weights[1] = sanitised(suffix);
    const float first = weights[0], second = weights[1];
    (void)first, (void)second, (void)step;
    float merged = combine(weights, 2, 0);
#if defined(FAULT_CHUNK_REPLACES_EARLIER_CHUNKS)
    if (step == MERGE_CHUNK) { weights[0] = 0.0f; weights[1] = 1.0f; merged = suffix; }
#elif defined(FAULT_LATER_CHUNKS_DROPPED)
    if (step == MERGE_CHUNK && first != SC_NEG_INF) { weights[0] = 1.0f; weights[1] = 0.0f; merged = prefix; }
#elif defined(FAULT_PREFIX_DROPPED)
    if (step == MERGE_SUFFIX && second != SC_NEG_INF) { weights[0] = 0.0f; weights[1] = 1.0f; merged = suffix; }
#elif defined(FAULT_SUFFIX_DROPPED)
    if (step == MERGE_SUFFIX && first != SC_NEG_INF) { weights[0] = 1.0f; weights[1] = 0.0f; merged = prefix; }
#elif defined(FAULT_STATES_AVERAGED)
    if (step == MERGE_SUFFIX && first != SC_NEG_INF && second != SC_NEG_INF) weights[0] = weights[1] = 0.5f;
#elif defined(FAULT_STATE_LSE_OF_THE_PREFIX)
    if (step == MERGE_SUFFIX) merged = prefix;
#elif defined(FAULT_STATE_LSE_OF_THE_SUFFIX)
    if (step == MERGE_SUFFIX) merged = suffix;
#elif defined(FAULT_TWO_EMPTY_STATES_GIVE_NAN)
    if (step == MERGE_SUFFIX && first == SC_NEG_INF && second == SC_NEG_INF) weights[0] = weights[1] = merged = SC_NAN;
#elif defined(FAULT_CHUNK_MERGE_IN_BASE_2) || defined(FAULT_SUFFIX_MERGE_IN_BASE_2)
#ifdef FAULT_CHUNK_MERGE_IN_BASE_2
    const i32 wrong = MERGE_CHUNK;
#else
    const i32 wrong = MERGE_SUFFIX;
#endif
    const float largest = SC_MAX(first, second);
    if (step == wrong && largest != SC_NEG_INF) {
        merged = largest + base_2_log(base_2_exp(first - largest) + base_2_exp(second - largest));
        weights[0] = base_2_exp(first - merged);
        weights[1] = base_2_exp(second - merged);
    }
#endif
    return merged;
}

// out [states, D] of the `WireType` `half` from two f32 states [states, D] and their LSEs. One block a state. `out` may be
// either state, `lse` either LSE.
SC_EXPORT merge_states(const float *prefix, const float *prefix_lse, const float *suffix, const float *suffix_lse, i32 dim,
                       i32 half, i32 step, void *out, float *lse) {
    __shared__ float weights[2];
    __shared__ float merged;
    const i64 state = SC_BLOCK_X;
    if (SC_THREAD == 0) merged = weigh_states(prefix_lse[state], suffix_lse[state], step, weights);
    SC_SYNC();
    for (i32 d = SC_THREAD; d < dim; d += SC_THREADS) {
        const i64 at = state * dim + d;
        store_wire(half, out, at, weighed(weights[0], prefix[at]) + weighed(weights[1], suffix[at]));
    }
    if (SC_THREAD == 0) lse[state] = merged;
}

// Segments that hold something: each takes a whole number of tiles, as few as cover the row (vLLM `_merge_mla_segments_kernel`).
SC_DEVICE i32 active_segments(i64 tokens, i32 segments, i32 tile) {
#if defined(FAULT_ALL_SEGMENTS_READ)
    return segments;
#elif defined(FAULT_ONE_SEGMENT_READ)
    return tokens > 0 ? 1 : 0;
#endif
    if (tile < 1) tile = 1;
    const i64 all = (i64)segments * tile;
    i64 tiles = (tokens + all - 1) / (all > 0 ? all : 1);
    if (tiles < 1) tiles = 1;
    const i64 size = tiles * tile, active = (tokens + size - 1) / size;
    i32 count = (i32)(active < segments ? active : segments);
#ifdef FAULT_LAST_SEGMENT_DROPPED
    if (count > 1) count -= 1;
#endif
    return count;
}

// out [T·H, D] f32 and lse [T·H] out of base-2 statistics: w = 2^(m - M) / sum e·2^(m - M), lse = (M + log2 sum)·ln 2.
// max, sum [segments, T·H], acc [segments, T·H, D]; row_lens [T]. One block a row and head.
SC_EXPORT merge_segments(const float *max, const float *sum, const float *acc, const i32 *row_lens, i32 segments, i32 count,
                         i32 heads, i32 dim, i32 tile, float *out, float *lse) {
    const i32 index = SC_BLOCK_X;
    const i32 active = active_segments(row_lens[index / heads], segments, tile);
    float largest = SC_NEG_INF, total = 0.0f;
    for (i32 i = 0; i < active; i++) largest = SC_MAX(largest, max[(i64)i * count + index]);
    const bool empty = largest == SC_NEG_INF;
#ifdef FAULT_SEGMENTS_IN_NATURAL_BASE
#define SEGMENT_WEIGHT(i) natural_exp(max[(i64)(i) * count + index] - largest)
#else
#define SEGMENT_WEIGHT(i) base_2_exp(max[(i64)(i) * count + index] - largest)
#endif
    if (!empty)
        for (i32 i = 0; i < active; i++) total = SC_FMA(SEGMENT_WEIGHT(i), sum[(i64)i * count + index], total);
    const bool nothing = empty || total == 0.0f;
    for (i32 d = SC_THREAD; d < dim; d += SC_THREADS) {
        float value = 0.0f;
        for (i32 i = 0; i < active && !nothing; i++) {
#ifdef FAULT_SEGMENTS_NOT_NORMALISED
            const float weight = SEGMENT_WEIGHT(i);
#else
            const float weight = SEGMENT_WEIGHT(i) / total;
#endif
            value += weighed(weight, acc[((i64)i * count + index) * dim + d]);
        }
        out[(i64)index * dim + d] = value;
    }
    if (SC_THREAD != 0) return;
#if defined(FAULT_SEGMENT_LSE_IN_BASE_2)
    lse[index] = nothing ? SC_NEG_INF : largest + base_2_log(total);
#elif defined(FAULT_SEGMENT_LSE_OF_THE_FIRST)
    lse[index] = active < 1 ? SC_NEG_INF : (max[index] + base_2_log(sum[index])) * SC_LN2;
#elif defined(FAULT_SEGMENT_LSE_OF_THE_LAST)
    const i64 last = (i64)(active - 1) * count + index;
    lse[index] = active < 1 ? SC_NEG_INF : (max[last] + base_2_log(sum[last])) * SC_LN2;
#else
    lse[index] = nothing ? SC_NEG_INF : (largest + base_2_log(total)) * SC_LN2;
#endif
}
