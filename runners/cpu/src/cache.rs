//! Paged per-rank KV caches: raw codes, written and read a row at a time.

use shardcheck_engine::{Attention, Configuration};
use shardcheck_formats::{Dtype, Overflow, decode_f32, encode, encode_f32};

use crate::batch::BlockTable;
use crate::communicator::Stop;
use crate::grid::{Grid, LayoutPolicies};

/// Element type, scale and shape of a cache.
#[derive(Debug, Clone, Copy)]
pub struct KvFormat {
    /// Element type.
    pub dtype: Dtype,
    /// Element type of activations.
    pub activations: Dtype,
    /// Per-tensor scale: value = code · scale.
    pub scale: f32,
    /// KV heads K.
    pub kv_heads: usize,
    /// Width of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// First column of the rotary part of a key (its width where there is none).
    pub rope_start: usize,
    /// Whether values are columns of the keys (MLA).
    pub shared: bool,
}

impl KvFormat {
    /// The format of a configuration.
    pub fn of(configuration: &Configuration) -> Self {
        let attention = configuration.attention;
        let rope_start = match attention {
            Attention::Mla { kv_lora_rank, .. } => kv_lora_rank,
            Attention::Gqa { head_dim, .. } => head_dim,
        };
        Self {
            dtype: configuration.kv_dtype,
            activations: configuration.dtype,
            scale: configuration.kv_scale,
            kv_heads: attention.kv_heads(),
            key_dim: attention.qk_dim(),
            value_dim: attention.value_dim(),
            rope_start,
            shared: attention.is_mla(),
        }
    }

    /// Bytes of the keys of one token, all heads.
    pub fn key_bytes(&self) -> usize {
        self.kv_heads * self.key_dim * self.dtype.size_bytes()
    }

    /// Bytes of the values of one token, all heads; 0 where they are columns of the keys.
    pub fn value_bytes(&self) -> usize {
        if self.shared { 0 } else { self.kv_heads * self.value_dim * self.dtype.size_bytes() }
    }
}

/// Reads one head's row from its codes.
pub type DecodeRow = fn(&[u8], &KvFormat, &mut [f32]);

/// How rows get into a cache and out of it.
#[derive(Clone, Copy, PartialEq)]
pub struct CachePolicies {
    /// Casts one head's row into codes.
    pub encode: fn(&[f32], &KvFormat, &mut [u8]),
    /// Reads one head's key for attention over local tokens.
    pub decode: DecodeRow,
    /// Reads one head's value for attention over local tokens, where values have a cache of their own.
    pub decode_value: DecodeRow,
    /// Reads one head's row of a gathered context.
    pub decode_context: DecodeRow,
    /// First key column of the value (MLA).
    pub value_column: fn(&KvFormat) -> usize,
    /// Block-table entries of a request as the reader takes them.
    pub seen_entries: fn(&[i64]) -> Vec<i64>,
    /// Request that a row is written for; `None` for graph padding.
    pub written_request: fn(i32) -> Option<usize>,
    /// Whether a rank writes a token, given its owner: `(owner, member)`.
    pub writes: fn(usize, usize) -> bool,
    /// Rows behind the written one that a write touches as well.
    pub overwritten_rows: usize,
    /// Changes one head's key before it is cast. Keys come with their rotary phase, so nothing is left to do.
    pub turn: fn(&mut [f32], &KvFormat, &WrittenToken),
    /// Rank whose part of a given cache a rank takes: `(rank, ranks)`.
    pub given_part: fn(usize, usize) -> usize,
    /// Blocks of a given cache that are taken over, of all of them; the others stay as they were.
    pub given_blocks: fn(usize) -> usize,
}

/// A token that is written, as a fault of its rotary phase sees it.
#[derive(Debug, Clone, Copy)]
pub struct WrittenToken {
    /// Position in its request.
    pub position: usize,
    /// Index among the tokens of its owner.
    pub local: usize,
    /// Index among the tokens of the write.
    pub row: usize,
}

impl CachePolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        encode: encode_row,
        decode: decode_row,
        decode_value: decode_row,
        decode_context: decode_row,
        value_column: |_| 0,
        seen_entries: <[i64]>::to_vec,
        written_request: |request| usize::try_from(request).ok(),
        writes: |owner, member| owner == member,
        overwritten_rows: 0,
        turn: |_, _, _| {},
        given_part: |rank, _| rank,
        given_blocks: |blocks| blocks,
    };
}

/// Multiplication by the f32 reciprocal of the scale, then a saturating cast (aiter `concat_and_cache_mla`, with the
/// clamp that its quantisers add).
fn encode_row(values: &[f32], format: &KvFormat, codes: &mut [u8]) {
    encode_with(values, format.dtype, 1.0 / format.scale, Overflow::Saturate, codes);
}

fn decode_row(codes: &[u8], format: &KvFormat, values: &mut [f32]) {
    decode_with(codes, format.dtype, format.scale, values);
}

/// Casts `value · factor` into codes of `dtype`.
pub fn encode_with(values: &[f32], dtype: Dtype, factor: f32, overflow: Overflow, codes: &mut [u8]) {
    for (value, code) in values.iter().zip(codes.chunks_exact_mut(dtype.size_bytes())) {
        let word = encode_f32(dtype, value * factor, overflow).to_le_bytes();
        code.copy_from_slice(&word[..code.len()]);
    }
}

/// Reads codes of `dtype` as `code · scale`.
pub fn decode_with(codes: &[u8], dtype: Dtype, scale: f32, values: &mut [f32]) {
    match dtype.size_bytes() {
        1 => values.iter_mut().zip(codes).for_each(|(v, c)| *v = decode_f32(dtype, u64::from(*c)) * scale),
        2 => values.iter_mut().zip(codes.as_chunks::<2>().0).for_each(|(v, c)| {
            *v = decode_f32(dtype, u64::from(u16::from_le_bytes(*c))) * scale;
        }),
        _ => values.iter_mut().zip(codes.as_chunks::<4>().0).for_each(|(v, c)| {
            *v = decode_f32(dtype, u64::from(u32::from_le_bytes(*c))) * scale;
        }),
    }
}

/// One rank's cache: `[blocks, B, K, width]` codes for keys and for values.
#[derive(Debug, Clone, PartialEq)]
pub struct RankCache {
    /// Codes of the keys.
    pub keys: Vec<u8>,
    /// Codes of the values; empty for MLA.
    pub values: Vec<u8>,
}

impl RankCache {
    /// A cache in which every code is a NaN, as memory is before anyone wrote it.
    pub fn unwritten(configuration: &Configuration) -> Self {
        let format = KvFormat::of(configuration);
        let tokens = configuration.blocks * configuration.block_size;
        let nan = encode(format.dtype, f64::NAN, Overflow::NonFinite).to_le_bytes();
        let fill =
            |bytes: usize| nan[..format.dtype.size_bytes()].iter().copied().cycle().take(bytes).collect();
        Self { keys: fill(tokens * format.key_bytes()), values: fill(tokens * format.value_bytes()) }
    }

    /// Codes of one token's keys and values, all heads.
    pub fn token(&self, slot: usize, format: &KvFormat) -> (&[u8], &[u8]) {
        let (k, v) = (format.key_bytes(), format.value_bytes());
        (&self.keys[slot * k..(slot + 1) * k], &self.values[slot * v..(slot + 1) * v])
    }

    /// The same, to be written.
    pub fn token_mut(&mut self, slot: usize, format: &KvFormat) -> (&mut [u8], &mut [u8]) {
        let (k, v) = (format.key_bytes(), format.value_bytes());
        (&mut self.keys[slot * k..(slot + 1) * k], &mut self.values[slot * v..(slot + 1) * v])
    }
}

/// Tokens read from a cache or a gather, as f32 values.
#[derive(Debug, Clone, Default)]
pub struct TokenRows {
    /// `[tokens, K, key width]`.
    pub keys: Vec<f32>,
    /// `[tokens, K, value width]`; empty where values are columns of the keys.
    pub values: Vec<f32>,
}

impl TokenRows {
    /// Appends one token from its codes, given how keys and how values are read.
    pub fn push(&mut self, codes: (&[u8], &[u8]), format: &KvFormat, (key, value): (DecodeRow, DecodeRow)) {
        for (row_codes, dim, rows, decode) in [
            (codes.0, format.key_dim, &mut self.keys, key),
            (codes.1, format.value_dim, &mut self.values, value),
        ] {
            for head in row_codes.chunks_exact(dim * format.dtype.size_bytes()) {
                let begin = rows.len();
                rows.resize(begin + dim, f32::NAN);
                decode(head, format, &mut rows[begin..]);
            }
        }
    }
}

/// Reads the first `count` local tokens of a request, page by page.
///
/// # Errors
/// A crash when a page lies outside the cache.
pub fn read_local_tokens(
    cache: &RankCache,
    table: &BlockTable,
    request: usize,
    count: usize,
    policies: (&LayoutPolicies, &CachePolicies),
    shape: (&Grid, &KvFormat),
) -> Result<TokenRows, Stop> {
    let ((layout, cached), (grid, format)) = (policies, shape);
    let mut rows =
        TokenRows { keys: Vec::with_capacity(count * format.kv_heads * format.key_dim), values: Vec::new() };
    let entries = if count > 0 { (cached.seen_entries)(table.entries(request)) } else { Vec::new() };
    for local in 0..count {
        let (entry, offset) = (layout.page)(local, count, grid);
        let slot = table.block_among(&entries, request, entry, layout)? * grid.block + offset;
        rows.push(cache.token(slot, format), format, (cached.decode, cached.decode_value));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(dtype: Dtype, scale: f32) -> KvFormat {
        KvFormat {
            dtype,
            activations: Dtype::Bf16,
            scale,
            kv_heads: 1,
            key_dim: 4,
            value_dim: 2,
            rope_start: 2,
            shared: true,
        }
    }

    #[test]
    fn a_row_that_the_format_holds_comes_back_as_it_was() {
        for (dtype, scale) in
            [(Dtype::Bf16, 1.0), (Dtype::F32, 1.0), (Dtype::E4m3fn, 0.5), (Dtype::E5m2, 4.0)]
        {
            let format = format(dtype, scale);
            let row = [1.0, -0.5, 2.0, 0.0];
            let mut codes = vec![0; 4 * dtype.size_bytes()];
            let mut back = [f32::NAN; 4];
            encode_row(&row, &format, &mut codes);
            decode_row(&codes, &format, &mut back);
            assert_eq!(back, row, "{dtype}");
        }
    }

    #[test]
    fn a_value_beyond_the_range_of_an_eight_bit_cache_saturates() {
        let format = format(Dtype::E4m3fnuz, 0.5);
        let (mut codes, mut back) = ([0; 4], [0.0; 4]);
        encode_row(&[1e6, -1e6, 120.0, 119.0], &format, &mut codes);
        decode_row(&codes, &format, &mut back);
        assert_eq!(back, [120.0, -120.0, 120.0, 120.0]);
    }

    #[test]
    fn a_scale_that_is_no_power_of_two_is_applied_as_its_reciprocal() {
        // 0.02 and its f32 reciprocal: the code of 1.0 is that of 50 rounded to e4m3fn (48 or 52: 50 ties to even 48)
        let format = format(Dtype::E4m3fn, 0.02);
        let (mut codes, mut back) = ([0; 4], [0.0; 4]);
        encode_row(&[1.0, 0.02, 8.96, -1.0], &format, &mut codes);
        decode_row(&codes, &format, &mut back);
        assert_eq!(back, [48.0 * 0.02, 0.02, 448.0 * 0.02, -48.0 * 0.02]);
    }
}
