// Latent attention on tensor cores (mma.sync, bf16 in, f32 out; cards other than Hopper) for the published shape: keys 576 wide, of which the first 512 are
// the values. A block of eight warps works on 64 heads of one row and a segment of its tokens, 64 tokens at a time, double-buffered.
// Tiles lie in shared memory in chunks of eight elements, a row's chunks swapped by its number, so that no two lanes of a load
// meet in a bank. Roundings are those of attend.cu; the sums are those of the matrix unit, which truncates.
#if defined(SC_CUDA)

#define MLA_HEADS 64
#define MLA_TOKENS 64
#define MLA_KEY 576
#define MLA_VALUE 512
#define MLA_THREADS 256
#define MLA_CHUNKS (MLA_KEY / 8)
#define MLA_TILE_BYTES (MLA_TOKENS * MLA_KEY * 2)

// Offset in bytes of chunk `c` of row `r`.
SC_DEVICE u32 key_at(i32 r, i32 c) { return (u32)(r * MLA_CHUNKS + ((c & ~7) | ((c ^ r) & 7))) * 16u; }
SC_DEVICE u32 weight_at(i32 r, i32 c) { return (u32)(r * 8 + ((c ^ r) & 7)) * 16u; }

SC_DEVICE u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

SC_DEVICE void load_matrices(u32 address, u32 *r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
SC_DEVICE void load_transposed(u32 address, u32 *r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
SC_DEVICE void multiply(float *c, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Sixteen bytes of global memory into shared memory in the background; zeros where `bytes` is 0.
SC_DEVICE void copy_chunk(u32 to, const void *from, i32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
SC_DEVICE void store_chunk(u32 to, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w));
}

SC_DEVICE u32 pair_of(float low, float high) { return (u32)bf16_of(low) | (u32)bf16_of(high) << 16; }

// Two eight-bit codes as two bf16 numbers, exact: every eight-bit code is a bf16 number.
SC_DEVICE u32 widened(i32 dtype, u32 codes) {
    const u8 pair[2] = {(u8)codes, (u8)(codes >> 8)};
    return pair_of(decode(dtype, pair, 0), decode(dtype, pair, 1));
}

static __device__ __noinline__ void widen_slowly(i32 dtype, u64 codes, u32 *out) {
    for (i32 i = 0; i < 4; i++) out[i] = widened(dtype, (u32)(codes >> (16 * i)));
}

// Eight eight-bit codes as eight bf16 numbers. The exponent's bias is mended by an exact product; codes that are no finite number take
// the slow way.
SC_DEVICE void widen_chunk(i32 dtype, u64 codes, u32 *out) {
    const u32 word[2] = {(u32)codes, (u32)(codes >> 32)};
    u32 odd = 0;
#pragma unroll
    for (i32 i = 0; i < 2; i++) {
        const u32 pattern = dtype == CODE_E5M2 ? 0x7C7C7C7Cu : dtype == CODE_E4M3FN ? 0x7F7F7F7Fu : 0x80808080u;
        const u32 mask = dtype == CODE_E4M3FNUZ ? 0xFFFFFFFFu : pattern;
        const u32 t = (word[i] & mask) ^ pattern;
        odd |= (t - 0x01010101u) & ~t & 0x80808080u;
    }
#if defined(FAULT_FNUZ_READ_AS_FN) || defined(FAULT_FN_READ_AS_FNUZ)
    odd = 1;
#endif
    if (odd) {
        widen_slowly(dtype, codes, out);
        return;
    }
    const u32 shift = dtype == CODE_E5M2 ? 3 : 4;
    // 2^112, 2^120 or 2^119 in both halves
    const u32 bias = dtype == CODE_E5M2 ? 0x77807780u : dtype == CODE_E4M3FN ? 0x7B807B80u : 0x7B007B00u;
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        const u32 lanes = __byte_perm(word[i >> 1], 0, i & 1 ? 0x3424 : 0x1404);
        const u32 magnitude = (lanes & 0x7F007F00u) >> shift;
        u32 value;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(value) : "r"(magnitude), "r"(bias), "r"(0x80008000u));
        out[i] = (value & 0x7FFF7FFFu) | (lanes & 0x80008000u);
    }
}

// Loads the tokens of a tile: four threads a token, chunks in turn.
template <bool WIDE>
SC_DEVICE void load_tile(const Shape &s, const Batch &b, const i32 *table, i32 request, const u8 *keys, i64 rank_row, i32 tile,
                         i32 end, u32 to, i32 *error) {
    const i32 r = SC_THREAD / 4, token = tile + r;
    const i64 slot = token < end ? slot_of_local(s, b, table, request, token, error) : -1;
    const u8 *row = keys + (rank_row + (slot < 0 ? 0 : slot)) * (MLA_KEY * (WIDE ? 2 : 1));
    if (WIDE) {
#pragma unroll
        for (i32 j = 0; j < MLA_CHUNKS / 4; j++) {
            const i32 c = SC_THREAD % 4 + 4 * j;
            copy_chunk(to + key_at(r, c), row + c * 16, slot < 0 ? 0 : 16);
        }
    } else {
#pragma unroll 6
        for (i32 j = 0; j < MLA_CHUNKS / 4; j++) {
            const i32 c = SC_THREAD % 4 + 4 * j;
            u64 codes = slot < 0 ? 0 : *(const u64 *)(row + c * 8);
            u32 wide[4];
            widen_chunk(s.dtype, codes, wide);
            store_chunk(to + key_at(r, c), wide[0], wide[1], wide[2], wide[3]);
        }
    }
    asm volatile("cp.async.commit_group;");
}

template <bool WIDE>
SC_DEVICE void attend_latent(const Shape &s, const Batch *batch, const i32 *table, const i32 *row_lens, const i32 *row_requests,
                             i32 rows, i32 segments, const u16 *query, const u8 *keys, float *max_out, float *sum_out,
                             float *acc_out, i32 *error) {
    extern __shared__ __align__(128) u8 tiles[];
    __shared__ float largest[2][MLA_HEADS], factors[MLA_HEADS], sums[2][MLA_HEADS];
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

    for (i32 i = thread; i < MLA_HEADS * MLA_CHUNKS; i += MLA_THREADS) {
        const i32 r = i / MLA_CHUNKS, c = i % MLA_CHUNKS, head = first + r;
        const i64 from = ((i64)at * s.width + (head < s.width ? head : 0)) * MLA_KEY + c * 8;
        copy_chunk(q + key_at(r, c), query + from, head < s.width ? 16 : 0);
    }
    load_tile<WIDE>(s, b, table, request, keys, rank_row, begin, end, k, error);

    float acc[4][8][4];
#pragma unroll
    for (i32 m = 0; m < 4; m++)
#pragma unroll
        for (i32 n = 0; n < 8; n++)
#pragma unroll
            for (i32 i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
    // rows g and g + 8 of the warp's sixteen heads
    const i32 head16 = warp % 4 * 16, half = warp / 4;
    float max[2] = {SC_NEG_INF, SC_NEG_INF}, sum[2] = {0.0f, 0.0f};

    i32 buffer = 0;
    for (i32 tile = begin; tile < end; tile += MLA_TOKENS, buffer ^= 1) {
        if (tile + MLA_TOKENS < end) {
            load_tile<WIDE>(s, b, table, request, keys, rank_row, tile + MLA_TOKENS, end, k + (buffer ^ 1) * MLA_TILE_BYTES, error);
            asm volatile("cp.async.wait_group 1;");
        } else {
            asm volatile("cp.async.wait_group 0;");
        }
        SC_SYNC();
        const u32 here = k + buffer * MLA_TILE_BYTES;

        // scores of sixteen heads and 32 tokens a warp
        float score[4][4];
#pragma unroll
        for (i32 n = 0; n < 4; n++)
#pragma unroll
            for (i32 i = 0; i < 4; i++) score[n][i] = 0.0f;
#pragma unroll 6
        for (i32 step = 0; step < MLA_KEY / 16; step++) {
            u32 a[4], b0[4], b1[4];
            load_matrices(q + key_at(head16 + (lane & 15), 2 * step + (lane >> 4)), a);
            const i32 token = half * 32 + (lane & 7) + ((lane >> 4) << 3), chunk = 2 * step + ((lane >> 3) & 1);
            load_matrices(here + key_at(token, chunk), b0);
            load_matrices(here + key_at(token + 16, chunk), b1);
            multiply(score[0], a, b0[0], b0[1]);
            multiply(score[1], a, b0[2], b0[3]);
            multiply(score[2], a, b1[0], b1[1]);
            multiply(score[3], a, b1[2], b1[3]);
        }
        float tile_max[2] = {SC_NEG_INF, SC_NEG_INF};
#pragma unroll
        for (i32 n = 0; n < 4; n++)
#pragma unroll
            for (i32 i = 0; i < 4; i++) {
                const i32 token = tile + half * 32 + n * 8 + 2 * t + (i & 1);
                score[n][i] = token < end ? score[n][i] * scale : SC_NEG_INF;
                tile_max[i >> 1] = fmaxf(tile_max[i >> 1], score[n][i]);
            }
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xFFFFFFFFu, tile_max[r], 1));
            tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xFFFFFFFFu, tile_max[r], 2));
            if (t == 0) largest[half][head16 + g + 8 * r] = tile_max[r];
        }
        SC_SYNC();
        // both warps of a head compute the same maximum
        float added[2] = {0.0f, 0.0f}, factor[2];
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            const i32 head = head16 + g + 8 * r;
            const float before = max[r];
            max[r] = fmaxf(before, fmaxf(largest[0][head], largest[1][head]));
            factor[r] = tile == begin ? 0.0f : rescale_of(shift_of(before), shift_of(max[r]));
            if (half == 0 && t == 0) factors[head] = factor[r];
        }
#pragma unroll
        for (i32 n = 0; n < 4; n++) {
            float e[4];
#pragma unroll
            for (i32 i = 0; i < 4; i++) {
                const i32 token = tile + half * 32 + n * 8 + 2 * t + (i & 1);
                e[i] = token < end ? natural_exp(score[n][i] - shift_of(max[i >> 1])) : 0.0f;
            }
            added[0] += e[0] + e[1];
            added[1] += e[2] + e[3];
            const i32 chunk = half * 4 + n;
            const u32 low = p + weight_at(head16 + g, chunk) + t * 4, high = p + weight_at(head16 + g + 8, chunk) + t * 4;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(low), "r"(pair_of(e[0], e[1])));
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(high), "r"(pair_of(e[2], e[3])));
        }
#pragma unroll
        for (i32 r = 0; r < 2; r++) sum[r] = SC_FMA(sum[r], factor[r], added[r]);
        SC_SYNC();

        // 64 heads and 64 columns a warp
#pragma unroll
        for (i32 m = 0; m < 4; m++) {
            const float f0 = factors[m * 16 + g], f1 = factors[m * 16 + g + 8];
#pragma unroll
            for (i32 n = 0; n < 8; n++) {
                acc[m][n][0] *= f0;
                acc[m][n][1] *= f0;
                acc[m][n][2] *= f1;
                acc[m][n][3] *= f1;
            }
        }
#pragma unroll
        for (i32 step = 0; step < MLA_TOKENS / 16; step++) {
            u32 v[4][4];
#pragma unroll
            for (i32 n = 0; n < 4; n++)
                load_transposed(here + key_at(step * 16 + (lane & 15), warp * 8 + 2 * n + (lane >> 4)), v[n]);
#pragma unroll
            for (i32 m = 0; m < 4; m++) {
                u32 a[4];
                load_matrices(p + weight_at(m * 16 + (lane & 15), 2 * step + (lane >> 4)), a);
#pragma unroll
                for (i32 n = 0; n < 4; n++) {
                    multiply(acc[m][2 * n], a, v[n][0], v[n][1]);
                    multiply(acc[m][2 * n + 1], a, v[n][2], v[n][3]);
                }
            }
        }
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
    if (t == 0 && half == 0) {
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            const i32 head = head16 + g + 8 * r;
            if (first + head < s.width) {
                max_out[base + head] = max[r];
                sum_out[base + head] = sums[0][head] + sums[1][head];
            }
        }
    }
#pragma unroll
    for (i32 m = 0; m < 4; m++)
#pragma unroll
        for (i32 r = 0; r < 2; r++) {
            const i32 head = m * 16 + g + 8 * r;
            if (first + head >= s.width) continue;
            float *target = acc_out + (base + head) * MLA_VALUE + warp * 64 + 2 * t;
#pragma unroll
            for (i32 n = 0; n < 8; n++) {
                float2 pair;
                pair.x = acc[m][n][2 * r];
                pair.y = acc[m][n][2 * r + 1];
                *(float2 *)(target + n * 8) = pair;
            }
        }
}

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Blocks: (rank·T + row, 64 heads, segment), MLA_THREADS threads, as attend_paged otherwise. The accumulators still lack the cache
// scale: finish_segments is given it.
extern "C" __global__ void __launch_bounds__(MLA_THREADS, 1)
    attend_latent_bf16(Shape s, const Batch *batch, const i32 *table, const i32 *row_lens, const i32 *row_requests, i32 rows,
                       i32 segments, const u16 *query, const u8 *keys, const void *values, float *max, float *sum, float *acc,
                       i32 *error) {
    attend_latent<true>(s, batch, table, row_lens, row_requests, rows, segments, query, keys, max, sum, acc, error);
}
extern "C" __global__ void __launch_bounds__(MLA_THREADS, 1)
    attend_latent_byte(Shape s, const Batch *batch, const i32 *table, const i32 *row_lens, const i32 *row_requests, i32 rows,
                       i32 segments, const u16 *query, const u8 *keys, const void *values, float *max, float *sum, float *acc,
                       i32 *error) {
    attend_latent<false>(s, batch, table, row_lens, row_requests, rows, segments, query, keys, max, sum, acc, error);
}
#endif
#endif
