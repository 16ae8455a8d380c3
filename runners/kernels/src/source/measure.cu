// What a card's arithmetic is seen to be: readings for a rounding contract.

// For each x [count]: out [count, 5] = natural_exp, natural_log, base_2_exp of this source, and the card's own 2^x and log2 x.
SC_EXPORT measure_exp(const float *x, i32 count, float *out) {
    const i64 index = SC_INDEX;
    if (index >= count) return;
    const float v = x[index];
    out[5 * index] = natural_exp(v);
    out[5 * index + 1] = natural_log(v);
    out[5 * index + 2] = base_2_exp(v);
#if defined(SC_CUDA)
    float e, l;
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(v));
    asm("lg2.approx.f32 %0, %1;" : "=f"(l) : "f"(v));
#else
    const float e = __builtin_amdgcn_exp2f(v), l = __builtin_amdgcn_logf(v);
#endif
    out[5 * index + 3] = e;
    out[5 * index + 4] = l;
}

// For each x [count]: its code in a cache of that type, and the value of the code.
SC_EXPORT measure_codes(const float *x, i32 dtype, i32 count, u32 *codes, float *values) {
    const i64 index = SC_INDEX;
    if (index >= count) return;
    codes[index] = encode(dtype, x[index]);
    const u32 code = codes[index];
    values[index] = decode(dtype, &code, 0);
}

// Matrix products of one instruction: d [count, 16, 8] = a [count, 16, 16] x b [count, 16, 8] + c [count, 16, 8]; a and b bf16, c and d
// f32. One warp a product.
SC_EXPORT measure_mma(const u16 *a, const u16 *b, const float *c, i32 count, float *d) {
#if defined(SC_CUDA)
    const i32 index = SC_BLOCK_X, lane = SC_THREAD, g = lane / 4, t = lane % 4;
    if (index >= count || lane >= 32) return;
    const u16 *from = a + index * 256, *by = b + index * 128;
    const float *plus = c + index * 128;
    u32 left[4], right[2];
    for (i32 i = 0; i < 4; i++) {
        const i32 row = g + 8 * (i & 1), column = 2 * t + 8 * (i >> 1);
        left[i] = (u32)from[row * 16 + column] | (u32)from[row * 16 + column + 1] << 16;
    }
    for (i32 i = 0; i < 2; i++) {
        const i32 row = 2 * t + 8 * i;
        right[i] = (u32)by[row * 8 + g] | (u32)by[(row + 1) * 8 + g] << 16;
    }
    float sum[4] = {plus[g * 8 + 2 * t], plus[g * 8 + 2 * t + 1], plus[(g + 8) * 8 + 2 * t], plus[(g + 8) * 8 + 2 * t + 1]};
    multiply(sum, left, right[0], right[1]);
    float *to = d + index * 128;
    to[g * 8 + 2 * t] = sum[0];
    to[g * 8 + 2 * t + 1] = sum[1];
    to[(g + 8) * 8 + 2 * t] = sum[2];
    to[(g + 8) * 8 + 2 * t + 1] = sum[3];
#endif
}

// The same of one instruction on e4m3fn codes: a [count, 16, 32], b [count, 32, 8]. Cards before compute
// capability 8.9 have none and leave d as it is. No kernel of this engine multiplies codes: they are widened to bf16 first.
SC_EXPORT measure_mma_byte(const u8 *a, const u8 *b, const float *c, i32 count, float *d) {
#if defined(SC_CUDA) && __CUDA_ARCH__ >= 890
    const i32 index = SC_BLOCK_X, lane = SC_THREAD, g = lane / 4, t = lane % 4;
    if (index >= count || lane >= 32) return;
    const u8 *from = a + index * 512, *by = b + index * 256;
    const float *plus = c + index * 128;
    u32 left[4] = {0, 0, 0, 0}, right[2] = {0, 0};
    for (i32 i = 0; i < 4; i++)
        for (i32 j = 0; j < 4; j++)
            left[i] |= (u32)from[(g + 8 * (i & 1)) * 32 + 4 * t + 16 * (i >> 1) + j] << (8 * j);
    for (i32 i = 0; i < 2; i++)
        for (i32 j = 0; j < 4; j++) right[i] |= (u32)by[(4 * t + 16 * i + j) * 8 + g] << (8 * j);
    float s[4] = {plus[g * 8 + 2 * t], plus[g * 8 + 2 * t + 1], plus[(g + 8) * 8 + 2 * t], plus[(g + 8) * 8 + 2 * t + 1]};
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
    float *to = d + index * 128;
    to[g * 8 + 2 * t] = s[0];
    to[g * 8 + 2 * t + 1] = s[1];
    to[(g + 8) * 8 + 2 * t] = s[2];
    to[(g + 8) * 8 + 2 * t + 1] = s[3];
#endif
}
