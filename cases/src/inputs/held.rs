//! What the engine really holds: values after the cast to the cache format.

use shardcheck_engine::{Configuration, Conventions, ScaleRounding};
use shardcheck_formats::{decode_f32, encode_f32};

use crate::Inputs;

/// The code that a cache holds for `value`: cast(value / kv_scale), with the division and the overflow of the conventions.
pub fn cache_code(configuration: &Configuration, conventions: &Conventions, value: f32) -> u64 {
    let scaled = match conventions.scale_rounding {
        ScaleRounding::Divide => value / configuration.kv_scale,
        ScaleRounding::Reciprocal => value * (1.0 / configuration.kv_scale),
    };
    encode_f32(configuration.kv_dtype, scaled, conventions.overflow)
}

/// The value of a cache code: decode(code) · kv_scale, the product rounded to f32.
pub fn cache_value(configuration: &Configuration, code: u64) -> f32 {
    decode_f32(configuration.kv_dtype, code) * configuration.kv_scale
}

impl Inputs {
    /// Keys of each request [L, K, Dk] as attention sees them: through the cache, except the new rows of the context family,
    /// which the operation brings along as they are.
    pub fn held_keys(&self, conventions: &Conventions) -> Vec<Vec<f32>> {
        let attention = self.case.configuration.attention;
        self.held(&self.keys, attention.kv_heads() * attention.qk_dim(), conventions)
    }

    /// Values of each request [L, K, Dv], likewise. For MLA they are the first Dv elements of the held keys.
    pub fn held_values(&self, conventions: &Conventions) -> Vec<Vec<f32>> {
        let attention = self.case.configuration.attention;
        if !attention.is_mla() {
            return self.held(&self.values, attention.kv_heads() * attention.value_dim(), conventions);
        }
        let (qk, value) = (attention.qk_dim(), attention.value_dim());
        self.held_keys(conventions)
            .iter()
            .map(|keys| keys.chunks_exact(qk).flat_map(|key| key[..value].iter().copied()).collect())
            .collect()
    }

    fn held(&self, raw: &[Vec<f32>], elements: usize, conventions: &Conventions) -> Vec<Vec<f32>> {
        let configuration = &self.case.configuration;
        raw.iter()
            .enumerate()
            .map(|(request, values)| {
                let cached = if self.family.brings_new_keys() {
                    self.cached_tokens(request) * elements
                } else {
                    values.len()
                };
                let (through_cache, given) = values.split_at(cached);
                through_cache
                    .iter()
                    .map(|value| cache_value(configuration, cache_code(configuration, conventions, *value)))
                    .chain(given.iter().copied())
                    .collect()
            })
            .collect()
    }
}
