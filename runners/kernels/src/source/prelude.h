// One source for NVRTC, nvcc, hipRTC and clang: what the dialects call differently, and nothing else.
// No header of a vendor is included, so the kernels compile where only a compiler is.
#if defined(__HIP__) || defined(__HIPCC_RTC__) || defined(__HIP_DEVICE_COMPILE__)
#define SC_HIP 1
#else
#define SC_CUDA 1
#endif

#if defined(SC_HIP) && !defined(__global__)
// clang without the HIP headers, where these words are macros
#define SC_BARE_HIP 1
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads) __attribute__((launch_bounds(threads)))
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#if defined(SC_BARE_HIP)
#define SC_THREAD ((i32)__builtin_amdgcn_workitem_id_x())
#define SC_BLOCK_X ((i32)__builtin_amdgcn_workgroup_id_x())
#define SC_BLOCK_Y ((i32)__builtin_amdgcn_workgroup_id_y())
#define SC_BLOCK_Z ((i32)__builtin_amdgcn_workgroup_id_z())
#define SC_SYNC()                                                                                                     \
    do {                                                                                                              \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");                                                        \
        __builtin_amdgcn_s_barrier();                                                                                 \
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");                                                        \
    } while (0)
#define SC_BITS(x) __builtin_bit_cast(u32, (float)(x))
#define SC_FLOAT(x) __builtin_bit_cast(float, (u32)(x))
#define SC_FMA(a, b, c) __builtin_fmaf((a), (b), (c))
#define SC_MAX(a, b) __builtin_fmaxf((a), (b))
#define SC_ATOMIC_MAX(p, v) __hip_atomic_fetch_max((p), (v), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)
#else
#define SC_THREAD ((i32)threadIdx.x)
#define SC_BLOCK_X ((i32)blockIdx.x)
#define SC_BLOCK_Y ((i32)blockIdx.y)
#define SC_BLOCK_Z ((i32)blockIdx.z)
#define SC_SYNC() __syncthreads()
#define SC_BITS(x) __float_as_uint(x)
#define SC_FLOAT(x) __uint_as_float(x)
#define SC_FMA(a, b, c) __fmaf_rn((a), (b), (c))
#define SC_MAX(a, b) fmaxf((a), (b))
#define SC_ATOMIC_MAX(p, v) atomicMax((p), (v))
#endif

#define SC_EXPORT extern "C" __global__ void
#if defined(SC_BARE_HIP)
#define SC_INLINE __device__ inline __attribute__((always_inline))
#else
#define SC_INLINE __device__ __forceinline__
#endif
#define SC_DEVICE static SC_INLINE

// A lambda of a kernel is code of the device everywhere; only some dialects want to be told.
#if defined(SC_HIP)
#define SC_LAMBDA __device__
#else
#define SC_LAMBDA
#endif

// Threads of a block in every kernel that does not say otherwise.
#define SC_THREADS 128

// Index of a thread in a one-dimensional launch. The host launches at least one block and never more than 2^31 - 1.
#define SC_INDEX ((i64)SC_BLOCK_X * SC_THREADS + SC_THREAD)

// What every kernel knows of a session; mirrored in Rust, field by field.
struct Shape {
    i32 ranks;       // ranks that this device plays
    i32 first;       // the first of them, among all ranks of the session
    i32 step;        // how far apart they are: devices of the session
    i32 all;         // all ranks of the session
    i32 world;       // ranks of one group
    i32 interleave;  // S
    i32 block;       // B
    i32 blocks;      // physical blocks of a rank
    i32 own;         // query heads of a rank
    i32 heads;       // query heads of a group
    i32 width;       // heads that the attention kernel runs with, padding included
    i32 kv_heads;    // KV heads of a rank
    i32 key_dim;     // width of a key
    i32 value_dim;   // width of a value
    i32 shared;      // whether the value is the first part of the key
    i32 dtype;       // of the cache: Code below
    i32 low_first;   // lane order: whether the low half of an LSE comes first
    float kv_scale;
    float kv_inverse;
    float score_scale;
};

// What changes from step to step, in device memory, so that a captured graph reads it anew.
struct Batch {
    i32 requests;  // n
    i32 rows;      // rows of the batch, graph padding included
    i32 width;     // entries of a block-table row
    i32 causal;    // whether rows are masked
};

// Element types of a cache.
enum Code { CODE_BF16 = 0, CODE_F16 = 1, CODE_F32 = 2, CODE_E4M3FN = 3, CODE_E4M3FNUZ = 4, CODE_E5M2 = 5 };

// Errors that a kernel reports in the error word: the larger one stays.
enum Failure { FAILURE_NONE = 0, FAILURE_TABLE_WIDTH = 1, FAILURE_BLOCK_ID = 2 };
