// Prefill context parallelism: which rows of a batch each rank runs, what they see, how they come back, and who writes their KV.
// Formulas: vLLM `PCPManager` (chunks from both ends, decodes on every rank or on one), ATOM `pcp_utils` (round robin over the flattened
// batch), SGLang `--cp-strategy` (zigzag). Its ranks are the operation's own and have nothing to do with those of the session.

enum Strategy {
    STRATEGY_HEAD_TAIL = 0,
    STRATEGY_HEAD_TAIL_OR_WHOLE = 1,
    STRATEGY_ZIGZAG = 2,
    STRATEGY_ROUND_ROBIN = 3,
    STRATEGY_CONTIGUOUS = 4
};
enum Decodes { DECODES_SPLIT = 0, DECODES_REPLICATED = 1, DECODES_OWNED = 2 };

// What is asked for; mirrored in Rust, field by field.
struct Split {
    i32 world;     // ranks P
    i32 strategy;  // Strategy
    i32 decodes;   // Decodes
    i32 least;     // rows that a rank runs at least
    i32 requests;  // n
    i32 rows;      // N
};

// A run of rows: `count` of them from `first` on.
struct Run {
    i32 first, count;
};

// A row that a rank runs: its row of the batch (-1: none), its place in its chunk, and whether every rank has it.
struct LocalRow {
    i32 row, in_chunk, everywhere;
};

SC_DEVICE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }

// Rows of each of so many chunks.
SC_DEVICE i32 chunk_rows(i32 rows, i32 chunks) {
#ifdef FAULT_PCP_CHUNK_ROUNDED_DOWN
    return rows / chunks;
#else
    return (rows + chunks - 1) / chunks;
#endif
}

// Chunk `index` of a sequence; a short one at the end, none behind it.
SC_DEVICE Run chunk_at(i32 index, i32 size, i32 rows) {
#ifdef FAULT_PCP_CHUNK_NOT_CLAMPED
    return Run{index * size, size};
#endif
    const i32 first = smaller(index * size, rows);
    const Run own = {first, smaller(first + size, rows) - first};
#if defined(FAULT_PCP_ABSENT_CHUNK_HAS_A_ROW)
    if (own.count == 0 && rows > 0) return Run{rows - 1, 1};
#elif defined(FAULT_PCP_SHORT_CHUNK_DROPPED)
    if (own.count < size) return Run{first, 0};
#endif
    return own;
}

// The chunk from the end that goes with a rank's chunk from the front.
SC_DEVICE i32 tail_of(const Split &s, i32 rank) {
#ifdef FAULT_PCP_TAIL_CHUNK_OFF_BY_ONE
    return 2 * s.world - rank;
#else
    return 2 * s.world - 1 - rank;
#endif
}

// Block `index` of 2P that differ by one row at most, the longer ones first.
SC_DEVICE Run block_at(const Split &s, i32 index, i32 rows) {
    const i32 blocks = 2 * s.world, each = rows / blocks, longer = rows % blocks;
    const i32 first = index * each + smaller(index, longer);
    return Run{first, (index + 1) * each + smaller(index + 1, longer) - first};
}

SC_DEVICE bool is_prompt(i32 prefills, i32 rows) {
#ifdef FAULT_PCP_SHORT_PROMPT_TAKEN_FOR_A_DECODE
    return prefills && rows > 3;
#endif
    (void)rows;
    return prefills != 0;
}

// Rank that has a decode to itself: its place among the decodes that have rows, its place in the batch.
SC_DEVICE i32 owner_of_decode(const Split &s, i32 decode, i32 request) {
#ifdef FAULT_PCP_DECODE_OWNER_BY_REQUEST
    return request % s.world;
#endif
    (void)request;
    return decode % s.world;
}

// The run `which`, 0 or 1, of a prompt's `rows` that a rank has.
SC_DEVICE Run run_of(const Split &s, i32 rank, i32 rows, i32 which) {
    if (s.strategy == STRATEGY_CONTIGUOUS) {
        if (which == 1) return Run{0, 0};
        return chunk_at(rank, chunk_rows(rows, s.world), rows);
    }
    const i32 index = which == 0 ? rank : tail_of(s, rank);
    if (s.strategy == STRATEGY_ZIGZAG) return block_at(s, index, rows);
    return chunk_at(index, chunk_rows(rows, 2 * s.world), rows);
}

// Whether a prompt is whole on every rank because a chunk of it would be absent.
SC_DEVICE bool is_whole(const Split &s, i32 rows) {
    return s.strategy == STRATEGY_HEAD_TAIL_OR_WHOLE && (2 * s.world - 1) * chunk_rows(rows, 2 * s.world) >= rows;
}

// Row `index` of a run. Only the second run of a prompt is one from the end.
SC_DEVICE i32 row_of_run(const Run &run, i32 index, i32 which) {
#ifdef FAULT_PCP_TAIL_CHUNK_BACKWARDS
    if (which == 1) return run.first + run.count - 1 - index;
#endif
    (void)which;
    return run.first + index;
}

// Rows of a rank in a round robin from `first` on, of `rows`.
SC_DEVICE i32 striped_rows(const Split &s, i32 rank, i32 rows) {
    return rows > rank ? (rows - rank + s.world - 1) / s.world : 0;
}

// The row at a place of a rank, and in `count` how many rows there are before it, or on the rank where there is none.
SC_DEVICE LocalRow striped_row(const Split &s, const i32 *starts, i32 rank, i32 place, i32 *count) {
#ifdef FAULT_PCP_ROUND_ROBIN_BY_SEQUENCE
    *count = 0;
    for (i32 request = 0; request < s.requests; request++) {
        const i32 own = striped_rows(s, rank, starts[request + 1] - starts[request]);
        if (place - *count < own) return LocalRow{starts[request] + rank + (place - *count) * s.world, place, 0};
        *count += own;
    }
    return LocalRow{-1, 0, 0};
#else
    *count = striped_rows(s, rank, starts[s.requests]);
    if (place >= *count) return LocalRow{-1, 0, 0};
    return LocalRow{rank + place * s.world, place, 0};
#endif
}

// The same of any strategy: a walk over the requests in their order.
SC_DEVICE LocalRow local_row(const Split &s, const i32 *starts, const u8 *prefills, i32 rank, i32 place, i32 *count) {
    if (s.strategy == STRATEGY_ROUND_ROBIN) return striped_row(s, starts, rank, place, count);
    i32 decode = 0;
    *count = 0;
    for (i32 request = 0; request < s.requests; request++) {
        const i32 first = starts[request], rows = starts[request + 1] - first;
        const bool decodes = !is_prompt(prefills[request], rows) && s.decodes != DECODES_SPLIT;
        const bool replicated = decodes && s.decodes == DECODES_REPLICATED;
        if (decodes && !replicated) {
            const i32 owner = owner_of_decode(s, decode, request);
            decode += rows > 0;
            if (owner != rank) continue;
        }
        const bool whole = decodes || is_whole(s, rows);
        for (i32 which = 0; which < (whole ? 1 : 2); which++) {
            const Run run = whole ? Run{0, rows} : run_of(s, rank, rows, which);
            const i32 index = place - *count;
            if (index < run.count)
                return LocalRow{first + row_of_run(run, index, which), index, replicated || (whole && !decodes)};
            *count += run.count;
        }
    }
    return LocalRow{-1, 0, 0};
}

// Request of a row; the last one behind the end.
SC_DEVICE i32 request_of_row(const Split &s, const i32 *starts, i32 row) {
    i32 low = 0, high = s.requests + 1;
    while (low < high) {
        const i32 middle = (low + high) / 2;
        if (starts[middle] <= row) low = middle + 1;
        else high = middle;
    }
    return (low < 1 ? 1 : smaller(low, s.requests)) - 1;
}

// counts [P]: rows of each rank. One thread a rank.
SC_EXPORT share_counts(Split s, const i32 *starts, const u8 *prefills, i32 *counts) {
    const i64 rank = SC_INDEX;
    if (rank >= s.world) return;
    i32 count = 0;
    local_row(s, starts, prefills, (i32)rank, 0x7FFFFFFF, &count);
    counts[rank] = count;
}

// width [1]: rows of a rank with padding. One thread.
SC_EXPORT share_width(Split s, const i32 *counts, i32 *width) {
    if (SC_INDEX != 0) return;
    i32 most = 0;
#ifdef FAULT_PCP_PADDED_TO_THE_AVERAGE
    i64 sum = 0;
    for (i32 rank = 0; rank < s.world; rank++) sum += counts[rank];
    most = (i32)((sum + s.world - 1) / s.world);
#else
    for (i32 rank = 0; rank < s.world; rank++) most = most < counts[rank] ? counts[rank] : most;
#endif
    *width = most < s.least ? s.least : most;
}

// Position of a row: tokens that were computed before, its place among the new rows, its place in its chunk.
SC_DEVICE i64 position_of(i32 computed, i32 in_request, i32 in_chunk) {
#if defined(FAULT_PCP_POSITION_WITHOUT_CONTEXT)
    computed = 0;
#elif defined(FAULT_PCP_POSITION_BY_LOCAL_INDEX)
    in_request = in_chunk;
#endif
    (void)in_chunk;
    return (i64)computed + in_request;
}

// Tokens that a row sees.
SC_DEVICE i32 bound_of(i64 position, i32 in_chunk) {
#if defined(FAULT_PCP_BOUND_IS_LOCAL)
    return in_chunk + 1;
#elif defined(FAULT_PCP_BOUND_WITHOUT_ITSELF)
    return (i32)position;
#endif
    (void)in_chunk;
    return (i32)(position + 1);
}

// Whether the copy on a rank writes the KV of a row.
SC_DEVICE bool is_written(i32 everywhere, i32 rank) {
#if defined(FAULT_PCP_DECODE_WRITTEN_BY_EVERY_RANK)
    return true;
#elif defined(FAULT_PCP_DECODE_WRITTEN_BY_NO_RANK)
    return !everywhere;
#endif
    return !everywhere || rank == 0;
}

// rows, positions, row_lens [P, width], padding behind a rank's rows; gathered [P·width]: row of the batch, -1 for padding; writes
// [P·width]. One thread a rank and place.
SC_EXPORT share_rows(Split s, const i32 *starts, const i32 *computed, const u8 *prefills, i32 width, i64 *rows, i64 *positions,
                     i32 *row_lens, i32 *gathered, u8 *writes) {
    const i64 index = SC_INDEX;
    if (index >= (i64)s.world * width) return;
    const i32 rank = (i32)(index / width);
    i32 before = 0;
    const LocalRow local = local_row(s, starts, prefills, rank, (i32)(index % width), &before);
    gathered[index] = local.row;
    if (local.row < 0) {
#ifdef FAULT_PCP_PADDING_IS_ROW_0
        rows[index] = 0;
#else
        rows[index] = -1;
#endif
        positions[index] = 0;
        row_lens[index] = 0;
        writes[index] = 0;
        return;
    }
    const i32 request = request_of_row(s, starts, local.row);
    const i64 position = position_of(computed[request], local.row - starts[request], local.in_chunk);
    rows[index] = local.row;
    positions[index] = position;
    row_lens[index] = bound_of(position, local.in_chunk);
    writes[index] = is_written(local.everywhere, rank);
}

// latest [N], 0 at first: one more than how far from the end of the gathered rows the first copy of a row is. One thread a gathered row.
SC_EXPORT place_rows(Split s, const i32 *counts, const i32 *gathered, i32 width, i32 *latest) {
    const i64 index = SC_INDEX, total = (i64)s.world * width;
    if (index >= total) return;
    const i32 row = gathered[index];
    // a row behind the end of the batch is nobody's
    if (row < 0 || row >= s.rows) return;
#ifdef FAULT_PCP_RESTORE_WITHOUT_PADDING
    i32 place = (i32)(index % width);
    for (i32 rank = 0; rank < index / width; rank++) place += smaller(counts[rank], width);
    SC_ATOMIC_MAX(&latest[row], place + 1);
#else
    SC_ATOMIC_MAX(&latest[row], (i32)(total - index));
#endif
    (void)counts;
}

// restore [P, N]: place of every row of the batch among the gathered ones, -1 for one that is nowhere. One thread a rank and row.
SC_EXPORT restore_rows(Split s, const i32 *gathered, i32 width, const i32 *latest, i64 *restore) {
    const i64 index = SC_INDEX, total = (i64)s.world * width;
    if (index >= (i64)s.world * s.rows) return;
    const i32 row = (i32)(index % s.rows), last = latest[row];
#if defined(FAULT_PCP_RESTORE_IS_ITS_INVERSE)
    restore[index] = row < total && gathered[row] >= 0 ? gathered[row] : 0;
#elif defined(FAULT_PCP_RESTORE_WITHOUT_PADDING)
    restore[index] = last - 1;
#else
    restore[index] = last > 0 ? total - last : -1;
#endif
    (void)gathered, (void)total, (void)last;
}

// kv_writer [P, P·width]: on every rank, which of the gathered rows have their KV written. One thread an element.
SC_EXPORT repeat_writers(Split s, const u8 *writes, i32 width, u8 *kv_writer) {
    const i64 index = SC_INDEX, total = (i64)s.world * width;
    if (index >= s.world * total) return;
    kv_writer[index] = writes[index % total];
}
