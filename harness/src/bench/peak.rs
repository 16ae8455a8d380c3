//! What the machine can do at most: fused multiply-adds on registers, in float64.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;

/// Independent accumulators: enough to hide the latency of two fused units.
const SUMS: usize = 12;
/// Doubles of an accumulator.
const LANES: usize = 4;
/// Rounds of one measurement.
const ROUNDS: usize = 20_000_000;
/// Measurements of which the fastest counts.
const REPEATS: usize = 5;

/// Operations a second (a multiply-add is two), on one thread and on all threads of the current pool.
pub(super) fn measured() -> (f64, f64) {
    let operations = (ROUNDS * SUMS * LANES * 2) as f64;
    let best = |run: &dyn Fn() -> f64| {
        let one = || {
            let start = Instant::now();
            black_box(run());
            start.elapsed().as_secs_f64()
        };
        (0..REPEATS).map(|_| one()).fold(f64::INFINITY, f64::min)
    };
    let threads = rayon::current_num_threads();
    let alone = operations / best(&multiply_add);
    let together = best(&|| (0..threads).into_par_iter().map(|_| multiply_add()).sum());
    (alone, threads as f64 * operations / together)
}

fn multiply_add() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the features that the loop is compiled for
        return unsafe { fused() };
    }
    portable()
}

/// By name of the instruction: left to the compiler, the accumulators don't all stay in registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fused() -> f64 {
    use std::arch::x86_64::{_mm256_cvtsd_f64, _mm256_fmadd_pd, _mm256_set1_pd};
    let factor = _mm256_set1_pd(black_box(0.999_999_9));
    let mut sums = [_mm256_set1_pd(1.0); SUMS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = _mm256_fmadd_pd(*sum, factor, factor);
        }
    }
    // all lanes count, or the compiler might leave some out
    black_box(sums).into_iter().map(|sum| _mm256_cvtsd_f64(sum)).sum()
}

fn portable() -> f64 {
    let factor = [black_box(0.999_999_9); LANES];
    let mut sums = [[1.0f64; LANES]; SUMS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            for j in 0..LANES {
                sum[j] = sum[j] * factor[j] + factor[j];
            }
        }
    }
    sums.iter().flatten().sum()
}
