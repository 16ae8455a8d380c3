//! How fast the oracle is, against what the machine can do: `cargo run --release -p shardcheck-references
//! --example oracle_speed [tokens]`.

use shardcheck_formats::contract::{Contract, Merge};
use shardcheck_formats::dtype::Dtype;
use shardcheck_formats::recipe::{Distribution, Recipe};
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::attention::streaming;
use shardcheck_references::bound::{certify, certify_moments};
use shardcheck_references::layout::Layout;
use shardcheck_references::moments::{Moments, Passes};
use shardcheck_references::split::Split;
use shardcheck_references::visibility::Visible;
use std::hint::black_box;
use std::time::Instant;

const HEADS: usize = 128;
const QK_DIM: usize = 576;
const V_DIM: usize = 512;

fn main() {
    let tokens = std::env::args().nth(1).map_or(8192, |text| text.parse().expect("a number of tokens"));
    let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread pool");
    let peak = single.install(fused_peak);
    println!("fused multiply-add peak of one core     {peak:6.1} GF/s (f64)");
    let query = drawn(0, 3 * HEADS * QK_DIM);
    let key = drawn(1, tokens.max(1000) * QK_DIM);
    let scale = (QK_DIM as f64).powf(-0.5);
    let one = Problem::new(HEADS, 1, QK_DIM, V_DIM, scale, &query[..HEADS * QK_DIM], &key, Values::KeyPrefix);
    let visible = [Visible::Prefix(tokens)];
    let attention = 2.0 * (HEADS * tokens * (QK_DIM + V_DIM)) as f64;
    for threads in [1, std::thread::available_parallelism().map_or(1, |threads| threads.get())] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
        let narrow = Problem { v_dim: 8, ..one };
        let scores = 2.0 * (HEADS * tokens * QK_DIM) as f64;
        let seconds = pool.install(|| best_of(3, || drop(black_box(streaming::attend(&narrow, &visible)))));
        report("score pass (QK, softmax, 8 value dims)", threads, seconds, scores, peak);
        let plain = pool.install(|| best_of(3, || drop(black_box(streaming::attend(&one, &visible)))));
        report("attention, 128 heads of 576/512", threads, plain, attention, peak);
        println!("    {:.2} s for 2^20 tokens", plain * (1 << 20) as f64 / tokens as f64);
        let layout = Layout::new(8, 1, 1).expect("a layout");
        let moments = pool.install(|| {
            best_of(2, || {
                let split = Split::Ranks(&layout);
                drop(black_box(Moments::collect(&one, split, &visible, Passes::One).expect("finite inputs")));
            })
        });
        report("the same with moments, W = 8", threads, moments, attention, peak);
        println!("    {:.2} times the attention", moments / plain);
        real_shape(threads, &pool, &query, &key);
    }
}

/// The bound of a verification step at real head counts.
fn real_shape(threads: usize, pool: &rayon::ThreadPool, query: &[f32], key: &[f32]) {
    let scale = (QK_DIM as f64).powf(-0.5);
    let problem =
        Problem::new(HEADS, 1, QK_DIM, V_DIM, scale, query, &key[..1000 * QK_DIM], Values::KeyPrefix);
    let (layout, visible) = (Layout::new(8, 1, 1).expect("a layout"), Visible::causal(1000, 3));
    for merge in Merge::ALL {
        let contract = Contract::bf16_default(merge);
        let whole = pool.install(|| {
            best_of(2, || drop(black_box(certify(&problem, &layout, &visible, &contract).expect("a bound"))))
        });
        let moments =
            Moments::collect(&problem, Split::Ranks(&layout), &visible, Passes::One).expect("finite");
        let alone = pool.install(|| {
            best_of(2, || drop(black_box(certify_moments(&moments, &contract, false).expect("a bound"))))
        });
        println!(
            "bound of 3 rows, 1000 tokens, W = 8, {merge:<12} {threads} thread(s) {whole:6.3} s, {alone:.3} s from moments"
        );
    }
}

fn drawn(stream: u32, count: usize) -> Vec<f32> {
    let (distribution, dtype) = (Distribution::Gaussian, Dtype::Bf16);
    let mut values = vec![0.0; count];
    Recipe { seed: 1, stream, distribution, dtype, shape: vec![count], exponent: 0 }.fill(0, &mut values);
    values
}

/// The least time that `run` took, in seconds: of the calling thread alone where it does all the work itself, so
/// that a busy machine does not count, and by the clock on the wall otherwise.
fn best_of(runs: usize, mut run: impl FnMut()) -> f64 {
    let alone = rayon::current_num_threads() == 1;
    let mut one = || {
        let (start, busy) = (Instant::now(), if alone { busy_seconds() } else { None });
        run();
        match (busy, busy_seconds()) {
            (Some(before), Some(after)) => after - before,
            _ => start.elapsed().as_secs_f64(),
        }
    };
    (0..runs).map(|_| one()).fold(f64::INFINITY, f64::min)
}

/// Processor time of the calling thread, where the system tells.
fn busy_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(text.split_whitespace().next()?.parse::<u64>().ok()? as f64 * 1e-9)
}

fn report(what: &str, threads: usize, seconds: f64, operations: f64, peak: f64) {
    let rate = operations / seconds * 1e-9;
    let share = 100.0 * rate / (peak * threads as f64);
    println!("{what:<40}{rate:6.1} GF/s on {threads} thread(s), {share:.0} % of the peak, {seconds:.3} s");
}

/// Multiply-adds on registers alone, in GF/s.
fn fused_peak() -> f64 {
    const ROUNDS: usize = 20_000_000;
    let seconds = best_of(3, || {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has the features that the function is compiled for
            black_box(unsafe { fused_loop(ROUNDS) });
            return;
        }
        black_box(portable_loop(ROUNDS));
    });
    (ROUNDS * SUMS * 8) as f64 / seconds * 1e-9
}

/// Independent accumulators of four doubles.
const SUMS: usize = 10;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fused_loop(rounds: usize) -> f64 {
    let factor = [black_box(0.999_999_9); 4];
    let mut sums = [[1.0f64; 4]; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for (sum, factor) in sum.iter_mut().zip(&factor) {
                *sum = sum.mul_add(*factor, *factor);
            }
        }
    }
    sums.iter().flatten().sum()
}

fn portable_loop(rounds: usize) -> f64 {
    let factor = [black_box(0.999_999_9); 4];
    let mut sums = [[1.0f64; 4]; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for (sum, factor) in sum.iter_mut().zip(&factor) {
                *sum = *sum * *factor + *factor;
            }
        }
    }
    sums.iter().flatten().sum()
}
