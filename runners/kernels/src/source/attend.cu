// Local attention for any shape and cache: online softmax over tiles of tokens, split over segments of a row's tokens.
// Scores and sums are f32; probabilities are rounded to bf16 before they meet the values; the normaliser sums them unrounded;
// the LSE is natural (FlashAttention-2's forward pass). Each segment leaves its maximum, its normaliser and its unnormalised
// accumulator; finish_segments makes one partial of them.

struct Dense {
    const float *keys, *values;  // values null where they are the first part of the keys
    SC_INLINE float key(const Shape &s, i64 row, i32 kv_head, i32 d) const {
        return keys[(row * s.kv_heads + kv_head) * s.key_dim + d];
    }
    SC_INLINE float value(const Shape &s, i64 row, i32 kv_head, i32 d) const {
        return values ? values[(row * s.kv_heads + kv_head) * s.value_dim + d] : key(s, row, kv_head, d);
    }
};

// What a block works on.
struct Work {
    const u16 *query;    // [heads of the block, Dk] of the row
    i32 head_stride;     // elements from one head to the next
    i32 count;           // heads of the block
    i32 kv_head;
    i32 begin, end;      // tokens
    float *max, *sum;    // [heads of the block], one float each
    float *acc;          // [heads of the block, Dv]
};

// Shared memory of a block: q [HEADS, Dk], acc [HEADS, Dv], p [HEADS, TILE], partial [HEADS, 16], max, sum, factor [HEADS],
// slots [TILE]. The host asks for as many bytes.
SC_DEVICE float *shared_floats() {
    extern __shared__ u64 shared_memory[];
    return (float *)shared_memory;
}

template <class Source, class SlotOf>
SC_DEVICE void attend_tokens(const Shape &s, const Source &source, const SlotOf &slot_of, const Work &w) {
    const i32 thread = SC_THREAD;
    i64 *slots = (i64 *)shared_floats();
    float *q = (float *)(slots + TILE), *acc = q + HEADS * s.key_dim, *p = acc + HEADS * s.value_dim;
    float *partial = p + HEADS * TILE, *max = partial + HEADS * 16, *sum = max + HEADS, *factor = sum + HEADS;
    const float scale = score_scale(s);
    for (i32 i = thread; i < HEADS * s.key_dim; i += SC_THREADS) {
        const i32 head = i / s.key_dim;
        q[i] = head < w.count ? of_bf16(w.query[(i64)head * w.head_stride + i % s.key_dim]) : 0.0f;
    }
    for (i32 i = thread; i < HEADS * s.value_dim; i += SC_THREADS) acc[i] = 0.0f;
    if (thread < HEADS) {
        max[thread] = SC_NEG_INF;
        sum[thread] = 0.0f;
    }
    for (i32 tile = w.begin; tile < w.end; tile += TILE) {
        SC_SYNC();
        const i32 count = w.end - tile < TILE ? w.end - tile : TILE;
        if (thread < count) slots[thread] = slot_of(tile + thread);
        SC_SYNC();
        // one thread a token and half of the heads
        const i32 token = thread % TILE, first = thread / TILE * (HEADS / 2);
        if (token < count && slots[token] >= 0) {
            float dot[HEADS / 2];
            for (i32 h = 0; h < HEADS / 2; h++) dot[h] = 0.0f;
            for (i32 d = 0; d < s.key_dim; d++) {
                const float k = source.key(s, slots[token], w.kv_head, d);
                for (i32 h = 0; h < HEADS / 2; h++) dot[h] = SC_FMA(q[(first + h) * s.key_dim + d], k, dot[h]);
            }
            for (i32 h = 0; h < HEADS / 2; h++) p[(first + h) * TILE + token] = dot[h] * scale;
        } else if (token < count) {
            for (i32 h = 0; h < HEADS / 2; h++) p[(first + h) * TILE + token] = SC_NAN;
        }
        SC_SYNC();
        // sixteen threads a head, four tokens each
        const i32 head = thread / 16, part = thread % 16;
        float largest = SC_NEG_INF;
        for (i32 t = part; t < count; t += 16) largest = SC_MAX(largest, p[head * TILE + t]);
        partial[head * 16 + part] = largest;
        SC_SYNC();
        const float before = max[head];
        float after = before;
        for (i32 i = 0; i < 16; i++) after = SC_MAX(after, partial[head * 16 + i]);
        SC_SYNC();
        float added = 0.0f;
        for (i32 t = part; t < count; t += 16) {
            const float e = natural_exp(p[head * TILE + t] - shift_of(after));
            added += e;
            p[head * TILE + t] = round_bf16(e);
        }
        partial[head * 16 + part] = added;
        if (part == 0) {
            max[head] = after;
            factor[head] = tile == w.begin ? 0.0f : rescale_of(shift_of(before), shift_of(after));
        }
        SC_SYNC();
        if (part == 0) {
            float total = 0.0f;
            for (i32 i = 0; i < 16; i++) total += partial[head * 16 + i];
            sum[head] = SC_FMA(sum[head], factor[head], total);
        }
        // one thread a column, all heads; four running sums of at most sixteen tokens each
        for (i32 d = thread; d < s.value_dim; d += SC_THREADS) {
            float run[HEADS][4];
            for (i32 h = 0; h < HEADS; h++)
                for (i32 j = 0; j < 4; j++) run[h][j] = 0.0f;
            for (i32 t = 0; t < count; t += 4) {
                for (i32 j = 0; j < 4; j++) {
                    if (t + j >= count) break;
                    const i64 slot = slots[t + j];
                    const float v = slot >= 0 ? source.value(s, slot, w.kv_head, d) : SC_NAN;
                    for (i32 h = 0; h < HEADS; h++) run[h][j] = SC_FMA(p[h * TILE + t + j], v, run[h][j]);
                }
            }
            for (i32 h = 0; h < HEADS; h++) {
                const float added_here = (run[h][0] + run[h][1]) + (run[h][2] + run[h][3]);
                acc[h * s.value_dim + d] = SC_FMA(acc[h * s.value_dim + d], factor[h], added_here);
            }
        }
    }
    SC_SYNC();
    if (thread < w.count) {
        w.max[thread] = max[thread];
        w.sum[thread] = sum[thread];
    }
    for (i32 i = thread; i < w.count * s.value_dim; i += SC_THREADS) w.acc[i] = acc[i];
}

// Heads of a block: HEADS of them with one KV head. Blocks of a row, in order of KV heads.
SC_DEVICE void heads_of_block(const Shape &s, i32 heads, i32 block, i32 *first, i32 *count) {
    const i32 group = s.heads / s.kv_heads, blocks_a_kv_head = (group + HEADS - 1) / HEADS;
    i32 kv_head = block / blocks_a_kv_head;
    if (kv_head >= s.kv_heads) kv_head = s.kv_heads - 1;
    *first = kv_head * group + (block - kv_head * blocks_a_kv_head) * HEADS;
    const i32 end = kv_head == s.kv_heads - 1 ? heads : (kv_head + 1) * group;
    *count = end - *first < HEADS ? end - *first : HEADS;
}

// Statistics of segments: max, sum [segments, ranks, T, width], acc [segments, ranks, T, width, Dv].
// Blocks: (rank·T + row, block of heads, segment).
SC_EXPORT attend_paged(Shape s, const Batch *batch, const i32 *table, const i32 *row_lens, const i32 *row_requests, i32 rows,
                       i32 segments, const u16 *query, const void *keys, const void *values, float *max, float *sum,
                       float *acc, i32 *error) {
    const i32 segment = SC_BLOCK_Z, at = SC_BLOCK_X, rank = at / rows, row = at % rows;
    Work w;
    i32 first;
    heads_of_block(s, s.width, SC_BLOCK_Y, &first, &w.count);
    segment_of(row_lens[at], segment, segments, &w.begin, &w.end);
    if (w.count <= 0 || w.begin >= w.end) return;
    const Batch b = *batch;
    const i32 request = row_requests[row] < 0 ? 0 : row_requests[row];
    const i64 index = (((i64)segment * s.ranks * rows + at) * s.width) + first;
    w.query = query + ((i64)at * s.width + first) * s.key_dim;
    w.head_stride = s.key_dim;
    w.kv_head = kv_head_of(s, first);
    w.max = max + index;
    w.sum = sum + index;
    w.acc = acc + index * s.value_dim;
    const i64 rank_row = (i64)rank * s.blocks * s.block;
    const Paged source = {keys, values, rank_row, rank_row, s.dtype, read_scale(s)};
    attend_tokens(s, source, [&] SC_LAMBDA(i32 local) { return slot_of_local(s, b, table, request, local, error); }, w);
}

// Attention of each rank's own heads over f32 rows: out [ranks, T, H, Dv], lse [ranks, T, H], both f32. Row t sees the rows
// first[t] .. first[t] + count[t] of its rank, each rank's rows being `stride` rows apart (0: all ranks read the same).
// Blocks: (rank·T + row, block of `block_heads` heads with one KV head). A row that sees nothing leaves its state untouched.
SC_EXPORT attend_dense(Shape s, const u16 *query, i32 rows, const i32 *firsts, const i32 *counts, const float *keys,
                       const float *values, i64 stride, i32 block_heads, float *max, float *sum, float *acc) {
    const i32 at = SC_BLOCK_X, rank = at / rows, row = at % rows, head = SC_BLOCK_Y * block_heads;
    Work w;
    w.count = block_heads;
    w.begin = 0;
    w.end = counts[row];
    const i64 index = (i64)at * s.own + head;
    if (w.end <= 0) return;
    w.query = query + (((i64)row * s.all + rank_at(s, rank)) * s.own + head) * s.key_dim;
    w.head_stride = s.key_dim;
    w.kv_head = kv_head_of(s, member_of(s, rank) * s.own + head);
    w.max = max + index;
    w.sum = sum + index;
    w.acc = acc + index * s.value_dim;
    const Dense source = {keys + rank * stride * s.kv_heads * s.key_dim,
                          values ? values + rank * stride * s.kv_heads * s.value_dim : values};
    const i64 first = firsts[row];
    attend_tokens(s, source, [&] SC_LAMBDA(i32 local) { return first + local; }, w);
}

// The state of each row and own head out of one segment, in f32: out [ranks, T, H, Dv] (may be acc itself), lse [ranks, T, H];
// a row without tokens is zeros with -infinity. One block a head and row.
SC_EXPORT finish_state(Shape s, const i32 *counts, i32 rows, const float *max, const float *sum, float *acc, float *lse) {
    const i32 head = SC_BLOCK_Y, at = SC_BLOCK_X;
    const i64 index = (i64)at * s.own + head;
    float *target = acc + index * s.value_dim;
    const bool empty = counts[at % rows] <= 0;
    const float inverse = empty ? 0.0f : 1.0f / sum[index];
    for (i32 d = SC_THREAD; d < s.value_dim; d += SC_THREADS) target[d] = empty ? 0.0f : target[d] * inverse;
    if (SC_THREAD == 0) lse[index] = empty ? SC_NEG_INF : lse_of(max[index], sum[index]);
}
