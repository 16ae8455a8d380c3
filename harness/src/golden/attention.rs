//! Attention problems with their moments.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardcheck_engine::Tensor;
use shardcheck_formats::{Counter, Dtype, Overflow, decode_f32, encode_f32, round_bf16};
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::exp::Fixed;
use shardcheck_references::layout::Layout;
use shardcheck_references::moments::{Moments, Part};
use shardcheck_references::split::Split;
use shardcheck_references::visibility::Visible;

use super::{f64_tensor, pack};

/// One problem: its sizes; its tensors are `NAME.query`, `NAME.key`, … in `attention.safetensors`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionEntry {
    /// Prefix of the tensors' names.
    pub name: String,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Width of a query and a key.
    pub qk_dim: usize,
    /// Width of a value; for `value_is_key_prefix` the first so many elements of the key.
    pub v_dim: usize,
    /// Whether the value is a prefix of the key (absorbed MLA).
    pub value_is_key_prefix: bool,
    /// Factor of the scores, a power of two so that it is exact everywhere.
    pub scale: f64,
    /// Element type of keys and values.
    pub kv_dtype: Dtype,
    /// Tokens of the context, the query rows included.
    pub tokens: usize,
    /// Query rows: row t sees positions below tokens − rows + 1 + t.
    pub rows: usize,
    /// Ranks W.
    pub world: usize,
    /// Interleave size S.
    pub interleave: usize,
}

/// Problems: every world size that is not a power of two, empty shards, S > 1, several rows, both kinds of attention, all formats.
fn entries() -> Vec<AttentionEntry> {
    let shapes = [(4, 1, 24, 16, true), (4, 2, 16, 16, false), (3, 3, 8, 8, false)];
    let layouts = [(1, 1), (2, 1), (3, 1), (3, 4), (4, 2), (8, 1), (8, 16), (6, 1)];
    let lengths = [(1, 1), (2, 2), (5, 3), (17, 1), (37, 4), (96, 2)];
    let dtypes = [Dtype::Bf16, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2];
    let mut entries = Vec::new();
    for (index, (world, interleave)) in layouts.into_iter().cycle().take(32).enumerate() {
        let (heads, kv_heads, qk_dim, v_dim, mla) = shapes[index % shapes.len()];
        let (tokens, rows) = lengths[(index + index / 8) % lengths.len()];
        let kv_dtype = dtypes[(index / 3) % dtypes.len()];
        entries.push(AttentionEntry {
            name: format!("a{index:02}"),
            heads,
            kv_heads,
            qk_dim,
            v_dim,
            value_is_key_prefix: mla,
            scale: 0.25,
            kv_dtype,
            tokens,
            rows,
            world,
            interleave,
        });
    }
    entries
}

/// Inputs of a problem as values: query, key, value.
fn inputs(entry: &AttentionEntry, index: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let draw = |stream: u32, count: usize, dtype: Dtype| {
        let mut counter = Counter::new(0x601d, stream * 64 + index as u32);
        let stored = |value: f32| decode_f32(dtype, encode_f32(dtype, round_bf16(value), Overflow::Saturate));
        (0..count).map(|_| stored(counter.gaussian() as f32)).collect::<Vec<_>>()
    };
    let query = draw(1, entry.rows * entry.heads * entry.qk_dim, Dtype::Bf16);
    let key = draw(2, entry.tokens * entry.kv_heads * entry.qk_dim, entry.kv_dtype);
    let values = if entry.value_is_key_prefix { 0 } else { entry.tokens * entry.kv_heads * entry.v_dim };
    let value = draw(3, values, entry.kv_dtype);
    (query, key, value)
}

/// The moments of the problem of that number, made by the deterministic route, with the problem's entry.
///
/// # Panics
/// When there is no such problem.
pub fn moments_of(index: usize) -> (AttentionEntry, Moments) {
    let entry = entries().swap_remove(index);
    let (query, key, value) = inputs(&entry, index);
    let values = if entry.value_is_key_prefix { Values::KeyPrefix } else { Values::Separate(&value) };
    let problem = Problem::new(
        entry.heads,
        entry.kv_heads,
        entry.qk_dim,
        entry.v_dim,
        entry.scale,
        &query,
        &key,
        values,
    );
    let layout = Layout::new(entry.world, entry.interleave, entry.interleave).expect("S divides itself");
    let visible = Visible::causal(entry.tokens, entry.rows);
    let moments = Moments::collect_with::<Fixed, f32>(&problem, Split::Ranks(&layout), &visible)
        .expect("drawn inputs are finite");
    (entry, moments)
}

/// The file and the list of its problems.
pub(super) fn file() -> (Vec<u8>, Vec<AttentionEntry>) {
    let entries = entries();
    let mut tensors = BTreeMap::new();
    for (index, entry) in entries.iter().enumerate() {
        let (query, key, value) = inputs(entry, index);
        let name = |tensor: &str| format!("{}.{tensor}", entry.name);
        tensors.insert(
            name("query"),
            Tensor::from_f32(Dtype::Bf16, &[entry.rows, entry.heads, entry.qk_dim], &query),
        );
        let shape = [entry.tokens, entry.kv_heads, entry.qk_dim];
        tensors.insert(name("key"), Tensor::from_f32(entry.kv_dtype, &shape, &key));
        if !entry.value_is_key_prefix {
            let shape = [entry.tokens, entry.kv_heads, entry.v_dim];
            tensors.insert(name("value"), Tensor::from_f32(entry.kv_dtype, &shape, &value));
        }
        let (_, moments) = moments_of(index);
        for (tensor, values) in moment_tensors(entry, &moments) {
            tensors.insert(name(&tensor), values);
        }
    }
    (pack(&tensors), entries)
}

/// Expected values and moments: states `[rows, heads, …]`, parts `[W, rows, heads, …]`.
fn moment_tensors(entry: &AttentionEntry, moments: &Moments) -> Vec<(String, Tensor)> {
    let (rows, heads, v_dim, world) = (entry.rows, entry.heads, entry.v_dim, entry.world);
    let states = &moments.states;
    let scalar = |get: &dyn Fn(&shardcheck_references::moments::State) -> f64| {
        f64_tensor(&[rows, heads], &states.iter().map(get).collect::<Vec<_>>())
    };
    let mut tensors = vec![
        (
            "out".to_owned(),
            f64_tensor(&[rows, heads, v_dim], &states.iter().flat_map(|s| s.out.clone()).collect::<Vec<_>>()),
        ),
        ("lse".to_owned(), scalar(&|state| state.lse)),
        ("tokens".to_owned(), scalar(&|state| state.tokens as f64)),
        ("max_abs_score".to_owned(), scalar(&|state| state.max_abs_score)),
        ("score_range".to_owned(), scalar(&|state| state.score_range)),
    ];
    for (name, peaks) in [("centred", false), ("centred_peaks", true)] {
        let values: Vec<f64> = states
            .iter()
            .flat_map(|state| {
                let centred =
                    state.centred.as_ref().map(|c| if peaks { c.peaks.clone() } else { c.all.clone() });
                centred.unwrap_or_else(|| vec![f64::NAN; v_dim])
            })
            .collect();
        tensors.push((name.to_owned(), f64_tensor(&[rows, heads, v_dim], &values)));
    }
    let parts = |get: &dyn Fn(&Part) -> Vec<f64>| -> Vec<f64> {
        (0..world).flat_map(|rank| states.iter().flat_map(move |state| get(&state.parts[rank]))).collect()
    };
    type Get = fn(&Part) -> Vec<f64>;
    let fields: [(&str, Get, usize); 13] = [
        ("part_tokens", |p| vec![p.tokens as f64], 0),
        ("part_lse", |p| vec![p.lse], 0),
        ("part_weight", |p| vec![p.weight], 0),
        ("part_peak", |p| vec![p.peak], 0),
        ("part_peak_a", |p| vec![p.peak_a], 0),
        ("part_rival_a", |p| vec![p.rival_a.unwrap_or(f64::NAN)], 0),
        ("part_max_a", |p| vec![p.max_a], 0),
        ("part_powers", |p| p.powers.iter().flatten().copied().collect(), 25),
        ("part_out", |p| p.out.clone(), v_dim),
        ("part_abs", |p| p.abs.clone(), v_dim),
        ("part_square", |p| p.square.clone(), v_dim),
        ("part_sum_abs", |p| p.sum_abs.clone(), v_dim),
        ("part_peak_value", |p| p.peak_value.clone(), v_dim),
    ];
    for (name, get, width) in fields {
        let mut shape = vec![world, rows, heads];
        shape.extend(Some(width).filter(|width| *width > 0));
        tensors.push((name.to_owned(), f64_tensor(&shape, &parts(&get))));
    }
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::{Contract, Merge};
    use shardcheck_references::bound::{certify, certify_moments};

    #[test]
    fn the_stored_moments_give_the_bound_of_any_contract() {
        for index in [2, 7, 12, 23] {
            let (entry, moments) = moments_of(index);
            let (query, key, value) = inputs(&entry, index);
            let values = if entry.value_is_key_prefix { Values::KeyPrefix } else { Values::Separate(&value) };
            let problem = Problem::new(
                entry.heads,
                entry.kv_heads,
                entry.qk_dim,
                entry.v_dim,
                entry.scale,
                &query,
                &key,
                values,
            );
            let layout = Layout::new(entry.world, entry.interleave, entry.interleave).unwrap();
            for merge in Merge::ALL {
                let contract = Contract::bf16_default(merge);
                let from_moments = certify_moments(&moments, &contract, false).unwrap();
                let visible = Visible::causal(entry.tokens, entry.rows);
                let direct = certify(&problem, &layout, &visible, &contract).unwrap();
                for (a, b) in from_moments.pre.iter().zip(&direct.pre) {
                    assert!((a - b).abs() <= 1e-9 * b.abs(), "problem {index}: {a} against {b}");
                }
            }
        }
    }

    #[test]
    fn the_problems_hold_the_hard_cases() {
        let entries = entries();
        assert!(entries.iter().any(|e| e.world == 3) && entries.iter().any(|e| e.world == 6));
        assert!(entries.iter().any(|e| e.interleave > 1 && e.rows > 1));
        assert!(entries.iter().any(|e| e.tokens < e.world), "no empty shard");
        for dtype in [Dtype::Bf16, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2] {
            assert!(entries.iter().any(|e| e.kv_dtype == dtype), "{dtype}");
        }
    }
}
