//! Named streams of numbers under one seed.

use shardcheck_formats::{Counter, Distribution, Dtype, Recipe};

use crate::stream::Stream;

/// Elements that a stream keeps apart for each request.
const REQUEST_STRIDE: u64 = 1 << 46;

/// The streams of one seed.
#[derive(Debug, Clone)]
pub(crate) struct Draw {
    seed: u64,
}

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Standard normal values (Irwin–Hall, at most 6 in magnitude) `start ..` of a request's part of a stream.
    pub fn gaussian(&self, stream: Stream, request: usize, start: usize, out: &mut [f32]) {
        self.recipe(stream, Distribution::Gaussian).fill(request as u64 * REQUEST_STRIDE + start as u64, out);
    }

    /// Values of zero mean and unit variance from one word each, for tensors that are large and only carry.
    pub fn uniform(&self, stream: Stream, out: &mut [f32]) {
        self.recipe(stream, Distribution::Uniform).fill(0, out);
        let unit_variance = 3f32.sqrt();
        out.iter_mut().for_each(|value| *value *= unit_variance);
    }

    /// Signs, −1 or 1.
    pub fn signs(&self, stream: Stream, out: &mut [f32]) {
        self.recipe(stream, Distribution::Sign).fill(0, out);
    }

    /// Decisions on block placement.
    pub fn placement(&self) -> Counter {
        Stream::Placement.counter(self.seed)
    }

    fn recipe(&self, stream: Stream, distribution: Distribution) -> Recipe {
        Recipe {
            seed: self.seed,
            stream: stream as u32,
            distribution,
            dtype: Dtype::F32,
            shape: vec![1 << 60],
            exponent: 0,
        }
    }
}
