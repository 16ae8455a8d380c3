// The interleaved layout: who owns a position, where it lies, what a row sees. Formulas: ATOM `dcp_ops.py` (`dcp_owner_rank`,
// `dcp_local_index`, `get_dcp_local_seq_lens`, `get_dcp_local_window_lens`), vLLM `cp_utils.py` (`cp_local_slot`).

// The rank of the session that a device plays as its `place`-th, and what that rank is in its group.
SC_DEVICE i32 rank_at(const Shape &s, i32 place) { return s.first + place * s.step; }
SC_DEVICE i32 member_of(const Shape &s, i32 place) { return rank_at(s, place) % s.world; }

SC_DEVICE i32 owner_of(const Shape &s, i64 position) {
#ifdef FAULT_OWNER_ROTATED_FORWARD
    return (i32)((position / s.interleave + 1) % s.world);
#elif defined(FAULT_OWNERS_IN_REVERSE)
    return s.world - 1 - (i32)(position / s.interleave % s.world);
#else
    return (i32)(position / s.interleave % s.world);
#endif
}

SC_DEVICE i64 local_index(const Shape &s, i64 position) {
    return position / ((i64)s.interleave * s.world) * s.interleave + position % s.interleave;
}

SC_DEVICE i32 local_len(const Shape &s, i64 len, i32 member) {
    const i64 round = (i64)s.interleave * s.world, rounds = len / round;
    i64 rest = len - rounds * round - (i64)member * s.interleave;
    rest = rest < 0 ? 0 : rest > s.interleave ? s.interleave : rest;
    return (i32)(rounds * s.interleave + rest);
}

// Tokens that row `row` of `query_len` sees of a request of `seq_len` on a member.
SC_DEVICE i32 seen_len(const Shape &s, i64 seq_len, i32 query_len, i32 row, i32 member, i32 causal) {
#ifdef FAULT_NO_MASK_BETWEEN_ROWS
    causal = 0;
#endif
#ifdef FAULT_DRAFT_BLOCK_CAUSAL
    causal = 1;
#endif
    if (!causal) {
#if defined(FAULT_DRAFT_LENGTH_OF_RANK_ZERO)
        member = 0;
#elif defined(FAULT_DRAFT_BLOCK_UNSEEN)
        seq_len = seq_len > query_len ? seq_len - query_len : 0;
#elif defined(FAULT_DRAFT_MISSES_THE_LAST_TOKEN)
        seq_len = seq_len > 0 ? seq_len - 1 : 0;
#elif defined(FAULT_DRAFT_WALKS_THE_GLOBAL_LENGTH)
        return (i32)seq_len;
#endif
        return local_len(s, seq_len, member);
    }
#if defined(FAULT_EDGE_ON_RANK_ZERO)
    member = 0;
#elif defined(FAULT_EDGE_ON_THE_LAST_RANK)
    member = s.world - 1;
#elif defined(FAULT_ROWS_IN_REVERSE)
    row = query_len - 1 - row;
#elif defined(FAULT_COMMITTED_PREFIX_ROWS)
    row = -1;
#elif defined(FAULT_ROW_MISSES_ITSELF)
    row -= 1;
#elif defined(FAULT_ROW_SEES_ITS_SUCCESSOR)
    row += 1;
#elif defined(FAULT_LOCAL_CAUSAL_TRIM)
    const i32 trimmed = local_len(s, seq_len, member) + 1 + row - query_len;
    return trimmed < 0 ? 0 : trimmed;
#endif
    const i64 edge = seq_len + 1 + row - query_len;
    return local_len(s, edge < 0 ? 0 : edge, member);
}

// Physical block of an entry of a request's block table; -1, and the error word set, where there is none.
SC_DEVICE i32 block_of(const Shape &s, const Batch &b, const i32 *table, i32 request, i64 entry, i32 *error) {
    if (request >= b.requests || entry >= b.width) {
        SC_ATOMIC_MAX(error, FAILURE_TABLE_WIDTH);
        return -1;
    }
#ifdef FAULT_BLOCKS_TAKEN_AS_CONTIGUOUS
    const i32 id = table[(i64)request * b.width] + (i32)entry;
#else
    const i32 id = table[(i64)request * b.width + entry];
#endif
    if (id < 0 || id >= s.blocks) {
        SC_ATOMIC_MAX(error, FAILURE_BLOCK_ID);
        return -1;
    }
    return id;
}

// Slot of the local token of a request on any rank: its page is that of B local tokens. -1 as block_of.
SC_DEVICE i64 slot_of_local(const Shape &s, const Batch &b, const i32 *table, i32 request, i32 local, i32 *error) {
#ifdef FAULT_PAGE_OF_VIRTUAL_BLOCK
    const i32 page = s.block * s.world;
    const i32 id = block_of(s, b, table, request, local / page, error);
    return id < 0 ? -1 : (i64)id * s.block + local % page % s.block;
#else
    const i32 id = block_of(s, b, table, request, local / s.block, error);
    return id < 0 ? -1 : (i64)id * s.block + local % s.block;
#endif
}

// Slot of a position on its owner. -1 as block_of.
SC_DEVICE i64 slot_of_position(const Shape &s, const Batch &b, const i32 *table, i32 request, i64 position, i32 *error) {
#ifdef FAULT_SLOT_BY_PHYSICAL_BLOCK
    const i32 id = block_of(s, b, table, request, position / s.block, error);
#else
    const i32 id = block_of(s, b, table, request, position / ((i64)s.block * s.world), error);
#endif
    return id < 0 ? -1 : (i64)id * s.block + local_index(s, position) % s.block;
}

// Rows of the batch [rows]: request, place among its rows, and how many there are; request -1 for padding.
struct Row {
    i32 request, row, query_len;
};

SC_DEVICE Row row_of(const Batch &b, const i32 *starts, i32 index) {
    Row row = {-1, 0, 0};
    // the last request that starts at or before the row and is not empty
    i32 low = 0, high = b.requests;
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (starts[middle + 1] <= index) low = middle + 1;
        else high = middle;
    }
    if (low >= b.requests) return row;
    row.request = low;
    row.row = index - starts[low];
    row.query_len = starts[low + 1] - starts[low];
#ifdef FAULT_ALL_ROWS_OF_THE_FIRST_REQUEST
    row.request = 0;
#endif
    return row;
}

// row_lens [ranks, rows] and row_requests [rows]. One thread a rank and row.
SC_EXPORT row_metadata(Shape s, const Batch *batch, const i32 *seq_lens, const i32 *starts, i32 rows, i32 *row_lens,
                       i32 *row_requests) {
    const Batch b = *batch;
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * rows) return;
    const i32 rank = (i32)(index / rows), at = (i32)(index % rows);
    const Row row = row_of(b, starts, at);
    i32 len = 0;
    if (row.request >= 0)
        len = seen_len(s, seq_lens[row.request], row.query_len, row.row, member_of(s, rank), b.causal);
#ifdef FAULT_PADDING_ROWS_ATTEND
    if (row.request < 0 && b.requests > 0) {
        const i32 last = b.requests - 1, query_len = starts[last + 1] - starts[last];
        len = seen_len(s, seq_lens[last], query_len, query_len - 1, member_of(s, rank), b.causal);
        row_requests[at] = last;
        row_lens[index] = len;
        return;
    }
#endif
    row_lens[index] = len;
    if (rank == 0) row_requests[at] = row.request;
}

// local_lens [ranks, n] and blocks_needed [ranks, n]. One thread a rank and request.
SC_EXPORT request_metadata(Shape s, const Batch *batch, const i32 *seq_lens, i32 *local_lens, i32 *blocks_needed) {
    const i32 requests = batch->requests;
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * requests) return;
    const i32 rank = (i32)(index / requests), len = seq_lens[index % requests];
    local_lens[index] = local_len(s, len, member_of(s, rank));
    blocks_needed[index] = (local_len(s, len, 0) + s.block - 1) / s.block;
}

// slots [ranks, total] of every position of every request, -1 where not owned; firsts [n + 1]: first index of each request.
SC_EXPORT position_slots(Shape s, const Batch *batch, const i32 *table, const i64 *firsts, i64 total, i64 *slots, i32 *error) {
    const Batch b = *batch;
    const i64 index = SC_INDEX;
    if (index >= s.ranks * total) return;
    const i32 rank = (i32)(index / total);
    const i64 at = index % total;
    i32 low = 0, high = b.requests;
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (firsts[middle + 1] <= at) low = middle + 1;
        else high = middle;
    }
    const i64 position = at - firsts[low];
    slots[index] =
        owner_of(s, position) == member_of(s, rank) ? slot_of_position(s, b, table, low, position, error) : -1;
}

// sub_pages [ranks, n, pages]: the block table in pages of `page` tokens, -1 beyond those that a request needs.
SC_EXPORT sub_page_table(Shape s, const Batch *batch, const i32 *seq_lens, const i32 *table, i32 page, i32 pages, i32 *out,
                         i32 *error) {
    const Batch b = *batch;
    const i64 index = SC_INDEX;
    if (index >= (i64)s.ranks * b.requests * pages) return;
    const i32 request = (i32)(index / pages % b.requests), at = (i32)(index % pages), parts = s.block / page;
    const i32 needed = (local_len(s, seq_lens[request], 0) + s.block - 1) / s.block * parts;
    out[index] = -1;
    if (at >= needed) return;
    const i32 id = block_of(s, b, table, request, at / parts, error);
    if (id >= 0) out[index] = id * parts + at % parts;
}
