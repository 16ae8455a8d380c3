//! One attention call: its tensors, and the keys and values that its block table really addresses.

use std::ops::Range;

use shardcheck_engine::{Mask, Tensor, Tensors};
use shardcheck_formats::{Contract, Dtype};
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::visibility::Visible;

use super::addressing::Pages;
use super::sizes::{Piece, Store, counts, floats, inputs, pieces};
use super::{CheckError, EmptyRows, Header, Subject};

/// Keys and values of some tokens, as the call holds them: stored codes times their scales.
#[derive(Debug, Clone, Default)]
pub(super) struct Held {
    /// `[tokens, kv_heads, qk_dim]`.
    pub(super) key: Vec<f32>,
    /// `[tokens, kv_heads, v_dim]`; empty where the value is a prefix of the key.
    pub(super) value: Vec<f32>,
}

/// One request of the batch.
#[derive(Debug, Clone)]
pub(super) struct Request {
    /// Tokens, its query's own included.
    pub(super) seq_len: usize,
    /// Its rows of the batch.
    pub(super) rows: Range<usize>,
    /// Its tokens.
    pub(super) held: Held,
}

/// An attention call with everything that judging needs.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) subject: Subject,
    pub(super) mask: Mask,
    pub(super) empty_rows: EmptyRows,
    pub(super) statistics: bool,
    pub(super) contract: Contract,
    /// Query heads.
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) qk_dim: usize,
    pub(super) v_dim: usize,
    pub(super) scale: f64,
    pub(super) k_scale: f64,
    pub(super) v_scale: f64,
    /// Whether key and value are one latent.
    pub(super) latent: bool,
    pub(super) pages: Pages,
    /// `[tokens, heads, qk_dim]`.
    pub(super) query: Vec<f32>,
    pub(super) requests: Vec<Request>,
    pub(super) pieces: Vec<Piece>,
    pub(super) lse_dtype: Option<Dtype>,
    key_store: Store<'a>,
    value_store: Option<Store<'a>>,
}

impl<'a> Call<'a> {
    /// Reads a call from its tensors.
    ///
    /// # Errors
    /// [`CheckError`]: what is missing, or does not fit.
    pub(super) fn read(header: &Header, tensors: &'a Tensors) -> Result<Self, CheckError> {
        let (key_store, value_store) = stores(header, tensors)?;
        let q = tensors.get("q")?;
        let [tokens, heads, qk_dim] = *q.shape() else {
            return Err(CheckError::shape("q", q.shape(), "[tokens, heads, size]"));
        };
        check_heads(q, heads, qk_dim, &key_store)?;
        let v_dim = match (&value_store, header.kv_lora_rank) {
            (Some(store), _) => store.dim,
            (None, Some(rank)) => rank,
            (None, None) => unreachable!("stores without a latent rank are two"),
        };
        let pages = Pages::read(header, tensors, key_store.per_rank, key_store.pages, key_store.block)?;
        let out = tensors.get("out")?;
        floats("out", out)?;
        let lse = tensors.find("lse");
        let (k_scale, v_scale) = header.scales()?;
        let mut call = Self {
            subject: header.check,
            mask: header.mask,
            empty_rows: header.empty_rows,
            statistics: header.statistics,
            contract: header.contract_for(out.dtype())?,
            heads,
            kv_heads: key_store.kv_heads,
            qk_dim,
            v_dim,
            scale: header.scale()?,
            k_scale,
            v_scale,
            latent: value_store.is_none(),
            pages,
            query: inputs("q", q)?,
            requests: Vec::new(),
            pieces: pieces(header, (out, lse), (tokens, heads, v_dim))?,
            lse_dtype: lse.map(Tensor::dtype),
            key_store,
            value_store,
        };
        for (index, (seq_len, rows)) in spans(tensors, tokens)?.into_iter().enumerate() {
            // lengths count the new rows: what has fewer tokens than rows was given context lengths
            if seq_len > 0 && rows.len() > seq_len {
                return Err(CheckError::Value(format!(
                    "request {index} has {} rows and {seq_len} tokens: seq_lens counts the new tokens too",
                    rows.len()
                )));
            }
            if index >= call.pages.requests() {
                let wanted = "a row for every request of seq_lens";
                return Err(CheckError::shape("block_table", tensors.get("block_table")?.shape(), wanted));
            }
            // a request without rows is read by nobody: its entries may be left over
            let seen = if rows.is_empty() { 0 } else { seq_len };
            call.pages.check(index, seen)?;
            let held = call.gather(index, 0..seen).expect("every token was found");
            call.requests.push(Request { seq_len, rows, held });
        }
        Ok(call)
    }

    /// Keys and values of positions of the request whose table row is `row`; `None` where the table does not reach.
    pub(super) fn gather(&self, row: usize, positions: impl IntoIterator<Item = usize>) -> Option<Held> {
        let mut held = Held::default();
        for position in positions {
            let slot = self.pages.slot(row, position)?;
            let rank = if self.pages.per_rank { slot.rank } else { 0 };
            for head in 0..self.kv_heads {
                let at = [rank, slot.page, slot.offset, head];
                self.key_store.push(at, self.k_scale, &mut held.key);
                if let Some(store) = &self.value_store {
                    store.push(at, self.v_scale, &mut held.value);
                }
            }
        }
        Some(held)
    }

    /// What each row of a request sees.
    pub(super) fn visible(&self, request: usize) -> Vec<Visible> {
        let Request { seq_len, rows, .. } = &self.requests[request];
        match self.mask {
            Mask::Causal => Visible::causal(*seq_len, rows.len()),
            Mask::Bidirectional => Visible::draft_block(*seq_len, rows.len()),
        }
    }

    /// The problem of one request.
    pub(super) fn problem(&self, request: usize) -> Problem<'_> {
        let Request { rows, held, .. } = &self.requests[request];
        let width = self.heads * self.qk_dim;
        let values = if self.latent { Values::KeyPrefix } else { Values::Separate(&held.value) };
        Problem::new(
            self.heads,
            self.kv_heads,
            self.qk_dim,
            self.v_dim,
            self.scale,
            &self.query[rows.start * width..rows.end * width],
            &held.key,
            values,
        )
    }

    /// The query vector of a row of the batch and a head.
    pub(super) fn query_at(&self, token: usize, head: usize) -> &[f32] {
        let start = (token * self.heads + head) * self.qk_dim;
        &self.query[start..start + self.qk_dim]
    }

    /// The KV head that a query head reads.
    pub(super) fn kv_head(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// The request that a row of the batch belongs to; `None` for padding.
    pub(super) fn request_of(&self, token: usize) -> Option<usize> {
        self.requests.iter().position(|request| request.rows.contains(&token))
    }

    /// A row in words: token of the batch, request, row, position.
    pub(super) fn place_row(&self, token: usize) -> String {
        let Some(request) = self.request_of(token) else { return format!("token {token} (padding)") };
        let Request { seq_len, rows, .. } = &self.requests[request];
        let row = token - rows.start;
        match (seq_len + row).checked_sub(rows.len()) {
            Some(position) => format!("token {token} (request {request}, row {row}, position {position})"),
            None => format!("token {token} (request {request}, row {row}, before the first position)"),
        }
    }
}

impl Held {
    /// The key of a token.
    pub(super) fn key_at(&self, call: &Call<'_>, token: usize, kv_head: usize) -> &[f32] {
        let start = (token * call.kv_heads + kv_head) * call.qk_dim;
        &self.key[start..start + call.qk_dim]
    }

    /// The value of a token.
    pub(super) fn value_at(&self, call: &Call<'_>, token: usize, kv_head: usize) -> &[f32] {
        if call.latent {
            return &self.key_at(call, token, kv_head)[..call.v_dim];
        }
        let start = (token * call.kv_heads + kv_head) * call.v_dim;
        &self.value[start..start + call.v_dim]
    }
}

type Stores<'a> = (Store<'a>, Option<Store<'a>>);

fn stores<'a>(header: &Header, tensors: &'a Tensors) -> Result<Stores<'a>, CheckError> {
    if let Some(rank) = header.kv_lora_rank {
        let store = Store::read(header, "kv_cache", tensors.get("kv_cache")?, true)?;
        if rank == 0 || rank > store.dim {
            let wanted = format!("kv_lora_rank is {rank}, which is no part of its width");
            return Err(CheckError::shape("kv_cache", tensors.get("kv_cache")?.shape(), wanted));
        }
        if header.k_scale != header.v_scale {
            let wanted = "the same as k_scale: a latent is key and value at once";
            return Err(CheckError::Number { field: "v_scale", value: header.v_scale, wanted });
        }
        return Ok((store, None));
    }
    if tensors.find("kv_cache").is_some() && tensors.find("key_cache").is_none() {
        let why = "a single kv_cache is an MLA latent; for other attention give key_cache and value_cache";
        return Err(CheckError::Field { field: "kv_lora_rank", why });
    }
    let key = Store::read(header, "key_cache", tensors.get("key_cache")?, false)?;
    let value = Store::read(header, "value_cache", tensors.get("value_cache")?, false)?;
    if (key.per_rank, key.ranks, key.pages, key.block, key.kv_heads)
        != (value.per_rank, value.ranks, value.pages, value.block, value.kv_heads)
    {
        let wanted = "the same pages, block size and heads as key_cache";
        return Err(CheckError::shape("value_cache", tensors.get("value_cache")?.shape(), wanted));
    }
    Ok((key, Some(value)))
}

fn check_heads(q: &Tensor, heads: usize, qk_dim: usize, keys: &Store<'_>) -> Result<(), CheckError> {
    if qk_dim != keys.dim || heads == 0 || !heads.is_multiple_of(keys.kv_heads) {
        let wanted = format!(
            "keys have {} heads of {} numbers; query heads are a multiple of them",
            keys.kv_heads, keys.dim
        );
        return Err(CheckError::shape("q", q.shape(), wanted));
    }
    Ok(())
}

/// Length and rows of every request.
fn spans(tensors: &Tensors, tokens: usize) -> Result<Vec<(usize, Range<usize>)>, CheckError> {
    let seq_lens = counts("seq_lens", tensors.get("seq_lens")?)?;
    let requests = seq_lens.len();
    let starts = match tensors.find("query_start_loc") {
        Some(starts) => {
            let starts_at = counts("query_start_loc", starts)?;
            let ascending = starts_at.windows(2).all(|pair| pair[0] <= pair[1]);
            let ends = starts_at.last().is_some_and(|end| *end <= tokens);
            if starts_at.len() != requests + 1 || starts_at[0] != 0 || !ascending || !ends {
                let wanted = format!("{} ascending offsets from 0 up to {tokens} at most", requests + 1);
                return Err(CheckError::Value(format!("query_start_loc is {starts_at:?}: give {wanted}")));
            }
            starts_at
        }
        None if requests > 0 && tokens.is_multiple_of(requests) => {
            (0..=requests).map(|request| request * (tokens / requests)).collect()
        }
        None => {
            return Err(CheckError::Value(format!(
                "q has {tokens} rows for {requests} requests: give query_start_loc where requests have different numbers of rows"
            )));
        }
    };
    Ok(seq_lens.into_iter().enumerate().map(|(i, len)| (len, starts[i]..starts[i + 1])).collect())
}
