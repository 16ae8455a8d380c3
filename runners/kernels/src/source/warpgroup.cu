// The same latent attention on Hopper's warpgroup instructions (wgmma, sm_90a alone): both operands come out of shared memory, so
// that registers hold accumulators and nothing else. A block of two warpgroups works on 64 heads of one row and a segment of its tokens; each
// warpgroup scores half of a tile's tokens and sums half of the value's columns. Roundings are those of mla.cu.
#if defined(SC_CUDA) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Tiles in the unit's 128-byte swizzle: columns in groups of 64, each group a row of 128 bytes a token (or head).
#define GROUP_BYTES (64 * 128)
SC_DEVICE u32 group_at(i32 r, i32 c) { return (u32)((c >> 3) * GROUP_BYTES + r * 128 + (((c ^ r) & 7) << 4)); }

// Descriptor of a tile: address, distance of 64-column groups (for operands that lie columns first), distance of eight rows.
SC_DEVICE u64 tile_of(u32 address, u32 leading, u32 stride) {
    return (u64)((address & 0x3FFFFu) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)1 << 62;
}

#define F8(a, o)                                                                                                      \
    "+f"(a[o]), "+f"(a[o + 1]), "+f"(a[o + 2]), "+f"(a[o + 3]), "+f"(a[o + 4]), "+f"(a[o + 5]), "+f"(a[o + 6]), "+f"(a[o + 7])

// c [64, 32] += a [64, 16] x b [32, 16], both with their 16 columns together.
SC_DEVICE void multiply_scores(float *c, u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, %16, %17, 1, 1, 1, 0, 0;"
                 : F8(c, 0), F8(c, 8)
                 : "l"(a), "l"(b));
}
// c [64, 128] += a [64, 16] x b [16, 128], b with its 128 columns together.
SC_DEVICE void multiply_values(float *c, u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, 1, 1, 1, 0, 1;"
                 : F8(c, 0), F8(c, 8), F8(c, 16), F8(c, 24), F8(c, 32), F8(c, 40), F8(c, 48), F8(c, 56)
                 : "l"(a), "l"(b));
}
SC_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SC_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
SC_DEVICE void await_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// What threads wrote becomes visible to the matrix unit, once all have said so and met at a barrier.
SC_DEVICE void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A token's row of codes, or null beyond the segment: four threads a token, chunks in turn.
SC_DEVICE const u8 *row_of_tile(const Shape &s, const Batch &b, const i32 *table, i32 request, const u8 *keys, i64 rank_row, i32 tile,
                                i32 end, i32 bytes, i32 *error) {
    const i32 token = tile + SC_THREAD / 4;
    const i64 slot = token < end ? slot_of_local(s, b, table, request, token, error) : -1;
    return slot < 0 ? (const u8 *)0 : keys + (rank_row + slot) * bytes;
}

template <bool WIDE>
SC_DEVICE void attend_warpgroups(const Shape &s, const Batch *batch, const i32 *table, const i32 *row_lens, const i32 *row_requests,
                                 i32 rows, i32 segments, const u16 *query, const u8 *keys, float *max_out, float *sum_out,
                                 float *acc_out, i32 *error) {
    extern __shared__ __align__(1024) u8 tiles[];
    __shared__ float largest[2][MLA_HEADS], sums[2][MLA_HEADS];
    const i32 segment = SC_BLOCK_Z, first = SC_BLOCK_Y * MLA_HEADS, at = SC_BLOCK_X, rank = at / rows, row = at % rows;
    const i32 thread = SC_THREAD, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    i32 begin, end;
    segment_of(row_lens[at], segment, segments, &begin, &end);
    if (begin >= end) return;
    const Batch b = *batch;
    const i32 request = row_requests[row] < 0 ? 0 : row_requests[row];
    const i64 rank_row = (i64)rank * s.blocks * s.block;
    const u32 q = shared_address(tiles), k = q + MLA_HEADS * MLA_KEY * 2, p = k + 2 * MLA_TILE_BYTES;
    const float scale = score_scale(s) * read_scale(s);
    // where tiles are copied to: in place, or as codes behind the one tile that they are widened into
    const i32 bytes = MLA_KEY * (WIDE ? 2 : 1), chunks = bytes / 16;
    const u32 landing = WIDE ? k : k + MLA_TILE_BYTES, landing_bytes = MLA_TOKENS * bytes;

    for (i32 i = thread; i < MLA_HEADS * MLA_CHUNKS; i += MLA_THREADS) {
        const i32 r = i / MLA_CHUNKS, c = i % MLA_CHUNKS, head = first + r;
        const i64 from = ((i64)at * s.width + (head < s.width ? head : 0)) * MLA_KEY + c * 8;
        copy_chunk(q + group_at(r, c), query + from, head < s.width ? 16 : 0);
    }
    const auto start_copy = [&](i32 tile, u32 to) {
        const u8 *from = row_of_tile(s, b, table, request, keys, rank_row, tile, end, bytes, error);
#pragma unroll
        for (i32 j = 0; j < chunks / 4; j++) {
            const i32 c = thread % 4 + 4 * j;
            copy_chunk(to + (WIDE ? group_at(thread / 4, c) : (u32)(thread / 4 * bytes + c * 16)), from ? from + c * 16 : keys, from ? 16 : 0);
        }
        asm volatile("cp.async.commit_group;");
    };
    // each thread widens what it has copied itself
    const auto widen = [&](u32 from) {
#pragma unroll 3
        for (i32 j = 0; j < chunks / 4; j++) {
            const i32 c = thread % 4 + 4 * j;
            u32 x, y, z, w, wide[4];
            asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(from + thread / 4 * bytes + c * 16));
            widen_chunk(s.dtype, (u64)x | (u64)y << 32, wide);
            store_chunk(k + group_at(thread / 4, 2 * c), wide[0], wide[1], wide[2], wide[3]);
            widen_chunk(s.dtype, (u64)z | (u64)w << 32, wide);
            store_chunk(k + group_at(thread / 4, 2 * c + 1), wide[0], wide[1], wide[2], wide[3]);
        }
    };
    start_copy(begin, landing);

    float acc[2][64];
#pragma unroll
    for (i32 j = 0; j < 2; j++)
#pragma unroll
        for (i32 i = 0; i < 64; i++) acc[j][i] = 0.0f;
    // rows g and g + 8 of the warp's sixteen heads, of 32 tokens and of 256 columns
    const i32 head16 = warp % 4 * 16, half = warp / 4;
    float max[2] = {SC_NEG_INF, SC_NEG_INF}, sum[2] = {0.0f, 0.0f};

    i32 buffer = 0;
    for (i32 tile = begin; tile < end; tile += MLA_TOKENS, buffer ^= 1) {
        const bool more = tile + MLA_TOKENS < end;
        if (more) {
            start_copy(tile + MLA_TOKENS, landing + (buffer ^ 1) * landing_bytes);
            asm volatile("cp.async.wait_group 1;");
        } else {
            asm volatile("cp.async.wait_group 0;");
        }
        if (!WIDE) widen(landing + buffer * landing_bytes);
        publish();
        SC_SYNC();
        const u32 here = WIDE ? k + buffer * MLA_TILE_BYTES : k;

        float score[16];
#pragma unroll
        for (i32 i = 0; i < 16; i++) score[i] = 0.0f;
        begin_products();
#pragma unroll
        for (i32 step = 0; step < MLA_KEY / 16; step++) {
            const u32 place = (step >> 2) * GROUP_BYTES + (step & 3) * 32;
            multiply_scores(score, tile_of(q + place, 16, 1024), tile_of(here + half * 32 * 128 + place, 16, 1024));
        }
        commit_products();
        await_products();

        float tile_max[2] = {SC_NEG_INF, SC_NEG_INF};
#pragma unroll
        for (i32 i = 0; i < 16; i++) {
            const i32 token = tile + half * 32 + (i >> 2) * 8 + 2 * t + (i & 1), r = (i >> 1) & 1;
            score[i] = token < end ? score[i] * scale : SC_NEG_INF;
            tile_max[r] = fmaxf(tile_max[r], score[i]);
        }
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xFFFFFFFFu, tile_max[r], 1));
            tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xFFFFFFFFu, tile_max[r], 2));
            if (t == 0) largest[half][head16 + g + 8 * r] = tile_max[r];
        }
        SC_SYNC();
        // both warpgroups compute the same maximum of a head
        float factor[2];
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            const i32 head = head16 + g + 8 * r;
            const float before = max[r];
            max[r] = fmaxf(before, fmaxf(largest[0][head], largest[1][head]));
            factor[r] = tile == begin ? 0.0f : rescale_of(shift_of(before), shift_of(max[r]));
        }
        float added[2] = {0.0f, 0.0f};
#pragma unroll
        for (i32 n = 0; n < 4; n++) {
            float e[4];
#pragma unroll
            for (i32 i = 0; i < 4; i++) {
                const i32 token = tile + half * 32 + n * 8 + 2 * t + (i & 1);
                e[i] = token < end ? natural_exp(score[4 * n + i] - shift_of(max[i >> 1])) : 0.0f;
            }
            added[0] += e[0] + e[1];
            added[1] += e[2] + e[3];
            const i32 chunk = half * 4 + n;
            const u32 low = p + weight_at(head16 + g, chunk) + t * 4, high = p + weight_at(head16 + g + 8, chunk) + t * 4;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(low), "r"(pair_of(e[0], e[1])) : "memory");
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(high), "r"(pair_of(e[2], e[3])) : "memory");
        }
#pragma unroll
        for (i32 r = 0; r < 2; r++) sum[r] = SC_FMA(sum[r], factor[r], added[r]);
#pragma unroll
        for (i32 j = 0; j < 2; j++)
#pragma unroll
            for (i32 i = 0; i < 64; i++) acc[j][i] *= factor[(i >> 1) & 1];
        publish();
        SC_SYNC();

        begin_products();
#pragma unroll
        for (i32 step = 0; step < MLA_TOKENS / 16; step++) {
            const u64 weights = tile_of(p + step * 32, 16, 1024);
#pragma unroll
            for (i32 j = 0; j < 2; j++)
                multiply_values(acc[j], weights,
                                tile_of(here + (half * 4 + j * 2) * GROUP_BYTES + step * 16 * 128, GROUP_BYTES, 1024));
        }
        commit_products();
        await_products();
        SC_SYNC();
    }

#pragma unroll
    for (i32 r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
        if (t == 0) sums[half][head16 + g + 8 * r] = sum[r];
    }
    SC_SYNC();
    const i64 base = ((i64)segment * s.ranks * rows + at) * s.width + first;
#pragma unroll
    for (i32 r = 0; r < 2; r++) {
        const i32 head = head16 + g + 8 * r;
        if (first + head >= s.width) continue;
        if (t == 0 && half == 0) {
            max_out[base + head] = max[r];
            sum_out[base + head] = sums[0][head] + sums[1][head];
        }
        float *target = acc_out + (base + head) * MLA_VALUE + half * 256 + 2 * t;
#pragma unroll
        for (i32 j = 0; j < 2; j++)
#pragma unroll
            for (i32 n = 0; n < 16; n++) {
                float2 pair;
                pair.x = acc[j][4 * n + 2 * r];
                pair.y = acc[j][4 * n + 2 * r + 1];
                *(float2 *)(target + j * 128 + n * 8) = pair;
            }
    }
}

// The kernels of mla.cu by the same names: blocks, arguments and results are the same.
extern "C" __global__ void __launch_bounds__(MLA_THREADS, 1)
    attend_latent_bf16(Shape s, const Batch *batch, const i32 *table, const i32 *row_lens, const i32 *row_requests, i32 rows,
                           i32 segments, const u16 *query, const u8 *keys, const void *values, float *max, float *sum, float *acc,
                           i32 *error) {
    attend_warpgroups<true>(s, batch, table, row_lens, row_requests, rows, segments, query, keys, max, sum, acc, error);
}
extern "C" __global__ void __launch_bounds__(MLA_THREADS, 1)
    attend_latent_byte(Shape s, const Batch *batch, const i32 *table, const i32 *row_lens, const i32 *row_requests, i32 rows,
                           i32 segments, const u16 *query, const u8 *keys, const void *values, float *max, float *sum, float *acc,
                           i32 *error) {
    attend_warpgroups<false>(s, batch, table, row_lens, row_requests, rows, segments, query, keys, max, sum, acc, error);
}

// Products of one instruction: d [count, 64, 32] = a [count, 64, 16] x b [count, 32, 16] + c [count, 64, 32]; a and b
// bf16, c and d f32. One warpgroup a product.
SC_EXPORT measure_warpgroup(const u16 *a, const u16 *b, const float *c, i32 count, float *d) {
    __shared__ __align__(1024) u8 operands[2 * GROUP_BYTES];
    const i32 index = SC_BLOCK_X, thread = SC_THREAD, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    if (index >= count) return;
    const u32 left = shared_address(operands), right = left + GROUP_BYTES;
    for (i32 i = thread; i < 64 * 2; i += SC_THREADS) copy_chunk(left + group_at(i / 2, i % 2), a + index * 1024 + i * 8, 16);
    for (i32 i = thread; i < 32 * 2; i += SC_THREADS) copy_chunk(right + group_at(i / 2, i % 2), b + index * 512 + i * 8, 16);
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;");
    float s[16];
#pragma unroll
    for (i32 i = 0; i < 16; i++)
        s[i] = c[index * 2048 + (warp * 16 + g + 8 * ((i >> 1) & 1)) * 32 + (i >> 2) * 8 + 2 * t + (i & 1)];
    publish();
    SC_SYNC();
    begin_products();
    multiply_scores(s, tile_of(left, 16, 1024), tile_of(right, 16, 1024));
    commit_products();
    await_products();
#pragma unroll
    for (i32 i = 0; i < 16; i++)
        d[index * 2048 + (warp * 16 + g + 8 * ((i >> 1) & 1)) * 32 + (i >> 2) * 8 + 2 * t + (i & 1)] = s[i];
}
#endif
