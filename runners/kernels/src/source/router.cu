// The router of a layer of experts: scores, the choice among them, and weights, all in f32. Formulas: DeepSeek-V3 and its copies in vLLM
// (`grouped_topk`), SGLang (`biased_grouped_topk_impl`) and aiter (`biased_grouped_topk_torch`); DeepSeek-V4 for tables by token id. Of
// equal choices the lower id is taken; a NaN is less than every number.

enum Normaliser { NORMALISER_RAW = 0, NORMALISER_SUM = 1, NORMALISER_SUM_AND_TINY = 2 };

// How experts are chosen and weighed; mirrored in Rust, field by field.
struct Router {
    i32 experts;      // E
    i32 top_k;        // experts of a row, k
    i32 groups;       // groups of equal size, 1 for none
    i32 top_groups;   // groups that are kept
    i32 table_rows;   // rows of the table of experts, 0 without one
    i32 is_softmax;   // scores are a softmax and not the logistic function
    i32 is_biased;    // a bias counts for the choice
    i32 fills_zero;   // masked experts get 0 and not -infinity
    i32 normaliser;   // Normaliser
    float scale;
};

// A number whose order as an integer is that of the float.
SC_DEVICE u32 order_of(float x) {
    const u32 bits = SC_BITS(x);
    if (is_nan(x)) return 0u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// How many of the values are larger than that at `own`, or equal and before it: no two have the same place.
SC_DEVICE i32 place_among(const float *values, i32 count, i32 own) {
    const u32 order = order_of(values[own]);
    i32 place = 0;
    for (i32 i = 0; i < count; i++) {
        const u32 other = order_of(values[i]);
        place += other > order || (other == order && i < own);
    }
    return place;
}

SC_DEVICE float logistic(float x) { return 1.0f / (1.0f + natural_exp(-x)); }

// Row by whose logits a row is routed.
SC_DEVICE i32 logits_row(i32 row, i32 rows) {
#ifdef FAULT_ROUTER_SMALL_BATCH_READS_ONE_ROW
    if (rows < 16) return row > 0 ? row - 1 : 0;
#endif
    (void)rows;
    return row;
}

// What an expert is chosen by.
SC_DEVICE float choice_of(const Router &r, float score, const float *bias, i32 expert) {
#ifdef FAULT_ROUTER_BIAS_IGNORED
    return score;
#endif
    return r.is_biased ? score + bias[expert] : score;
}

// What a group is kept by: its largest choice, or the sum of its two largest.
SC_DEVICE float group_choice(const float *choices, i32 size, i32 is_biased) {
#if defined(FAULT_ROUTER_BIASED_GROUP_BY_ITS_BEST)
    is_biased = 0;
#elif defined(FAULT_ROUTER_GROUP_BY_ITS_TWO_BEST)
    is_biased = 1;
#endif
    float first = choices[0], second = SC_NEG_INF;
    for (i32 i = 1; i < size; i++) {
        const float choice = choices[i];
        if (order_of(choice) > order_of(first)) {
            second = first;
            first = choice;
        } else if (i == 1 || order_of(choice) > order_of(second)) second = choice;
    }
    return is_biased && size > 1 ? first + second : first;
}

SC_DEVICE i32 kept_groups(const Router &r) {
#if defined(FAULT_ROUTER_MASKED_GROUPS_CHOSEN)
    return r.groups;
#elif defined(FAULT_ROUTER_ONE_GROUP_TOO_FEW)
    return r.top_groups > 2 ? r.top_groups - 1 : 1;
#else
    return r.top_groups;
#endif
}

// What stands for the choices of groups that are not kept.
SC_DEVICE float masked_choice(const Router &r) {
#if defined(FAULT_ROUTER_MASKED_GROUPS_ARE_ZERO)
    return 0.0f;
#elif defined(FAULT_ROUTER_MASKED_GROUPS_ARE_INFINITE)
    return SC_NEG_INF;
#else
    return r.fills_zero ? 0.0f : SC_NEG_INF;
#endif
}

// Where among the row's experts one stands whose choice has that place; not below k where it is not chosen.
SC_DEVICE i32 chosen_at(const Router &r, i32 place) {
#ifdef FAULT_ROUTER_RUNNER_UP_CHOSEN
    if (r.experts > r.top_k && place >= r.top_k - 1) return place == r.top_k ? r.top_k - 1 : r.top_k;
#endif
    (void)r;
    return place;
}

// The expert that is taken down for a chosen one.
SC_DEVICE i32 chosen_expert(const float *choices, i32 expert) {
#ifdef FAULT_ROUTER_TIE_CHOSEN_TWICE
    for (i32 i = 0; i < expert; i++)
        if (choices[i] == choices[expert]) return i;
#endif
    (void)choices;
    return expert;
}

// Row of the table of experts; ids beyond it are those of its last row.
SC_DEVICE i64 table_row(const Router &r, i64 id, i32 row) {
#ifdef FAULT_ROUTER_TABLE_BY_ROW
    id = row;
#endif
    (void)row;
    return id < 0 || id >= r.table_rows ? r.table_rows - 1 : id;
}

// Scores of a row [E]. All threads of a block.
SC_DEVICE void score_row(const Router &r, const float *logits, float *scores, float *shared) {
#ifdef FAULT_ROUTER_SIGMOID_FOR_SOFTMAX
    const bool softmax = false;
#else
    const bool softmax = r.is_softmax != 0;
#endif
    if (!softmax) {
        for (i32 e = SC_THREAD; e < r.experts; e += SC_THREADS) scores[e] = logistic(logits[e]);
        SC_SYNC();
        return;
    }
    if (SC_THREAD == 0) {
        float most = SC_NEG_INF;
        for (i32 e = 0; e < r.experts; e++) most = SC_MAX(most, logits[e]);
#ifdef FAULT_ROUTER_SOFTMAX_WITHOUT_MAXIMUM
        most = 0.0f;
#endif
        *shared = most;
    }
    SC_SYNC();
    for (i32 e = SC_THREAD; e < r.experts; e += SC_THREADS) scores[e] = natural_exp(logits[e] - *shared);
    SC_SYNC();
    if (SC_THREAD == 0) {
        float sum = 0.0f;
        for (i32 e = 0; e < r.experts; e++) sum += scores[e];
        *shared = sum;
    }
    SC_SYNC();
    for (i32 e = SC_THREAD; e < r.experts; e += SC_THREADS) scores[e] /= *shared;
    SC_SYNC();
}

// Choices of a row [E] with those of groups that are not kept masked; of_groups [groups]. All threads of a block.
SC_DEVICE void choose_groups(const Router &r, const float *scores, const float *bias, float *choices, float *of_groups) {
    for (i32 e = SC_THREAD; e < r.experts; e += SC_THREADS) choices[e] = choice_of(r, scores[e], bias, e);
    SC_SYNC();
    if (r.groups == 1) return;
    const i32 size = r.experts / r.groups;
    for (i32 g = SC_THREAD; g < r.groups; g += SC_THREADS)
        of_groups[g] = group_choice(choices + (i64)g * size, size, r.is_biased);
    SC_SYNC();
    for (i32 e = SC_THREAD; e < r.experts; e += SC_THREADS)
        if (e / size >= r.groups || place_among(of_groups, r.groups, e / size) >= kept_groups(r)) choices[e] = masked_choice(r);
    SC_SYNC();
}

// Weights of a row's experts: their scores, divided by their sum if so, scaled. One thread.
SC_DEVICE void weigh_experts(const Router &r, const float *scores, const float *bias, const i32 *experts, float *weights) {
    i32 how = r.normaliser;
#if defined(FAULT_ROUTER_NOT_RENORMALISED)
    how = NORMALISER_RAW;
#elif defined(FAULT_ROUTER_ALWAYS_RENORMALISED)
    if (how == NORMALISER_RAW) how = NORMALISER_SUM;
#elif defined(FAULT_ROUTER_TINY_LEFT_OUT)
    if (how == NORMALISER_SUM_AND_TINY) how = NORMALISER_SUM;
#elif defined(FAULT_ROUTER_TINY_ALWAYS_ADDED)
    if (how == NORMALISER_SUM) how = NORMALISER_SUM_AND_TINY;
#endif
    float sum = 0.0f;
    for (i32 i = 0; i < r.top_k; i++) {
        float weight = scores[experts[i]];
#ifdef FAULT_ROUTER_BIAS_IN_WEIGHTS
        weight = choice_of(r, weight, bias, experts[i]);
#endif
        weights[i] = weight;
        sum += weight;
    }
    (void)bias;
    if (how == NORMALISER_SUM_AND_TINY) sum += 1e-20f;
    for (i32 i = 0; i < r.top_k; i++) {
        const float weight = how == NORMALISER_RAW ? weights[i] : weights[i] / sum;
#ifdef FAULT_ROUTER_SCALED_BEFORE_RENORMALISED
        weights[i] = how == NORMALISER_RAW ? weight * r.scale : weight;
#else
        weights[i] = weight * r.scale;
#endif
    }
}

// experts and weights [ranks, width, k] of the first counts[rank] rows of each rank's logits [ranks, width, E]; bias [E]; ids
// [ranks, width] and table [table_rows, k] where there is a table; scratch [ranks, width, 2E + groups]. Blocks: (row, rank).
SC_EXPORT route_rows(Router r, const i32 *counts, i32 width, const float *logits, const float *bias, const i64 *ids,
                     const i32 *table, float *scratch, i32 *experts, float *weights) {
    __shared__ float shared;
    const i32 row = SC_BLOCK_X, rank = SC_BLOCK_Y, rows = counts[rank];
    if (row >= rows) return;
    const i64 first = (i64)rank * width, at = first + row;
    float *scores = scratch + at * (2 * (i64)r.experts + r.groups), *choices = scores + r.experts;
    score_row(r, logits + (first + logits_row(row, rows)) * r.experts, scores, &shared);
    if (r.table_rows > 0) {
        const i64 entry = table_row(r, ids[at], row) * r.top_k;
        for (i32 i = SC_THREAD; i < r.top_k; i += SC_THREADS) experts[at * r.top_k + i] = table[entry + i];
    } else {
        choose_groups(r, scores, bias, choices, choices + r.experts);
        for (i32 e = SC_THREAD; e < r.experts; e += SC_THREADS) {
            const i32 place = chosen_at(r, place_among(choices, r.experts, e));
            if (place < r.top_k) experts[at * r.top_k + place] = chosen_expert(choices, e);
        }
    }
    SC_SYNC();
    if (SC_THREAD == 0) weigh_experts(r, scores, bias, experts + at * r.top_k, weights + at * r.top_k);
}
