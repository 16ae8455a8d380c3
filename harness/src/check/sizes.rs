//! Shapes that people have, brought to the ones that are judged.

use shardcheck_engine::{LseBase, Tensor};
use shardcheck_formats::{Dtype, decode_f32};
use shardcheck_references::merge::natural_from_base_2;

use super::{CheckError, Header, LseLayout, PageLayout};

/// Heads of one rank, or all of them: what one part of the output holds.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    /// The rank that returned it, where the output has a rank axis.
    pub(super) rank: Option<usize>,
    /// First head of all.
    pub(super) first_head: usize,
    /// Heads.
    pub(super) heads: usize,
    /// `[tokens, heads, v_dim]`.
    pub(super) out: Vec<f64>,
    /// `[tokens, heads]`, natural.
    pub(super) lse: Option<Vec<f64>>,
}

/// Cuts an output `[T, H, Dv]`, `[T, H·Dv]`, `[ranks, T, H/ranks, Dv]` or `[ranks, T, H, Dv]` into pieces.
///
/// # Errors
/// Any other shape.
pub(super) fn pieces(
    header: &Header,
    (out, lse): (&Tensor, Option<&Tensor>),
    (tokens, heads, v_dim): (usize, usize, usize),
) -> Result<Vec<Piece>, CheckError> {
    let wanted = || {
        format!(
            "[{tokens}, {heads}, {v_dim}], or with an axis of ranks before it, over which the {heads} heads are dealt"
        )
    };
    let (ranks, of_rank) = match *out.shape() {
        [t, h, d] if (t, h, d) == (tokens, heads, v_dim) => (None, heads),
        [t, hd] if (t, hd) == (tokens, heads * v_dim) => (None, heads),
        [r, t, h, d]
            if r > 0 && (t, d) == (tokens, v_dim) && (h == heads || h.checked_mul(r) == Some(heads)) =>
        {
            (Some(r), h)
        }
        _ => return Err(CheckError::shape("out", out.shape(), wanted())),
    };
    let values = out.to_f64();
    let lse = lse.map(|lse| natural_lse(header, "lse", lse, (ranks, tokens, of_rank))).transpose()?;
    let (size, states) = (tokens * of_rank * v_dim, tokens * of_rank);
    let piece = |index: usize| Piece {
        rank: ranks.map(|_| index),
        first_head: if of_rank == heads { 0 } else { index * of_rank },
        heads: of_rank,
        out: values[index * size..(index + 1) * size].to_vec(),
        lse: lse.as_ref().map(|lse| lse[index * states..(index + 1) * states].to_vec()),
    };
    Ok((0..ranks.unwrap_or(1)).map(piece).collect())
}

/// An LSE as `[parts, tokens, heads]`, natural.
///
/// # Errors
/// Any other shape, or a type that can't hold one.
pub(super) fn natural_lse(
    header: &Header,
    name: &str,
    lse: &Tensor,
    (parts, tokens, heads): (Option<usize>, usize, usize),
) -> Result<Vec<f64>, CheckError> {
    if !matches!(lse.dtype(), Dtype::F32 | Dtype::F64) {
        let wanted = "an LSE is f32 (or f64): 16 bits can't hold the weight of a token";
        return Err(CheckError::Dtype { name: name.to_owned(), found: lse.dtype(), wanted });
    }
    let shape = |a: usize, b: usize| parts.into_iter().chain([a, b]).collect::<Vec<_>>();
    let (by_token, by_head) = (shape(tokens, heads), shape(heads, tokens));
    let fits = |layout| match layout {
        LseLayout::TokensHeads => lse.shape() == by_token,
        LseLayout::HeadsTokens => lse.shape() == by_head,
    };
    let candidates = match header.lse_layout {
        Some(layout) => vec![layout],
        None => vec![LseLayout::TokensHeads, LseLayout::HeadsTokens],
    };
    let layout = candidates.into_iter().find(|layout| fits(*layout)).ok_or_else(|| {
        let asked = header.lse_layout.map_or("", |_| " (and as lse_layout says)");
        CheckError::shape(name, lse.shape(), format!("{by_token:?} or {by_head:?}{asked}"))
    })?;
    let mut values = lse.to_f64();
    if header.lse_base == LseBase::Two {
        values.iter_mut().for_each(|value| *value = natural_from_base_2(*value));
    }
    if layout == LseLayout::TokensHeads {
        return Ok(values);
    }
    let states = tokens * heads;
    let by_token = |flat: usize| {
        let (part, token, head) = (flat / states, flat % states / heads, flat % heads);
        values[part * states + head * tokens + token]
    };
    Ok((0..values.len()).map(by_token).collect())
}

/// # Errors
/// The tensor is not of a float type that attention returns.
pub(super) fn floats(name: &str, tensor: &Tensor) -> Result<(), CheckError> {
    match tensor.dtype() {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16 => Ok(()),
        found => {
            let wanted = "outputs are f64, f32, f16 or bf16";
            Err(CheckError::Dtype { name: name.to_owned(), found, wanted })
        }
    }
}

/// Values of an input in f32.
///
/// # Errors
/// The type is an integer's, or an f64 holds what f32 can't.
pub(super) fn inputs(name: &str, tensor: &Tensor) -> Result<Vec<f32>, CheckError> {
    check_input(name, tensor.dtype())?;
    if tensor.dtype() == Dtype::F64 {
        let values = tensor.to_f64();
        let exact = |value: &f64| value.is_nan() || f64::from(*value as f32) == *value;
        if !values.iter().all(exact) {
            let wanted =
                "it holds values that f32 can't: give the values that the call was given, in their type";
            return Err(CheckError::Dtype { name: name.to_owned(), found: Dtype::F64, wanted });
        }
    }
    Ok(tensor.to_f32())
}

fn check_input(name: &str, found: Dtype) -> Result<(), CheckError> {
    if found.is_float() {
        return Ok(());
    }
    let wanted =
        "give floats (bf16, f16, f32, e4m3fn, e4m3fnuz, e5m2); codes in integers need their dtype said";
    Err(CheckError::Dtype { name: name.to_owned(), found, wanted })
}

/// # Errors
/// The type is no integer's.
pub(super) fn integers(name: &str, tensor: &Tensor) -> Result<Vec<i64>, CheckError> {
    if tensor.dtype().is_float() {
        let wanted = "give integers, i32 or i64";
        return Err(CheckError::Dtype { name: name.to_owned(), found: tensor.dtype(), wanted });
    }
    Ok(tensor.to_i64())
}

/// Integers that are counts.
///
/// # Errors
/// The type is no integer's, or one is negative.
pub(super) fn counts(name: &str, tensor: &Tensor) -> Result<Vec<usize>, CheckError> {
    let count = |(index, value): (usize, i64)| {
        usize::try_from(value)
            .map_err(|_| CheckError::Value(format!("{name}[{index}] is {value}: give counts from 0")))
    };
    integers(name, tensor)?.into_iter().enumerate().map(count).collect()
}

/// A cache, `[ranks, pages, block, kv_heads, dim]` or with heads before tokens.
#[derive(Debug, Clone)]
pub(super) struct Store<'a> {
    tensor: &'a Tensor,
    order: PageLayout,
    /// Whether there is an axis of ranks.
    pub(super) per_rank: bool,
    /// Ranks, 1 without their axis.
    pub(super) ranks: usize,
    /// Pages of a rank.
    pub(super) pages: usize,
    /// Tokens of a page.
    pub(super) block: usize,
    /// KV heads.
    pub(super) kv_heads: usize,
    /// Numbers of a vector.
    pub(super) dim: usize,
}

impl<'a> Store<'a> {
    /// Reads the axes of a cache; a latent may lack the axis of heads.
    ///
    /// # Errors
    /// The number of axes fits nothing, or `per_rank` and `world` contradict it.
    pub(super) fn read(
        header: &Header,
        name: &str,
        tensor: &'a Tensor,
        latent: bool,
    ) -> Result<Self, CheckError> {
        check_input(name, tensor.dtype())?;
        let (shape, order) = (tensor.shape(), header.kv_layout);
        let ranked = header.world > 1 && shape.first() == Some(&header.world);
        let one_head = |a: usize, b: usize| if order == PageLayout::Nhd { b == 1 } else { a == 1 };
        let (per_rank, axes) = match (latent, shape) {
            (true, &[n, b, d]) => (false, [1, n, b, 1, d]),
            (true, &[w, n, b, d]) if header.per_rank.unwrap_or(ranked) => (true, [w, n, b, 1, d]),
            (true, &[n, a, b, d]) if one_head(a, b) => (false, [1, n, a * b, 1, d]),
            (_, &[n, a, b, d]) if !latent => (false, Self::paged(order, 1, n, a, b, d)),
            (_, &[w, n, a, b, d]) => (true, Self::paged(order, w, n, a, b, d)),
            _ => return Err(CheckError::shape(name, shape, Self::wanted(latent, header.world))),
        };
        let [ranks, pages, block, kv_heads, dim] = axes;
        if header.per_rank.is_some_and(|asked| asked != per_rank) || per_rank && ranks != header.world {
            let wanted = format!(
                "an axis of ranks in front when and only when it is per rank; world is {}",
                header.world
            );
            return Err(CheckError::shape(name, shape, wanted));
        }
        if latent && kv_heads != 1 || [ranks, block, kv_heads, dim].contains(&0) {
            let wanted = "a latent has one head, and no axis but that of blocks is empty";
            return Err(CheckError::shape(name, shape, wanted));
        }
        Ok(Self { tensor, order, per_rank, ranks, pages, block, kv_heads, dim })
    }

    fn paged(order: PageLayout, ranks: usize, pages: usize, a: usize, b: usize, dim: usize) -> [usize; 5] {
        match order {
            PageLayout::Nhd => [ranks, pages, a, b, dim],
            PageLayout::Hnd => [ranks, pages, b, a, dim],
        }
    }

    fn wanted(latent: bool, world: usize) -> String {
        if latent {
            format!(
                "[pages, block_size, width] of one cache, or [world, pages, block_size, width]; world is {world}"
            )
        } else {
            "[pages, block_size, kv_heads, size] (NHD) or [pages, kv_heads, block_size, size] (HND), or the same per rank"
                .to_owned()
        }
    }

    /// Appends the vector of a head in a row of a page, times `scale`, rounded to f32 as a dequantisation is.
    pub(super) fn push(&self, at: [usize; 4], scale: f64, into: &mut Vec<f32>) {
        let [rank, page, offset, head] = at;
        let row = match self.order {
            PageLayout::Nhd => offset * self.kv_heads + head,
            PageLayout::Hnd => head * self.block + offset,
        };
        let start = ((rank * self.pages + page) * self.block * self.kv_heads + row) * self.dim;
        let (dtype, size) = (self.tensor.dtype(), self.tensor.dtype().size_bytes());
        let bytes = &self.tensor.bytes()[start * size..(start + self.dim) * size];
        into.extend(bytes.chunks_exact(size).map(|code| {
            let mut word = [0u8; 8];
            word[..size].copy_from_slice(code);
            let value = decode_f32(dtype, u64::from_le_bytes(word));
            // a factor of 1 keeps f32 as it is
            if scale == 1.0 { value } else { (f64::from(value) * scale) as f32 }
        }));
    }
}
