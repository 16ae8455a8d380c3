// Attention over selected tokens: each rank lists the slots of the tokens of a row that it owns (ATOM `dcp_sparse_filter`, vLLM
// `filter_and_convert_dcp_index`), and attends to the entries of a row's list one after the other. Nothing is masked: a selected
// token is one that the row sees. Works with any number of threads. Roundings are those of attend.cu.

// How slots are listed: k entries a row, one row behind the other, or the same with an entry of slot 0 where a row has none.
enum List { LIST_PADDED = 0, LIST_PACKED = 1, LIST_PACKED_DUMMY = 2 };

// What every kernel here is told of the lists.
struct Listing {
    i32 rows;   // T
    i32 top_k;  // most tokens k of a row
    i32 form;   // List
};

SC_DEVICE bool listed_here(const Shape &s, i64 position, i32 member) {
#if defined(FAULT_SPARSE_LIST_NOT_FILTERED)
    return true;
#elif defined(FAULT_SPARSE_OWNER_WITHOUT_INTERLEAVE)
    return position % s.world == member;
#else
    return position / s.interleave % s.world == member;
#endif
}

// Whether a position is a token that the rank lists for a row that sees `seen` tokens on it; -1 is none.
SC_DEVICE bool is_listed(const Shape &s, i32 position, i32 member, i32 seen) {
#ifdef FAULT_SELECTED_HELD_TO_THE_LOCAL_LENGTH
    if (position >= seen) return false;
#endif
    return position >= 0 && listed_here(s, position, member);
}

// Slot of a listed position. -1 as block_of.
SC_DEVICE i64 listed_slot(const Shape &s, const Batch &b, const i32 *table, i32 request, i64 position, i32 *error) {
#ifdef FAULT_SPARSE_ENTRY_OF_PHYSICAL_BLOCKS
    const i64 entry = position / s.block;
#else
    const i64 entry = position / ((i64)s.block * s.world);
#endif
    const i32 id = block_of(s, b, table, request, entry, error);
    if (id < 0) return -1;
#if defined(FAULT_SPARSE_OFFSET_IS_GLOBAL)
    return (i64)id * s.block + position % s.block;
#elif defined(FAULT_SPARSE_OFFSET_WITHOUT_INTERLEAVE)
    return (i64)id * s.block + position / s.world % s.block;
#else
    return (i64)id * s.block + local_index(s, position) % s.block;
#endif
}

// Entries of a list with that many tokens.
SC_DEVICE i32 entries_of(const Listing &l, i32 tokens) {
#if defined(FAULT_SPARSE_EMPTY_ROW_WITHOUT_DUMMY)
    const bool dummy = false;
#elif defined(FAULT_SPARSE_EMPTY_ROW_HAS_DUMMY)
    const bool dummy = true;
#else
    const bool dummy = l.form == LIST_PACKED_DUMMY;
#endif
    if (l.form == LIST_PADDED) return l.top_k;
    return dummy && tokens < 1 ? 1 : tokens;
}

SC_DEVICE i32 given_tokens(const i32 *topk, const Listing &l, i32 row) {
    i32 count = 0;
    while (count < l.top_k && topk[(i64)row * l.top_k + count] >= 0) count++;
    return count;
}

// counts [ranks, T]: tokens of a row that a rank owns; entries [ranks, T]: those of its list. One thread a rank and row.
SC_EXPORT list_counts(Shape s, Listing l, const i32 *topk, const i32 *row_lens, i32 *counts, i32 *entries) {
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * l.rows) return;
    const i32 rank = (i32)(index / l.rows), row = (i32)(index % l.rows), member = member_of(s, rank);
    const i32 given = given_tokens(topk, l, row);
    i32 count = 0;
    for (i32 i = 0; i < given; i++) count += is_listed(s, topk[(i64)row * l.top_k + i], member, row_lens[index]);
    entries[index] = entries_of(l, count);
#ifdef FAULT_SPARSE_EMPTY_ROW_IS_COUNTED
    if (count < 1) count = 1;
#endif
    counts[index] = count;
}

// indptr [ranks, T+1]: first entry of each row, then the end of the last. One thread a rank.
SC_EXPORT list_starts(Shape s, Listing l, const i32 *entries, i32 *indptr) {
    const i64 rank = SC_INDEX;
    if (rank >= s.ranks) return;
    const i32 most = l.rows * l.top_k;
    i32 first = 0;
    for (i32 row = 0; row <= l.rows; row++) {
        indptr[rank * (l.rows + 1) + row] = first;
        if (row < l.rows) first += entries[rank * l.rows + row];
        // a list beyond the tensor is cut
        if (first > most) first = most;
    }
}

// slots [ranks, T·k], -1 before. One thread a rank and row.
SC_EXPORT list_slots(Shape s, Listing l, const Batch *batch, const i32 *table, const i32 *row_requests, const i32 *topk,
                     const i32 *row_lens, const i32 *indptr, i32 *slots, i32 *error) {
    const Batch b = *batch;
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * l.rows) return;
    const i32 rank = (i32)(index / l.rows), row = (i32)(index % l.rows), member = member_of(s, rank);
    const i32 *own = indptr + (i64)rank * (l.rows + 1) + row;
    i32 *list = slots + (i64)rank * l.rows * l.top_k;
    const i32 given = given_tokens(topk, l, row);
#ifdef FAULT_SELECTED_BLOCKS_OF_THE_ROW
    const i32 request = row < b.requests ? row : b.requests - 1;
#else
    const i32 request = row_requests[row] < 0 ? 0 : row_requests[row];
#endif
    i32 at = own[0];
    for (i32 i = 0; i < given && at < own[1]; i++) {
        const i32 position = topk[(i64)row * l.top_k + i];
        if (is_listed(s, position, member, row_lens[index]))
            list[at++] = (i32)listed_slot(s, b, table, request, position, error);
    }
#ifdef FAULT_SPARSE_PADDING_IS_SLOT_ZERO
    const i32 fill = 0;
#else
    const i32 fill = l.form == LIST_PACKED_DUMMY ? 0 : -1;
#endif
    while (at < own[1]) list[at++] = fill;
}

// The part of a rank's slots that a row attends to.
struct Attended {
    i32 first, count;
};

SC_DEVICE Attended attended_of(const Shape &s, const Listing &l, const Batch &b, const i32 *starts, const i32 *counts,
                               const i32 *indptr, i32 rank, i32 row) {
    const Row place = row_of(b, starts, row);
    i32 of = row;
#if defined(FAULT_SELECTED_ROWS_SHARE_THE_FIRST_LIST)
    of = row - place.row;
#elif defined(FAULT_SELECTED_EMPTY_ROW_KEEPS_THE_ONE_BEFORE)
    while (of > 0 && counts[(i64)rank * l.rows + of] <= 0) of--;
#endif
    const i32 *own = indptr + (i64)rank * (l.rows + 1) + of;
    Attended attended = {own[0], counts[(i64)rank * l.rows + of]};
#if defined(FAULT_SELECTED_FULL_LIST_LOSES_ITS_LAST)
    if (attended.count >= l.top_k) attended.count = l.top_k - 1;
#elif defined(FAULT_SELECTED_LIST_MASKED_CAUSALLY)
    const i32 behind = place.request < 0 ? 0 : place.query_len - 1 - place.row;
    attended.count = attended.count > behind ? attended.count - behind : 0;
#elif defined(FAULT_SELECTED_LISTS_AT_STRIDES_OF_K)
    attended.first = of * l.top_k;
#elif defined(FAULT_SELECTED_DUMMY_IS_ATTENDED_TO)
    if (l.form == LIST_PACKED_DUMMY) attended.count = own[1] - own[0];
#elif defined(FAULT_SELECTED_FILL_IS_SLOT_ZERO)
    if (l.form == LIST_PADDED) attended.count = own[1] - own[0];
#endif
    return attended;
}

// lens [ranks, T]: entries that a row attends to. One thread a rank and row.
SC_EXPORT list_lens(Shape s, Listing l, const Batch *batch, const i32 *starts, const i32 *counts, const i32 *indptr, i32 *lens) {
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * l.rows) return;
    const i32 rank = (i32)(index / l.rows), row = (i32)(index % l.rows);
    lens[index] = attended_of(s, l, *batch, starts, counts, indptr, rank, row).count;
}

// The slot that an entry of a list stands for; -1, and the error word set, where it is none of the cache's.
SC_DEVICE i64 entry_of(const Shape &s, i32 entry, i32 *error) {
#ifdef FAULT_SELECTED_FILL_IS_SLOT_ZERO
    if (entry < 0) entry = 0;
#endif
    if (entry >= 0 && entry < (i64)s.blocks * s.block) return entry;
    SC_ATOMIC_MAX(error, FAILURE_BLOCK_ID);
    return -1;
}

// Statistics of one segment: max, sum [ranks, T, width], acc [ranks, T, width, Dv]. Latent attention: one KV head, whose key begins
// with the value. Blocks: (rank·T + row, HEADS heads).
SC_EXPORT list_attend(Shape s, Listing l, const Batch *batch, const i32 *starts, const i32 *counts, const i32 *indptr,
                        const i32 *slots, const u16 *query, const void *keys, float *max_out, float *sum_out, float *acc_out,
                        i32 *error) {
    __shared__ i64 tile_slots[TILE];
    __shared__ float p[HEADS * TILE], max[HEADS], sum[HEADS], factor[HEADS];
    const i32 at = SC_BLOCK_X, rank = at / l.rows, row = at % l.rows, first = SC_BLOCK_Y * HEADS;
    const i32 heads = s.width - first < HEADS ? s.width - first : HEADS;
    const Attended own = attended_of(s, l, *batch, starts, counts, indptr, rank, row);
    if (heads <= 0 || own.count <= 0) return;
    const i64 base = (i64)at * s.width + first, rank_row = (i64)rank * s.blocks * s.block;
    const i32 *list = slots + (i64)rank * l.rows * l.top_k + own.first, most = l.rows * l.top_k - own.first;
    const u16 *q = query + base * s.key_dim;
    float *acc = acc_out + base * s.value_dim;
#ifdef FAULT_SELECTED_SCALE_IGNORED
    const Paged source = {keys, keys, rank_row, rank_row, s.dtype, 1.0f};
#else
    const Paged source = {keys, keys, rank_row, rank_row, s.dtype, read_scale(s)};
#endif
    const float scale = score_scale(s);
    for (i32 h = SC_THREAD; h < HEADS; h += SC_THREADS) {
        max[h] = SC_NEG_INF;
        sum[h] = 0.0f;
    }
    for (i32 tile = 0; tile < own.count; tile += TILE) {
        const i32 count = own.count - tile < TILE ? own.count - tile : TILE;
        SC_SYNC();
        for (i32 t = SC_THREAD; t < count; t += SC_THREADS)
            tile_slots[t] = tile + t < most ? entry_of(s, list[tile + t], error) : entry_of(s, -1, error);
        SC_SYNC();
        // a thread a token and half of the heads, so that a key is read twice
        for (i32 i = SC_THREAD; i < 2 * TILE; i += SC_THREADS) {
            const i32 t = i % TILE, half = i / TILE * (HEADS / 2);
            if (t >= count || half >= heads) continue;
            float dot[HEADS / 2];
            for (i32 h = 0; h < HEADS / 2; h++) dot[h] = 0.0f;
            for (i32 d = 0; d < s.key_dim; d++) {
                const float k = tile_slots[t] >= 0 ? source.key(s, tile_slots[t], 0, d) : SC_NAN;
                for (i32 h = 0; h < HEADS / 2; h++)
                    if (half + h < heads) dot[h] = SC_FMA(of_bf16(q[(i64)(half + h) * s.key_dim + d]), k, dot[h]);
            }
            for (i32 h = 0; h < HEADS / 2; h++) p[(half + h) * TILE + t] = dot[h] * scale;
        }
        SC_SYNC();
        for (i32 h = SC_THREAD; h < heads; h += SC_THREADS) {
            const float before = max[h];
            float after = before, run[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (i32 t = 0; t < count; t++) after = SC_MAX(after, p[h * TILE + t]);
            for (i32 t = 0; t < count; t++) {
                const float e = natural_exp(p[h * TILE + t] - shift_of(after));
                run[t % 4] += e;
                p[h * TILE + t] = round_bf16(e);
            }
            max[h] = after;
            factor[h] = tile == 0 ? 0.0f : rescale_of(shift_of(before), shift_of(after));
            sum[h] = SC_FMA(sum[h], factor[h], (run[0] + run[1]) + (run[2] + run[3]));
        }
        SC_SYNC();
        // a thread a column, all heads; four running sums of at most sixteen tokens each
        for (i32 d = SC_THREAD; d < s.value_dim; d += SC_THREADS) {
            float run[HEADS][4];
            for (i32 h = 0; h < HEADS; h++)
                for (i32 j = 0; j < 4; j++) run[h][j] = 0.0f;
            for (i32 t = 0; t < count; t++) {
                const float v = tile_slots[t] >= 0 ? source.value(s, tile_slots[t], 0, d) : SC_NAN;
                for (i32 h = 0; h < heads; h++) run[h][t % 4] = SC_FMA(p[h * TILE + t], v, run[h][t % 4]);
            }
            for (i32 h = 0; h < heads; h++) {
                const i64 to = (i64)h * s.value_dim + d;
                const float here = (run[h][0] + run[h][1]) + (run[h][2] + run[h][3]);
                acc[to] = tile == 0 ? here : SC_FMA(acc[to], factor[h], here);
            }
        }
    }
    SC_SYNC();
    for (i32 h = SC_THREAD; h < heads; h += SC_THREADS) {
        max_out[base + h] = max[h];
        sum_out[base + h] = sum[h];
    }
}
