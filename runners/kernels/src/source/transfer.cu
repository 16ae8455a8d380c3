// Requests taken over from a session of another layout: every token keeps its bytes and changes its place. Owner, block and slot are
// those of the source's layout on the one side and of this session's on the other.

// The layout that the given caches are read by: `s` with the source's world, interleave, block size and blocks in place of its own.
SC_DEVICE Shape source_layout(const Shape &s, Shape from) {
#if defined(FAULT_TRANSFER_IGNORES_INTERLEAVE)
    from.interleave = 1;
#elif defined(FAULT_TRANSFER_INTERLEAVE_OF_THE_DESTINATION)
    from.interleave = from.block % s.interleave == 0 ? s.interleave : from.block;
#elif defined(FAULT_TRANSFER_WORLD_OF_THE_DESTINATION)
    from.world = s.world;
#endif
    return from;
}

// Cache that stands for a rank of the source, of which there are `ranks`.
SC_DEVICE i32 source_part(i32 rank, i32 ranks) {
#if defined(FAULT_TRANSFER_RANKS_IN_REVERSE)
    return ranks - 1 - rank;
#elif defined(FAULT_TRANSFER_WORLD_OF_THE_DESTINATION)
    return rank % ranks;
#else
    return rank;
#endif
}

SC_DEVICE i64 next_multiple(i64 value, i64 of) { return (value + of - 1) / of * of; }

// Positions of a request that are taken over.
SC_DEVICE i64 taken_tokens(i64 tokens, const Shape &from, const Shape &s) {
#if defined(FAULT_TRANSFER_LOSES_THE_TAIL)
    return tokens - tokens % ((i64)from.block * from.world);
#elif defined(FAULT_TRANSFER_FILLS_THE_LAST_BLOCK)
    const i64 theirs = next_multiple(tokens, (i64)from.block * from.world);
    const i64 own = next_multiple(tokens, (i64)s.block * s.world);
    return theirs < own ? theirs : own;
#else
    return tokens;
#endif
}

// Slot of a position in the session that takes it, given its own block table and the source's. -1 as block_of.
SC_DEVICE i64 destination_slot(const Shape &s, const Batch &b, const i32 *table, const Batch &theirs, const i32 *from_table,
                               i32 request, i64 position, i32 *error) {
#if defined(FAULT_TRANSFER_THROUGH_THE_TABLE_OF_THE_SOURCE)
    const i64 entry = position / ((i64)s.block * s.world);
    if (entry < b.width && entry < theirs.width) {
        const i32 own = table[(i64)request * b.width + entry], other = from_table[(i64)request * theirs.width + entry];
        if (own >= 0 && own < s.blocks && other >= 0 && other < s.blocks)
            return (i64)other * s.block + local_index(s, position) % s.block;
    }
#elif defined(FAULT_TRANSFER_BLOCKS_IN_TABLE_ORDER)
    const i64 entry = position / ((i64)s.block * s.world);
    const i32 *row = table + (i64)request * b.width;
    i32 held = 0;
    for (i32 i = 0; i < b.width; i++) held += row[i] >= 0 && row[i] < s.blocks;
    for (i32 i = 0; entry < held && i < held; i++) {
        i32 smaller = 0;
        for (i32 j = 0; j < held; j++) smaller += row[j] < row[i] || (row[j] == row[i] && j < i);
        if (smaller == entry) return (i64)row[i] * s.block + local_index(s, position) % s.block;
    }
#endif
    (void)theirs, (void)from_table;
    return slot_of_position(s, b, table, request, position, error);
}

// Places the tokens of every request in the caches of those of the device's ranks that own them. given_keys [ranks of the source, its
// blocks, its block size, K, Dk] and given_values likewise, as codes. Blocks: (position, request, rank); positions beyond those of a
// request do nothing.
SC_EXPORT import_tokens(Shape s, Shape layout, const Batch *batch, const i32 *table, const Batch *from_batch,
                        const i32 *from_table, const i32 *seq_lens, const u8 *given_keys, const u8 *given_values, i32 key_bytes,
                        i32 value_bytes, u8 *keys, u8 *values, i32 *error) {
    const Batch b = *batch, theirs = *from_batch;
    const i64 position = SC_BLOCK_X;
    const i32 request = SC_BLOCK_Y, place = SC_BLOCK_Z;
    const Shape from = source_layout(s, layout);
    if (position >= taken_tokens(seq_lens[request], from, s)) return;
    if (owner_of(s, position) != member_of(s, place)) return;
    const i64 own_slot = destination_slot(s, b, table, theirs, from_table, request, position, error);
    const i64 their_slot = slot_of_position(from, theirs, from_table, request, position, error);
    const i32 part = source_part(owner_of(from, position), layout.world);
    if (own_slot < 0 || their_slot < 0) return;
    if (part < 0 || part >= layout.world) {
        if (SC_THREAD == 0) SC_ATOMIC_MAX(error, FAILURE_BLOCK_ID);
        return;
    }
    const i64 to = (i64)place * s.blocks * s.block + own_slot, at = (i64)part * layout.blocks * layout.block + their_slot;
    for (i32 i = SC_THREAD; i < key_bytes; i += SC_THREADS) keys[to * key_bytes + i] = given_keys[at * key_bytes + i];
    for (i32 i = SC_THREAD; i < value_bytes; i += SC_THREADS)
        values[to * value_bytes + i] = given_values[at * value_bytes + i];
}
