// The query that a rank's kernel receives: its own heads gathered over the group, or the group's heads at once.
// query [T, heads of all ranks, Dk], bf16.

// own [ranks, T, H, Dk]: what each rank projects itself. `ranks` are those that the device plays here and below.
SC_EXPORT select_own_heads(Shape s, const u16 *query, i32 rows, u16 *own) {
    const i64 index = SC_INDEX, count = (i64)s.ranks * rows * s.own * s.key_dim;
    if (index >= count) return;
    const i32 d = (i32)(index % s.key_dim), head = (i32)(index / s.key_dim % s.own);
    const i32 row = (i32)(index / s.key_dim / s.own % rows), rank = (i32)(index / s.key_dim / s.own / rows);
#if defined(FAULT_OWN_HEADS_BY_PLACE_IN_GROUP)
    const i32 first = member_of(s, rank) * s.own;
#elif defined(FAULT_OWN_HEADS_OF_THE_NEXT_RANK)
    const i32 next = rank_at(s, rank) + 1, first = (next < s.all ? next : next - 1) * s.own;
#else
    const i32 first = rank_at(s, rank) * s.own;
#endif
    own[index] = query[((i64)row * s.all * s.own + first + head) * s.key_dim + d];
}

// kernel query [ranks, T, width, Dk] out of what the members of the group sent: own [ranks, T, H, Dk] where one device plays all
// ranks, else exchanged [ranks, W, T, H, Dk], which every rank was brought. Heads beyond the group's are zeros: repeating a head
// would reorder what a kernel groups.
SC_EXPORT gather_heads(Shape s, const u16 *own, i32 exchanged, i32 rows, u16 *gathered) {
    const i64 index = SC_INDEX, count = (i64)s.ranks * rows * s.width * s.key_dim;
    if (index >= count) return;
    const i32 d = (i32)(index % s.key_dim), head = (i32)(index / s.key_dim % s.width);
    const i32 row = (i32)(index / s.key_dim / s.width % rows), rank = (i32)(index / s.key_dim / s.width / rows);
    if (head >= s.heads) {
        gathered[index] = 0;
        return;
    }
    i32 member = head / s.own, place = head % s.own, from = row;
#if defined(FAULT_QUERY_NOT_GATHERED)
    member = member_of(s, rank);
#elif defined(FAULT_QUERY_GATHERED_IN_REVERSE)
    member = s.world - 1 - member;
#elif defined(FAULT_HEADS_DEALT_IN_TURN)
    member = head % s.world;
    place = head / s.world;
#elif defined(FAULT_GATHERED_QUERY_NOT_TRANSPOSED)
    const i64 flat = (i64)row * s.heads + head;
    member = (i32)(flat / ((i64)rows * s.own));
    from = (i32)(flat / s.own % rows);
    place = (i32)(flat % s.own);
#endif
    const i64 sender = exchanged ? (i64)rank * s.world + member : rank / s.world * s.world + member;
    gathered[index] = own[((sender * rows + from) * s.own + place) * s.key_dim + d];
}

// The same where every rank projects the heads of its group itself.
SC_EXPORT select_group_heads(Shape s, const u16 *query, i32 rows, u16 *gathered) {
    const i64 index = SC_INDEX, count = (i64)s.ranks * rows * s.width * s.key_dim;
    if (index >= count) return;
    const i32 d = (i32)(index % s.key_dim), head = (i32)(index / s.key_dim % s.width);
    const i32 row = (i32)(index / s.key_dim / s.width % rows), rank = (i32)(index / s.key_dim / s.width / rows);
#if defined(FAULT_EVERY_GROUP_TAKES_THE_FIRST)
    const i32 first = 0;
#else
    const i32 first = rank_at(s, rank) / s.world * s.heads;
#endif
    gathered[index] =
        head < s.heads ? query[((i64)row * s.all * s.own + first + head) * s.key_dim + d] : (u16)0;
}

// Heads [ranks, T, heads, Dk] without the padding of [ranks, T, width, Dk]: what is shown of the kernel's query.
SC_EXPORT strip_heads(Shape s, const u16 *padded, i32 rows, u16 *out) {
    const i64 index = SC_INDEX, count = (i64)s.ranks * rows * s.heads * s.key_dim;
    if (index >= count) return;
    const i32 d = (i32)(index % s.key_dim), head = (i32)(index / s.key_dim % s.heads);
    const i64 row = index / s.key_dim / s.heads;
    out[index] = padded[(row * s.width + head) * s.key_dim + d];
}

// Up-projection of heads: out [ranks, T, heads, to] = in [ranks, T, heads, from] x w_uv [heads of all ranks, from, to], bf16
// in and out, f32 between. `group` says whether `heads` are those of the group or the rank's own. One block a head.
SC_EXPORT project_heads(Shape s, const u16 *in, const u16 *w_uv, i32 rows, i32 heads, i32 from, i32 to, i32 group, u16 *out) {
    const i32 row = SC_BLOCK_X, head = SC_BLOCK_Y, rank = SC_BLOCK_Z;
    const i32 of_session = rank_at(s, rank);
    i32 of_all = group ? of_session / s.world * s.heads + head : of_session * s.own + head;
#ifdef FAULT_UP_PROJECTION_OF_OWN_HEADS
    if (group) of_all = of_session * s.own + head % s.own;
#endif
    const u16 *latent = in + (((i64)rank * rows + row) * heads + head) * from;
    const u16 *weights = w_uv + (i64)of_all * from * to;
    u16 *target = out + (((i64)rank * rows + row) * heads + head) * to;
    for (i32 v = SC_THREAD; v < to; v += SC_THREADS) {
        float sum = 0.0f;
#ifdef FAULT_UP_PROJECTION_TRANSPOSED
        for (i32 d = 0; d < from; d++) sum = SC_FMA(of_bf16(latent[d]), of_bf16(weights[(i64)v * from + d]), sum);
#else
        for (i32 d = 0; d < from; d++) sum = SC_FMA(of_bf16(latent[d]), of_bf16(weights[(i64)d * to + v]), sum);
#endif
        target[v] = bf16_of(sum);
    }
}
