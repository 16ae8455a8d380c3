// The merge of partial outputs by their LSEs. All-to-all (ATOM `cp_lse_a2a`, vLLM `dcp_a2a_lse_reduce`): each partial travels
// with its LSE in two 16-bit lanes; the receiver sums in f32 in rank order and rounds once. All-gather and reduce-scatter
// (`cp_lse_ag_out_rs`): LSEs are gathered, each partial is scaled and rounded in place, and the sum is rounded after every addition.
// `half` says what the wire holds, as `WireType` has it. A block of threads works on one row and head.

#define MAX_WORLD 256

// NaN and +infinity mean "nothing there", as -infinity does.
SC_DEVICE float sanitised(float lse) {
#ifdef FAULT_NAN_LSE_NOT_SANITISED
    return lse;
#else
    return is_nan(lse) || lse == SC_INF ? SC_NEG_INF : lse;
#endif
}

// Whether powers and logarithms are those of 2, `two` being whether the LSEs are given in that base.
SC_DEVICE bool in_base_2(i32 two) {
#if defined(FAULT_MERGE_IN_BASE_2)
    return true;
#elif defined(FAULT_BASE_2_TAKEN_AS_NATURAL)
    return false;
#else
    return two != 0;
#endif
}
SC_DEVICE float merge_exp(float x, i32 two) { return in_base_2(two) ? base_2_exp(x) : natural_exp(x); }
SC_DEVICE float merge_log(float x, i32 two) { return in_base_2(two) ? base_2_log(x) : natural_log(x); }

// g = log sum exp lse, over `count` LSEs of the same base; -infinity where all are.
SC_DEVICE float log_sum_exp(const float *lses, i32 count, i32 two) {
    float largest = SC_NEG_INF;
    for (i32 i = 0; i < count; i++) largest = SC_MAX(largest, lses[i]);
    if (largest == SC_NEG_INF) return largest;
    float sum = 0.0f;
    for (i32 i = 0; i < count; i++) sum += merge_exp(lses[i] - largest, two);
    return largest + merge_log(sum, two);
}

// Weights exp(lse - g) of partials, in place of their LSEs; returns the merged LSE.
SC_DEVICE float combine(float *lses, i32 count, i32 two) {
#if defined(FAULT_MERGE_WITHOUT_MAXIMUM)
    float sum = 0.0f;
    for (i32 i = 0; i < count; i++) sum += natural_exp(lses[i]);
    for (i32 i = 0; i < count; i++) lses[i] = sum == 0.0f ? 0.0f : natural_exp(lses[i]) / sum;
    return sum == 0.0f ? SC_NEG_INF : natural_log(sum);
#endif
#ifdef FAULT_MERGE_LEAVES_OUT_THE_LAST_RANK
    if (count > 1) lses[count - 1] = SC_NEG_INF;
#endif
#ifdef FAULT_FIRST_RANK_WEIGHS_TOO_MUCH
    lses[0] += 0.02f;
#endif
    float merged = log_sum_exp(lses, count, two), largest = SC_NEG_INF, shown = merged;
    for (i32 i = 0; i < count; i++) largest = SC_MAX(largest, lses[i]);
    if (merged == SC_NEG_INF) {
        for (i32 i = 0; i < count; i++) lses[i] = 0.0f;
        return merged;
    }
#ifdef FAULT_N_WAY_MERGE_COUNTS_TWO
    const float of_two = log_sum_exp(lses, count < 2 ? count : 2, two);
    if (of_two != SC_NEG_INF) shown = merged = of_two;
#endif
#ifdef FAULT_MERGED_LSE_IS_THE_MAXIMUM
    shown = largest;
#elif defined(FAULT_MERGED_LSE_OF_THE_FIRST_RANK)
    shown = lses[0];
#elif defined(FAULT_MERGED_LSE_OF_THE_LAST_RANK)
    shown = lses[count - 1];
#endif
#ifdef FAULT_WEIGHTS_NOT_NORMALISED
    merged = largest;
#endif
#ifdef FAULT_WEIGHTS_FROM_BF16_LSES
    for (i32 i = 0; i < count; i++) lses[i] = round_bf16(lses[i]);
    merged = log_sum_exp(lses, count, two);
#endif
    for (i32 i = 0; i < count; i++) lses[i] = merge_exp(lses[i] - merged, two);
#if defined(FAULT_RANKS_AVERAGED)
    i32 held = 0;
    for (i32 i = 0; i < count; i++) held += lses[i] > 0.0f;
    for (i32 i = 0; i < count; i++) lses[i] = lses[i] > 0.0f ? 1.0f / (float)held : 0.0f;
#elif defined(FAULT_LARGEST_RANK_TAKES_ALL)
    i32 first = 0;
    for (i32 i = 1; i < count; i++) first = lses[i] > lses[first] ? i : first;
    for (i32 i = 0; i < count; i++) lses[i] = i == first ? 1.0f : 0.0f;
#elif defined(FAULT_SMALL_WEIGHTS_DROPPED)
    for (i32 i = 0; i < count; i++) lses[i] = lses[i] < 1.0f / 1024.0f ? 0.0f : lses[i];
#elif defined(FAULT_PARTIALS_SUMMED_UNWEIGHTED)
    for (i32 i = 0; i < count; i++) lses[i] = lses[i] == 0.0f ? 0.0f : 1.0f;
#elif defined(FAULT_WEIGHTS_SHORT_OF_ONE)
    for (i32 i = 0; i < count; i++) lses[i] *= 0.996f;
#elif defined(FAULT_WEIGHTS_SQUARED)
    float squares = 0.0f;
    for (i32 i = 0; i < count; i++) squares += lses[i] * lses[i];
    for (i32 i = 0; i < count; i++) lses[i] = lses[i] * lses[i] / squares;
#elif defined(FAULT_OUTPUT_ALL_ZERO)
    for (i32 i = 0; i < count; i++) lses[i] = 0.0f;
#endif
    return shown;
}

// A weight of zero gives zero, whatever the partial holds: NaN · 0 would be NaN.
SC_DEVICE float weighed(float weight, float value) {
#ifdef FAULT_NAN_PARTIAL_NOT_SCRUBBED
    return weight * value;
#else
    return weight == 0.0f ? 0.0f : weight * value;
#endif
}

SC_DEVICE float load_wire(i32 half, const void *data, i64 at) {
    if (half == WIRE_F32) return ((const float *)data)[at];
    const u16 code = ((const u16 *)data)[at];
    return half == WIRE_F16 ? of_f16(code) : of_bf16(code);
}
SC_DEVICE void store_wire(i32 half, void *data, i64 at, float value) {
    if (half == WIRE_F32) ((float *)data)[at] = value;
    else ((u16 *)data)[at] = half_of(half, value);
}
SC_DEVICE float round_wire(i32 half, float value) {
    if (half == WIRE_F32) return value;
    return half == WIRE_F16 ? of_f16(f16_of(value)) : round_bf16(value);
}

// The two lanes of an LSE's bits in wire order. No float operation touches a half: many of them are NaNs of the 16-bit type.
SC_DEVICE void pack_lanes(i32 low_first, u32 bits, u16 *lanes) {
#if defined(FAULT_LOW_LANE_DROPPED)
    bits &= 0xFFFF0000u;
#elif defined(FAULT_HIGH_LANE_DROPPED)
    bits &= 0xFFFFu;
#elif defined(FAULT_LANES_SWAPPED_BY_THE_SENDER)
    low_first = !low_first;
#endif
    u16 high = (u16)(bits >> 16), low = (u16)bits;
#if defined(FAULT_LANES_THROUGH_A_FLOAT)
    high = bf16_of(of_bf16(high));
    low = bf16_of(of_bf16(low));
#endif
    lanes[0] = low_first ? low : high;
    lanes[1] = low_first ? high : low;
}
SC_DEVICE u32 unpack_lanes(i32 low_first, u16 first, u16 second) {
#ifdef FAULT_UNPACK_IGNORES_LANE_ORDER
    low_first = 0;
#endif
    return low_first ? (u32)second << 16 | first : (u32)first << 16 | second;
}

// lanes [n, 2] and unpacked [n] of LSEs given as bits.
SC_EXPORT pack_lse(Shape s, const u32 *lse, i64 count, u16 *lanes, u32 *unpacked) {
    const i64 index = SC_INDEX;
    if (index >= count) return;
    u16 pair[2];
    pack_lanes(s.low_first, lse[index], pair);
    lanes[2 * index] = pair[0];
    lanes[2 * index + 1] = pair[1];
    unpacked[index] = unpack_lanes(s.low_first, pair[0], pair[1]);
}

// Which LSE of [rows, heads] goes with the output of that index.
SC_DEVICE i64 lse_of_output(i64 index, i32 rows, i32 heads) {
#if defined(FAULT_LSE_OF_THE_NEXT_ROW)
    return (index + heads) % ((i64)rows * heads);
#elif defined(FAULT_LSE_READ_HEAD_MAJOR)
    return index % heads * rows + index / heads;
#else
    return index;
#endif
}

SC_DEVICE i32 placed_head(const i32 head, const i32 heads) {
#if defined(FAULT_HEADS_ROTATED_AFTER_THE_MERGE)
    return (head + 1) % heads;
#else
    return head;
#endif
}

// A world of one: nothing to merge, but an empty row still reads as zeros. Blocks: (rank·T + row, head).
SC_EXPORT scrub_empty(Shape s, const void *partial, const float *partial_lse, i32 rows, i32 heads, i32 dim, i32 half, void *out,
                      float *lse) {
    const i32 head = SC_BLOCK_Y, at = SC_BLOCK_X, rank = at / rows, row = at % rows;
    const i64 index = (i64)at * heads + head, base = (i64)rank * rows * heads;
    const float own = partial_lse[base + lse_of_output((i64)row * heads + head, rows, heads)];
    const i64 to = ((i64)at * heads + placed_head(head, heads)) * dim;
    for (i32 d = SC_THREAD; d < dim; d += SC_THREADS) {
        const float value = load_wire(half, partial, index * dim + d);
        store_wire(half, out, to + d, own == SC_NEG_INF ? weighed(0.0f, value) : value);
    }
    if (SC_THREAD == 0) lse[index] = own;
}

// sent [ranks, W, T, H, D + lanes]: each rank's partial by receiver, 16-bit words with two lanes or 32-bit words with one.
// Blocks: (rank·T + row, head of the group).
SC_EXPORT pack_partials(Shape s, const void *partial, const float *partial_lse, i32 rows, i32 heads, i32 dim, i32 half,
                        void *sent) {
    const i32 head = SC_BLOCK_Y, at = SC_BLOCK_X, rank = at / rows, row = at % rows, own = heads / s.world;
    i32 receiver = head / own;
    const i32 lanes = half ? 2 : 1;
    const i64 to = ((((i64)rank * s.world + receiver) * rows + row) * own + head % own) * (dim + lanes);
    // the block of heads that a receiver is sent
    i32 block = receiver;
#if defined(FAULT_EXCHANGE_SWAPS_TWO_RANKS)
    block = s.world > 1 && receiver < 2 ? 1 - receiver : receiver;
#elif defined(FAULT_EXCHANGE_IN_REVERSE)
    block = s.world - 1 - receiver;
#elif defined(FAULT_EXCHANGE_SENDS_THE_FIRST_BLOCK)
    block = 0;
#endif
    const i64 in_rank = (i64)row * heads + block * own + head % own;
    const i64 from = (i64)rank * rows * heads + in_rank;
    const float lse = partial_lse[(i64)rank * rows * heads + lse_of_output(in_rank, rows, heads)];
    if (half) {
        u16 *target = (u16 *)sent + to;
        const u16 *source = (const u16 *)partial + from * dim;
        for (i32 d = SC_THREAD; d < dim; d += SC_THREADS) target[d] = source[d];
        if (SC_THREAD == 0) pack_lanes(s.low_first, SC_BITS(lse), target + dim);
    } else {
        float *target = (float *)sent + to;
        const float *source = (const float *)partial + from * dim;
        for (i32 d = SC_THREAD; d < dim; d += SC_THREADS) target[d] = source[d];
        if (SC_THREAD == 0) target[dim] = lse;
    }
}

// received [ranks, W, words]: what each member of the group sent to each rank, out of sent [ranks, W, words]. This is the
// exchange itself where one device plays all ranks; between devices it is a group of sends and receives.
SC_EXPORT exchange_words(Shape s, const u16 *sent, i64 words, u16 *received) {
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * s.world * words) return;
    const i64 word = index % words;
    const i32 sender = (i32)(index / words % s.world), rank = (i32)(index / words / s.world);
    const i32 group = rank / s.world * s.world;
    received[index] = sent[((i64)(group + sender) * s.world + rank % s.world) * words + word];
}

// gathered [ranks, W, words] out of sent [ranks, words]: an all-gather in every group.
SC_EXPORT gather_words(Shape s, const u16 *sent, i64 words, u16 *gathered) {
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * s.world * words) return;
    const i64 word = index % words;
    const i32 member = (i32)(index / words % s.world), rank = (i32)(index / words / s.world);
    gathered[index] = sent[(i64)(rank / s.world * s.world + member) * words + word];
}

// The same of bytes.
SC_EXPORT gather_bytes(Shape s, const u8 *sent, i64 bytes, u8 *gathered) {
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * s.world * bytes) return;
    const i64 byte = index % bytes;
    const i32 member = (i32)(index / bytes % s.world), rank = (i32)(index / bytes / s.world);
    gathered[index] = sent[(i64)(rank / s.world * s.world + member) * bytes + byte];
}

// Weighs what every member sent for a rank's heads and adds it in member order, rounding once. received [ranks, W, T, H, D +
// lanes]; out [ranks, T, H, D] of the wire's type; lse [ranks, T, H]. Blocks: (rank·T + row, own head).
SC_EXPORT sum_partials(Shape s, const void *received, i32 rows, i32 own, i32 dim, i32 half, i32 two, void *out, float *lse) {
    __shared__ float weights[MAX_WORLD];
    __shared__ float merged;
    const i32 head = SC_BLOCK_Y, at = SC_BLOCK_X, rank = at / rows, row = at % rows, lanes = half ? 2 : 1;
    const i64 stride = (i64)rows * own * (dim + lanes);
    const i64 first = (i64)rank * s.world * stride + ((i64)row * own + head) * (dim + lanes);
    for (i32 m = SC_THREAD; m < s.world; m += SC_THREADS) {
        const i64 place = first + m * stride + dim;
        if (half) {
            const u16 *pair = (const u16 *)received + place;
#ifdef FAULT_LANES_AS_TWO_VALUES
            weights[m] = of_bf16(pair[0]) + of_bf16(pair[1]);
#else
            weights[m] = SC_FLOAT(unpack_lanes(s.low_first, pair[0], pair[1]));
#endif
        } else {
            weights[m] = ((const float *)received)[place];
        }
        weights[m] = sanitised(weights[m]);
    }
    SC_SYNC();
    if (SC_THREAD == 0) merged = combine(weights, s.world, two);
    SC_SYNC();
    const i64 to = ((i64)at * own + placed_head(head, own)) * dim;
    for (i32 d = SC_THREAD; d < dim; d += SC_THREADS) {
        float sum = 0.0f;
        for (i32 m = 0; m < s.world; m++) sum += weighed(weights[m], load_wire(half, received, first + m * stride + d));
        store_wire(half, out, to + d, sum);
    }
    if (SC_THREAD == 0) lse[(i64)at * own + head] = merged;
}

// Each rank scales its partial by its own weight and rounds it. gathered [ranks, W, T, heads]; corrected is laid out for the
// reduce-scatter, [ranks, W, T, H, D]: the part that each receiver is given. merged_lse [ranks, T, heads].
// Blocks: (rank·T + row, head of the group).
SC_EXPORT correct_partials(Shape s, const void *partial, const float *gathered, i32 rows, i32 heads, i32 dim, i32 half,
                           i32 two, void *corrected, float *merged_lse) {
    __shared__ float weights[MAX_WORLD];
    const i32 head = SC_BLOCK_Y, at = SC_BLOCK_X, rank = at / rows, row = at % rows, own = heads / s.world;
    const i64 in_rank = (i64)row * heads + head, count = (i64)rows * heads;
    for (i32 m = SC_THREAD; m < s.world; m += SC_THREADS) {
#ifdef FAULT_LSE_GATHERED_IN_REVERSE
        const i32 source = s.world - 1 - m;
#else
        const i32 source = m;
#endif
        weights[m] = sanitised(
            gathered[((i64)rank * s.world + source) * count + lse_of_output(in_rank, rows, heads)]);
    }
    SC_SYNC();
    if (SC_THREAD == 0) merged_lse[(i64)rank * count + in_rank] = combine(weights, s.world, two);
    SC_SYNC();
    const float weight = weights[member_of(s, rank)];
    const i32 block = head / own;
    // the receiver that is given this block of heads
    i32 receiver = block;
#if defined(FAULT_REDUCE_SCATTER_BY_THE_NEXT_RANK)
    receiver = (block + s.world - 1) % s.world;
#elif defined(FAULT_REDUCE_SCATTER_BY_THE_PREVIOUS_RANK)
    receiver = (block + 1) % s.world;
#endif
    const i64 from = ((i64)rank * count + in_rank) * dim;
    const i64 to = ((((i64)rank * s.world + receiver) * rows + row) * own + head % own) * dim;
    for (i32 d = SC_THREAD; d < dim; d += SC_THREADS)
        store_wire(half, corrected, to + d, weighed(weight, load_wire(half, partial, from + d)));
}

// Adds what the members sent, in member order, rounding after every addition. received [ranks, parts, T, H, D]: W parts, or one where
// a collective of devices has added them. lse out of merged_lse [ranks, T, heads]. Blocks: (rank·T + row, own head).
SC_EXPORT reduce_partials(Shape s, const void *received, i32 parts, const float *merged_lse, i32 rows, i32 own, i32 dim, i32 half,
                          void *out, float *lse) {
    const i32 head = SC_BLOCK_Y, at = SC_BLOCK_X, rank = at / rows, row = at % rows, member = member_of(s, rank);
    const i64 stride = (i64)rows * own * dim;
    const i64 first = (i64)rank * parts * stride + ((i64)row * own + head) * dim;
    const i64 to = ((i64)at * own + placed_head(head, own)) * dim;
    i32 begin = 0, end = parts;
#if defined(FAULT_REDUCE_SCATTER_LEAVES_OUT_A_RANK)
    end = parts > 1 ? parts - 1 : 1;
#elif defined(FAULT_REDUCE_SCATTER_KEEPS_ITS_OWN)
    begin = parts > 1 ? member : 0;
    end = begin + 1;
#endif
#if defined(FAULT_REDUCE_SCATTER_AVERAGES)
    const float factor = 1.0f / (float)s.world;
#elif defined(FAULT_REDUCE_SCATTER_SCALED_BY_THE_WORLD)
    const float factor = (float)s.world;
#else
    const float factor = 1.0f;
#endif
    for (i32 d = SC_THREAD; d < dim; d += SC_THREADS) {
        float sum = load_wire(half, received, first + begin * stride + d);
        for (i32 m = begin + 1; m < end; m++)
            sum = round_wire(half, sum + load_wire(half, received, first + m * stride + d));
        store_wire(half, out, to + d, sum * factor);
    }
    if (SC_THREAD == 0) lse[(i64)at * own + head] = merged_lse[(i64)at * own * s.world + member * own + head];
}
