// Rows that are sliced over tensor parallelism, sent to the ranks of their experts and back (vllm-ascend `PrepareAndFinalizeWithMC2`).
// A parcel is a row on its way to one of its experts; a rank's parcels lie in the order of the ranks that they go to.

// owners [E]: the rank that has an expert, -1 for one that nobody has. One thread an expert.
SC_EXPORT expert_owners(Layer l, i32 *owners) {
    const i64 expert = SC_INDEX;
    if (expert >= l.experts) return;
    owners[expert] = -1;
    for (i32 rank = ranks_of(l) - 1; rank >= 0; rank--)
        if (holds(experts_of(l, rank), (i32)expert)) owners[expert] = rank;
}

// Place at which the result of a parcel is looked for, among those that were sent to the same rank.
SC_DEVICE i32 returned_place(i32 place, i32 count) {
#ifdef FAULT_MOE_RESULTS_TAKEN_BACK_IN_REVERSE
    return count - 1 - place;
#endif
    (void)count;
    return place;
}

// parcels [ranks, width·k]: row and place among its experts of each parcel of a sender, -1 behind the last; results [ranks, width·k]: where
// the result of a row's expert is, -1 where it was not sent. Both hold -1 at first. One thread a sender and receiver.
SC_EXPORT order_parcels(Layer l, const i32 *rows, i32 width, const i32 *experts, const i32 *owners, i32 *parcels, i32 *results) {
    const i64 index = SC_INDEX;
    const i32 ranks = ranks_of(l);
    if (index >= (i64)ranks * ranks) return;
    const i32 sender = (i32)(index / ranks), receiver = (i32)(index % ranks), slots = rows[sender] * l.top_k;
    const i64 base = (i64)sender * width * l.top_k;
    i32 first = 0, count = 0, at = 0;
    for (i32 slot = 0; slot < slots; slot++) {
        const i32 owner = owners[experts[base + slot]];
        first += owner >= 0 && owner < receiver;
        count += owner == receiver;
    }
    for (i32 slot = 0; slot < slots; slot++) {
        if (owners[experts[base + slot]] != receiver) continue;
        parcels[base + first + at] = slot;
        results[base + slot] = first + returned_place(at, count);
        at++;
    }
}

// sent [ranks, width·k, h]: the row of every parcel. Blocks: (parcel, sender).
SC_EXPORT send_parcels(Layer l, i32 width, const u16 *hidden, const i32 *parcels, u16 *sent) {
    const i32 sender = SC_BLOCK_Y;
    const i64 parcel = (i64)sender * width * l.top_k + SC_BLOCK_X;
    const i32 slot = parcels[parcel];
    if (slot < 0) return;
    const i64 row = (i64)sender * width + slot / l.top_k;
    for (i32 d = SC_THREAD; d < l.hidden; d += SC_THREADS) sent[parcel * l.hidden + d] = hidden[row * l.hidden + d];
}

// answers [ranks, width·k, h]: what the expert of every parcel makes of it on the rank that has it, stored in bf16 unless it stays there;
// active [ranks, width·k, I]. Blocks: (parcel, sender).
SC_EXPORT answer_parcels(Layer l, i32 width, const u16 *sent, const i32 *parcels, const i32 *experts, const i32 *owners,
                         const u16 *gate, const u16 *up, const u16 *down, u16 *active, float *answers) {
    const i64 base = (i64)SC_BLOCK_Y * width * l.top_k, parcel = base + SC_BLOCK_X;
    const i32 slot = parcels[parcel];
    if (slot < 0) return;
    const i32 expert = experts[base + slot];
    const i32 weights = weights_of(l, expert, experts_of(l, owners[expert]));
    const Mlp mlp = {gate, up, down, l.inner};
    const Part whole = {0, l.inner};
    u16 *own = active + parcel * l.inner;
    activate(l, mlp, weights, whole, sent + parcel * l.hidden, own);
    SC_SYNC();
    const bool travels = ranks_of(l) > 1;
    for (i32 d = SC_THREAD; d < l.hidden; d += SC_THREADS) {
        const float value = down_of(l, mlp, weights, whole, own, d);
        answers[parcel * l.hidden + d] = travels ? round_bf16(value) : value;
    }
}

// expert_tokens [ranks, E]: parcels, padding left out, that a rank received for each expert. One thread an element.
SC_EXPORT count_parcels(Layer l, const i32 *rows, i32 width, const i32 *experts, const i32 *owners, const u8 *real,
                        i32 *expert_tokens) {
    const i64 index = SC_INDEX;
    const i32 ranks = ranks_of(l);
    if (index >= (i64)ranks * l.experts) return;
    const i32 rank = (i32)(index / l.experts), expert = (i32)(index % l.experts);
    i32 count = 0;
    for (i32 sender = 0; sender < ranks && owners[expert] == rank; sender++)
        for (i32 row = 0; row < rows[sender]; row++) {
            const i64 at = (i64)sender * width + row;
            for (i32 i = 0; i < l.top_k; i++) count += experts[at * l.top_k + i] == expert ? counted(real[at]) : 0;
        }
    expert_tokens[index] = count;
}

// slices [ranks, width, h] in bf16: what came back for every row, weighed and added, and the shared expert whole. Blocks: (row, rank).
SC_EXPORT combine_parcels(Layer l, const i32 *rows, i32 width, const float *weights, const i32 *results, const float *answers,
                          const u16 *shared_down, const u16 *shared_active, u16 *slices) {
    const i32 row = SC_BLOCK_X, rank = SC_BLOCK_Y;
    if (row >= rows[rank]) return;
    const i64 base = (i64)rank * width * l.top_k, at = (i64)rank * width + row;
    const Mlp common = {nullptr, nullptr, shared_down, l.shared_inner};
    for (i32 d = SC_THREAD; d < l.hidden; d += SC_THREADS) {
        float sum = 0.0f;
        for (i64 slot = at * l.top_k; slot < (at + 1) * l.top_k; slot++) {
            const i32 result = results[slot];
            if (result >= 0) sum = SC_FMA(weights[slot], answers[(base + result) * l.hidden + d], sum);
        }
        if (l.shared != SHARED_NONE)
            sum += shared_scale(l) * down_of(l, common, 0, shared_inner_of(l, rank), shared_active + at * l.shared_inner, d);
        slices[at * l.hidden + d] = bf16_of(sum);
    }
}

// First of the gathered rows that is kept.
SC_DEVICE i32 first_kept(i32 rows, i32 tokens) {
#ifdef FAULT_MOE_PADDING_KEPT_IN_FRONT
    return rows > tokens ? rows - tokens : 0;
#endif
    (void)rows, (void)tokens;
    return 0;
}

// out [ranks, most, h], ids and shares [ranks, most, k]: the slices of the ranks of tensor parallelism one behind the other, without their
// padding; zeros behind them. Blocks: (row, rank).
SC_EXPORT join_slices(Layer l, const i32 *entering, const i32 *own_rows, i32 width, i32 most, const u16 *slices, const i32 *experts,
                      const float *weights, u16 *out, i32 *ids, float *shares) {
    const i32 row = SC_BLOCK_X, rank = SC_BLOCK_Y, each = entering[rank], own = own_rows[rank];
    const i32 index = first_kept(l.tp * each, own) + row;
    const bool there = row < own && index < l.tp * each;
    const i32 member = there ? rank - rank % l.tp + index / each : 0;
    const i64 from = there ? (i64)member * width + index % each : -1, to = (i64)rank * most + row;
    store_choice(l, experts, weights, from, to, ids, shares);
    for (i32 d = SC_THREAD; d < l.hidden; d += SC_THREADS)
        out[to * l.hidden + d] = from < 0 ? (u16)0 : slices[from * l.hidden + d];
}
