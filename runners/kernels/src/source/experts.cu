// A layer of experts over the ranks of a plan, all of which this device plays: rows are gathered, every rank runs its part of the experts,
// sums are brought back. Merge 0 and 1 and redundant decodes: ATOM `pcp_moe`; flat ranks dp·pcp·tp + pcp·tp + tp: vLLM
// `FusedMoEParallelConfig`. Products and sums are f32; what lies between the two products of an expert, and what leaves a rank, is bf16.

enum TokenExchange { EXCHANGE_LOCAL = 0, EXCHANGE_GATHERED = 1, EXCHANGE_REDUNDANT = 2, EXCHANGE_SLICED = 3 };
enum SharedExpert { SHARED_NONE = 0, SHARED_REPLICATED = 1, SHARED_SHARDED = 2 };

// How tokens, ranks and experts go together; mirrored in Rust, field by field.
struct Layer {
    i32 dp, pcp, tp;
    i32 exchange;      // TokenExchange
    i32 is_split;      // ranks have a part of every expert and not whole ones
    i32 shared;        // SharedExpert
    i32 is_gated;      // 1: silu(gate)·up in place of up; 2: SiTU of both
    i32 hidden;        // h
    i32 inner;         // I
    i32 shared_inner;  // J
    i32 experts;       // E
    i32 top_k;         // k
};

// Where a rank stands.
struct Place {
    i32 dp, pcp, tp;
};

// A part of so many experts, or of so many inner elements.
struct Part {
    i32 first, last;
};

// Weights of the experts, row-major: gate and up [inner, hidden], down [hidden, inner], one expert behind the other.
struct Mlp {
    const u16 *gate, *up, *down;
    i32 inner;
};

SC_DEVICE i32 ranks_of(const Layer &l) { return l.dp * l.pcp * l.tp; }
SC_DEVICE i32 expert_ranks(const Layer &l) { return l.exchange == EXCHANGE_LOCAL ? l.tp : ranks_of(l); }
SC_DEVICE Place place_of(const Layer &l, i32 rank) { return Place{rank / (l.pcp * l.tp), rank / l.tp % l.pcp, rank % l.tp}; }
SC_DEVICE i32 rank_of(const Layer &l, const Place &p) { return (p.dp * l.pcp + p.pcp) * l.tp + p.tp; }

// Whether rows are gathered and scattered.
SC_DEVICE bool gathers(const Layer &l) {
#if defined(FAULT_MOE_PREFILL_GROUP_NOT_GATHERED)
    return false;
#elif defined(FAULT_MOE_CHANGED_TO_MERGE_ZERO)
    return l.exchange == EXCHANGE_REDUNDANT;
#else
    return l.exchange == EXCHANGE_GATHERED || l.exchange == EXCHANGE_REDUNDANT;
#endif
}

// Ranks whose rows a rank has, itself among them, and the `index`-th of them: all of dp × pcp, or of dp where those of pcp are the same.
SC_DEVICE i32 source_count(const Layer &l) {
    return !gathers(l) ? 1 : l.exchange == EXCHANGE_REDUNDANT ? l.dp : l.dp * l.pcp;
}
SC_DEVICE i32 source_at(const Layer &l, i32 rank, i32 index) {
    if (!gathers(l)) return rank;
    const Place own = place_of(l, rank);
    if (l.exchange == EXCHANGE_REDUNDANT) return rank_of(l, Place{index, own.pcp, own.tp});
    return index * l.tp + own.tp;
}
SC_DEVICE i32 place_among_sources(const Layer &l, i32 rank) {
    if (!gathers(l)) return 0;
    return l.exchange == EXCHANGE_REDUNDANT ? place_of(l, rank).dp : rank / l.tp;
}

// Rows that a rank has of its own: all of its group's, or every pcp-th; and the token of one of them.
SC_DEVICE bool rows_are_dealt(const Layer &l) { return l.exchange == EXCHANGE_LOCAL || l.exchange == EXCHANGE_GATHERED; }
SC_DEVICE i32 own_count(const Layer &l, const i32 *dp_tokens, i32 rank) {
    const Place own = place_of(l, rank);
    const i32 tokens = dp_tokens[own.dp];
    if (!rows_are_dealt(l)) return tokens;
    return tokens > own.pcp ? (tokens - own.pcp + l.pcp - 1) / l.pcp : 0;
}
SC_DEVICE i64 own_token(const Layer &l, const i32 *dp_tokens, i32 rank, i32 row) {
    const Place own = place_of(l, rank);
    i64 first = 0;
    for (i32 group = 0; group < own.dp; group++) first += dp_tokens[group];
    return first + (rows_are_dealt(l) ? own.pcp + (i64)row * l.pcp : row);
}

SC_DEVICE i32 rounded_part(i32 rows, i32 parts) {
#ifdef FAULT_MOE_SLICE_ROUNDED_DOWN
    return rows / parts;
#else
    return (rows + parts - 1) / parts;
#endif
}

// Rows that a rank enters the exchange with: as many as the fullest rank that takes part in it.
SC_DEVICE i32 rows_entering(const Layer &l, const i32 *dp_tokens, i32 group) {
    i32 most = 0;
    for (i32 other = 0; other < l.dp; other++) most = most < dp_tokens[other] ? dp_tokens[other] : most;
#ifdef FAULT_MOE_OTHER_GROUPS_IGNORED
    most = dp_tokens[group];
#endif
    i32 rows = most;
    if (l.exchange == EXCHANGE_LOCAL) rows = rounded_part(dp_tokens[group], l.pcp);
    if (l.exchange == EXCHANGE_GATHERED) rows = rounded_part(most, l.pcp);
    if (l.exchange == EXCHANGE_SLICED) rows = rounded_part(most, l.tp);
#ifdef FAULT_MOE_SINGLE_ROW_DOUBLED
    if (rows == 1) return 2;
#endif
    return rows;
}

// A gathered row: the rank that it came from and its row there; rank -1 behind the last.
struct Gathered {
    i32 rank, row;
};
SC_DEVICE Gathered gathered_row(const Layer &l, const i32 *entering, i32 rank, i32 index) {
    for (i32 i = 0; i < source_count(l); i++) {
        const i32 source = source_at(l, rank, i);
        if (index < entering[source]) return Gathered{source, index};
        index -= entering[source];
    }
    return Gathered{-1, 0};
}

// slice_rows, own_rows and gathered_rows [ranks]: rows that a rank enters with, has of its own, and has once they are gathered. One thread
// a rank.
SC_EXPORT enter_exchange(Layer l, const i32 *dp_tokens, i32 *slice_rows, i32 *own_rows, i32 *gathered_rows) {
    const i64 index = SC_INDEX;
    if (index >= ranks_of(l)) return;
    const i32 rank = (i32)index;
    i32 all = 0;
    for (i32 i = 0; i < source_count(l); i++) all += rows_entering(l, dp_tokens, place_of(l, source_at(l, rank, i)).dp);
    slice_rows[rank] = rows_entering(l, dp_tokens, place_of(l, rank).dp);
    own_rows[rank] = own_count(l, dp_tokens, rank);
    gathered_rows[rank] = all;
}

// Row of a group that is row `row` of a rank's slice, and that by whose logits it is routed.
SC_DEVICE i32 sliced_row(const Layer &l, i32 tp, i32 each, i32 row) {
#ifdef FAULT_MOE_ROWS_SLICED_BY_STRIDE
    return row * l.tp + tp;
#else
    return tp * each + row;
#endif
}
SC_DEVICE i32 sliced_logits_row(const Layer &l, i32 tp, i32 each, i32 row) {
#ifdef FAULT_MOE_LOGITS_SLICED_BY_STRIDE
    return row * l.tp + tp;
#else
    return tp * each + row;
#endif
}

// hidden [ranks, cap, h], logits [ranks, cap, E], ids [ranks, cap], real [ranks, cap]: the rows that every rank enters with, out of the
// tokens of all groups; padding is zeros. Blocks: (row, rank).
SC_EXPORT enter_rows(Layer l, const i32 *dp_tokens, const i32 *entering, i32 cap, const u16 *all_hidden, const float *all_logits,
                     const i64 *all_ids, u16 *hidden, float *logits, i64 *ids, u8 *real) {
    const i32 row = SC_BLOCK_X, rank = SC_BLOCK_Y, each = entering[rank];
    if (row >= each) return;
    const i32 own = own_count(l, dp_tokens, rank), tp = place_of(l, rank).tp;
    const bool sliced = l.exchange == EXCHANGE_SLICED;
    const i32 of_row = sliced ? sliced_row(l, tp, each, row) : row;
    const i32 of_logits = sliced ? sliced_logits_row(l, tp, each, row) : row;
    const i64 token = of_row < own ? own_token(l, dp_tokens, rank, of_row) : -1;
    const i64 routed = of_logits < own ? own_token(l, dp_tokens, rank, of_logits) : -1;
    const i64 at = (i64)rank * cap + row;
    for (i32 d = SC_THREAD; d < l.hidden; d += SC_THREADS)
        hidden[at * l.hidden + d] = token < 0 ? (u16)0 : all_hidden[token * l.hidden + d];
    for (i32 e = SC_THREAD; e < l.experts; e += SC_THREADS)
        logits[at * l.experts + e] = routed < 0 ? 0.0f : all_logits[routed * l.experts + e];
    if (SC_THREAD != 0) return;
    real[at] = token >= 0;
    ids[at] = token < 0 || !all_ids ? 0 : all_ids[token];
}

// The row whose token id goes with a gathered row.
SC_DEVICE Gathered id_row(const Layer &l, const i32 *entering, i32 rank, i32 index, Gathered own) {
#if defined(FAULT_MOE_TOKEN_IDS_NOT_GATHERED)
    return Gathered{rank, index % entering[rank]};
#elif defined(FAULT_MOE_TOKEN_IDS_IN_TOKEN_ORDER)
    return Gathered{source_at(l, rank, index % source_count(l)), index / source_count(l)};
#endif
    (void)l, (void)entering, (void)rank, (void)index;
    return own;
}

// The same of all rows that a rank has once they are gathered, rank after rank [ranks, width, …]. Blocks: (row, rank).
SC_EXPORT gather_tokens(Layer l, const i32 *entering, i32 cap, i32 width, const u16 *hidden, const float *logits, const i64 *ids,
                        const u8 *real, u16 *all_hidden, float *all_logits, i64 *all_ids, u8 *all_real) {
    const i32 index = SC_BLOCK_X, rank = SC_BLOCK_Y;
    const Gathered own = gathered_row(l, entering, rank, index);
    if (own.rank < 0) return;
    const i64 from = (i64)own.rank * cap + own.row, to = (i64)rank * width + index;
    for (i32 d = SC_THREAD; d < l.hidden; d += SC_THREADS) all_hidden[to * l.hidden + d] = hidden[from * l.hidden + d];
    for (i32 e = SC_THREAD; e < l.experts; e += SC_THREADS) all_logits[to * l.experts + e] = logits[from * l.experts + e];
    if (SC_THREAD != 0) return;
    const Gathered id = id_row(l, entering, rank, index, own);
    all_real[to] = real[from];
    all_ids[to] = ids[(i64)id.rank * cap + id.row];
}

// Number of a rank among those that share the experts out.
SC_DEVICE i32 expert_rank(const Layer &l, i32 rank) {
    const Place own = place_of(l, rank);
    if (l.exchange == EXCHANGE_LOCAL) return own.tp;
#ifdef FAULT_MOE_FLAT_RANK_REVERSED
    return (own.tp * l.tp + own.pcp) % ranks_of(l);
#else
    return rank;
#endif
}

// Part `index` of `parts` of so many.
SC_DEVICE Part part_of(i32 index, i32 parts, i32 count) {
#ifdef FAULT_MOE_EXPERT_RANGE_ROUNDED_UP
    const i32 first = index * (count / parts), last = first + (count + parts - 1) / parts;
    return Part{first < count ? first : count, last < count ? last : count};
#else
    return Part{(i32)((i64)index * count / parts), (i32)((i64)(index + 1) * count / parts)};
#endif
}

// Experts of a rank; all of them where it has a part of each.
SC_DEVICE Part experts_of(const Layer &l, i32 rank) {
    return l.is_split ? Part{0, l.experts} : part_of(expert_rank(l, rank), expert_ranks(l), l.experts);
}
SC_DEVICE bool holds(const Part &part, i32 index) { return part.first <= index && index < part.last; }

// Expert whose weights a rank takes for an expert.
SC_DEVICE i32 weights_of(const Layer &l, i32 expert, const Part &own) {
#ifdef FAULT_MOE_EXPERT_OFFSET_FORGOTTEN
    expert -= own.first;
#endif
    (void)own;
    return expert < l.experts ? expert : l.experts - 1;
}

// Inner elements of an expert that a rank has, and of the shared one.
SC_DEVICE Part inner_of(const Layer &l, i32 rank) {
    return l.is_split ? part_of(expert_rank(l, rank), expert_ranks(l), l.inner) : Part{0, l.inner};
}
SC_DEVICE Part shared_inner_of(const Layer &l, i32 rank) {
    if (l.exchange == EXCHANGE_SLICED) return Part{0, l.shared_inner};
    if (l.shared == SHARED_SHARDED) return part_of(expert_rank(l, rank), expert_ranks(l), l.shared_inner);
    return part_of(place_of(l, rank).tp, l.tp, l.shared_inner);
}

// What the part of a shared expert is multiplied by.
SC_DEVICE float shared_scale(const Layer &l) {
    const bool merged = l.exchange == EXCHANGE_GATHERED || l.exchange == EXCHANGE_REDUNDANT;
    bool scaled = merged && l.shared == SHARED_REPLICATED;
#if defined(FAULT_MOE_SHARED_EXPERT_NOT_SCALED)
    scaled = false;
#elif defined(FAULT_MOE_SHARDED_SHARED_EXPERT_SCALED)
    scaled = merged;
#elif defined(FAULT_MOE_SHARED_EXPERT_SCALED_WITHOUT_MERGE)
    scaled = true;
#endif
    return scaled ? 1.0f / (float)(l.dp * l.pcp) : 1.0f;
}

// most · tanh(x / most).
SC_DEVICE float bent_at(float most, float x) {
    const float e = natural_exp(-2.0f * (x < 0.0f ? -x : x) / most), t = most * ((1.0f - e) / (1.0f + e));
    return x < 0.0f ? -t : t;
}

// What the inner elements of a part are of one row, in bf16. All threads of a block.
SC_DEVICE void activate(const Layer &l, const Mlp &m, i32 expert, const Part &part, const u16 *x, u16 *active) {
    for (i32 i = part.first + SC_THREAD; i < part.last; i += SC_THREADS) {
        const i64 row = ((i64)expert * m.inner + i) * l.hidden;
        float up = 0.0f, gate = 0.0f;
        for (i32 d = 0; d < l.hidden; d++) up = SC_FMA(of_bf16(m.up[row + d]), of_bf16(x[d]), up);
        if (l.is_gated) {
            for (i32 d = 0; d < l.hidden; d++) gate = SC_FMA(of_bf16(m.gate[row + d]), of_bf16(x[d]), gate);
            const i32 bent = l.is_gated == 2;
            up = (bent ? bent_at(4.0f, gate) : gate) / (1.0f + natural_exp(-gate)) * (bent ? bent_at(25.0f, up) : up);
        }
        active[i] = bf16_of(up);
    }
}

// One element of what those inner elements give.
SC_DEVICE float down_of(const Layer &l, const Mlp &m, i32 expert, const Part &part, const u16 *active, i32 d) {
    const i64 row = ((i64)expert * l.hidden + d) * m.inner;
    float sum = 0.0f;
    for (i32 i = part.first; i < part.last; i++) sum = SC_FMA(of_bf16(m.down[row + i]), of_bf16(active[i]), sum);
    return sum;
}

// active [ranks, width, k, I]: what every rank's part of the experts makes of the first rows[rank] rows of its own. experts [ranks, width,
// k]. Blocks: (row and place among its experts, rank).
SC_EXPORT activate_experts(Layer l, const i32 *rows, i32 width, const u16 *hidden, const i32 *experts, const u16 *gate, const u16 *up,
                           const u16 *down, u16 *active) {
    const i32 row = SC_BLOCK_X / l.top_k, rank = SC_BLOCK_Y;
    if (row >= rows[rank]) return;
    const i64 at = (i64)rank * width + row, slot = (i64)rank * width * l.top_k + SC_BLOCK_X;
    const Part own = experts_of(l, rank);
    const i32 expert = experts[slot];
    if (!holds(own, expert)) return;
    const Mlp mlp = {gate, up, down, l.inner};
    activate(l, mlp, weights_of(l, expert, own), inner_of(l, rank), hidden + at * l.hidden, active + slot * l.inner);
}

// active [ranks, width, J] of the shared expert. Blocks: (row, rank).
SC_EXPORT activate_shared(Layer l, const i32 *rows, i32 width, const u16 *hidden, const u16 *gate, const u16 *up, const u16 *down,
                          u16 *active) {
    const i32 row = SC_BLOCK_X, rank = SC_BLOCK_Y;
    if (row >= rows[rank]) return;
    const i64 at = (i64)rank * width + row;
    const Mlp mlp = {gate, up, down, l.shared_inner};
    activate(l, mlp, 0, shared_inner_of(l, rank), hidden + at * l.hidden, active + at * l.shared_inner);
}

// partial [ranks, width, h] in bf16: the rank's part of the output of its rows. `down` and `active` are those of the experts,
// shared_down and shared_active those of the shared one. Blocks: (row, rank).
SC_EXPORT sum_experts(Layer l, const i32 *rows, i32 width, const i32 *experts, const float *weights, const u16 *down,
                      const u16 *active, const u16 *shared_down, const u16 *shared_active, u16 *partial) {
    const i32 row = SC_BLOCK_X, rank = SC_BLOCK_Y;
    if (row >= rows[rank]) return;
    const i64 at = (i64)rank * width + row;
    const Part own = experts_of(l, rank), inner = inner_of(l, rank), shared = shared_inner_of(l, rank);
    const Mlp mlp = {nullptr, nullptr, down, l.inner}, common = {nullptr, nullptr, shared_down, l.shared_inner};
    for (i32 d = SC_THREAD; d < l.hidden; d += SC_THREADS) {
        float sum = 0.0f;
        for (i64 slot = at * l.top_k; slot < (at + 1) * l.top_k; slot++)
            if (holds(own, experts[slot]))
                sum += weights[slot] *
                       down_of(l, mlp, weights_of(l, experts[slot], own), inner, active + slot * l.inner, d);
        if (l.shared != SHARED_NONE)
            sum += shared_scale(l) * down_of(l, common, 0, shared, shared_active + at * l.shared_inner, d);
        partial[at * l.hidden + d] = bf16_of(sum);
    }
}

SC_DEVICE i32 counted(u8 real) {
#ifdef FAULT_MOE_PADDING_COUNTED
    return 1;
#else
    return real != 0;
#endif
}

// expert_tokens [ranks, E]: rows that every rank ran through its part of each expert. One thread an element.
SC_EXPORT count_tokens(Layer l, const i32 *rows, i32 width, const i32 *experts, const u8 *real, i32 *expert_tokens) {
    const i64 index = SC_INDEX;
    if (index >= (i64)ranks_of(l) * l.experts) return;
    const i32 rank = (i32)(index / l.experts), expert = (i32)(index % l.experts);
    const bool own = holds(experts_of(l, rank), expert);
    i32 count = 0;
    for (i32 row = 0; row < rows[rank] && own; row++) {
        const i64 at = (i64)rank * width + row;
        for (i32 i = 0; i < l.top_k; i++) count += experts[at * l.top_k + i] == expert ? counted(real[at]) : 0;
    }
    expert_tokens[index] = count;
}

// Parts of a sum of so many: how many are added, and which comes at a step, given the place of the rank's own.
SC_DEVICE i32 parts_summed(i32 parts) {
#ifdef FAULT_MOE_LAST_PART_NOT_SUMMED
    return parts - 1;
#else
    return parts;
#endif
}
SC_DEVICE i32 part_at(i32 own, i32 parts, i32 step) {
#ifdef FAULT_MOE_OWN_PART_SUMMED_FIRST
    return (own + step) % parts;
#endif
    (void)own, (void)parts;
    return step;
}

// summed [ranks, width, h]: the parts of the ranks of tensor parallelism, added in their order, each sum rounded to bf16. One thread an
// element.
SC_EXPORT sum_tensor_parallel(Layer l, i32 width, const u16 *partial, u16 *summed) {
    const i64 index = SC_INDEX, each = (i64)width * l.hidden;
    if (index >= ranks_of(l) * each) return;
#ifdef FAULT_MOE_TENSOR_PARALLEL_SUM_MISSING
    summed[index] = partial[index];
    return;
#endif
    const i32 rank = (i32)(index / each), own = rank % l.tp;
    float sum = 0.0f;
    for (i32 step = 0; step < parts_summed(l.tp); step++) {
        const i32 other = rank - own + part_at(own, l.tp, step);
        const float part = of_bf16(partial[other * each + index % each]);
        sum = step == 0 ? part : round_bf16(sum + part);
    }
    summed[index] = bf16_of(sum);
}

// Members that a rank's rows are summed over: all of dp × pcp.
SC_DEVICE i32 member_count(const Layer &l) {
    if (!gathers(l)) return 1;
#if defined(FAULT_MOE_DECODE_REDUCED_OVER_ITS_OWN_GROUP)
    if (l.exchange == EXCHANGE_REDUNDANT) return 1;
#elif defined(FAULT_MOE_REDUNDANT_DECODE_COUNTED_TWICE)
    if (l.exchange == EXCHANGE_REDUNDANT) return l.dp * l.pcp * l.pcp;
#endif
    return l.dp * l.pcp;
}
SC_DEVICE i32 summed_member(const Layer &l, i32 rank, i32 member) {
    return member_count(l) == 1 ? rank : member % (l.dp * l.pcp) * l.tp + rank % l.tp;
}

// Row of the sum that is a rank's own row `row`: its place among the ranks that were gathered, how many those are, rows of each, own rows.
SC_DEVICE i32 scattered_row(i32 place, i32 sources, i32 each, i32 own, i32 row) {
#if defined(FAULT_MOE_SCATTER_WITHOUT_PADDING)
    return place * own + row;
#elif defined(FAULT_MOE_SCATTER_IN_TOKEN_ORDER)
    return row * sources + place;
#endif
    (void)sources, (void)own;
    return place * each + row;
}

// Experts and weights of a row, nothing at all where there is no row. All threads of a block.
SC_DEVICE void store_choice(const Layer &l, const i32 *experts, const float *weights, i64 from, i64 to, i32 *ids, float *shares) {
    for (i32 i = SC_THREAD; i < l.top_k; i += SC_THREADS) {
        ids[to * l.top_k + i] = from < 0 ? 0 : experts[from * l.top_k + i];
        shares[to * l.top_k + i] = from < 0 ? 0.0f : weights[from * l.top_k + i];
    }
}

// out [ranks, most, h] in bf16, ids and shares [ranks, most, k]: every rank's own rows of the sum over its members, zeros behind them.
// Blocks: (row, rank).
SC_EXPORT scatter_rows(Layer l, const i32 *entering, const i32 *own_rows, const i32 *gathered, i32 width, i32 most, const u16 *summed,
                       const i32 *experts, const float *weights, u16 *out, i32 *ids, float *shares) {
    const i32 row = SC_BLOCK_X, rank = SC_BLOCK_Y, own = own_rows[rank];
    const i64 to = (i64)rank * most + row;
    const i32 index = scattered_row(place_among_sources(l, rank), source_count(l), entering[rank], own, row);
    // a row that is not there comes out as zeros
    const bool there = row < own && index < gathered[rank];
    store_choice(l, experts, weights, there ? (i64)rank * width + index : -1, to, ids, shares);
    const i32 members = member_count(l), place = members == 1 ? 0 : rank / l.tp;
    // a rank that brings nothing back has no sum to make
    const i32 steps = gathers(l) ? parts_summed(members) : 1;
    for (i32 d = SC_THREAD; d < l.hidden; d += SC_THREADS) {
        float sum = 0.0f;
        for (i32 step = 0; step < steps && there; step++) {
            const i32 member = summed_member(l, rank, part_at(place, members, step));
            const float part = of_bf16(summed[((i64)member * width + index) * l.hidden + d]);
            sum = step == 0 ? part : round_bf16(sum + part);
        }
        out[to * l.hidden + d] = bf16_of(sum);
    }
}
