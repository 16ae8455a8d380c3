//! The tensors of each operation, made from drawn inputs.

use shardcheck_engine::{Configuration, Conventions, Tensor, Tensors};
use shardcheck_formats::{Overflow, encode};

use super::blocks::place;
use super::draw::Draw;
use super::held::cache_code;
use super::{Inputs, blocks};

impl Inputs {
    /// Inputs of [`shardcheck_engine::Operation::Layout`].
    pub fn layout(&self) -> Tensors {
        Tensors::new()
            .with("seq_lens", self.lens(|request| request.seq_len()))
            .with("query_start_loc", self.query_start_loc())
            .with("block_table", self.table())
    }

    /// Inputs of [`shardcheck_engine::Operation::WriteKv`] that write every token of every request, graph padding behind them.
    pub fn write_kv(&self) -> Tensors {
        self.write(
            |request| 0..self.case.workload.requests[request].seq_len(),
            self.case.workload.padded_rows,
        )
    }

    /// Inputs that write the tokens before the step alone.
    pub fn write_context(&self) -> Tensors {
        self.write(|request| 0..self.case.workload.requests[request].context_tokens, 0)
    }

    /// Inputs that write the new rows alone, graph padding behind them.
    pub fn write_new(&self) -> Tensors {
        let requests = &self.case.workload.requests;
        self.write(
            |request| requests[request].context_tokens..requests[request].seq_len(),
            self.case.workload.padded_rows,
        )
    }

    /// Inputs that write the stale tokens, to be written before all others; `None` when the probe has none.
    pub fn write_stale(&self) -> Option<Tensors> {
        let elements = self.key_elements();
        let tokens = |request: usize| {
            let cached = self.cached_tokens(request);
            cached..cached + self.stale_keys[request].len() / elements
        };
        let written = self.write_from(&self.stale_keys, &self.stale_values, tokens, 0, |request| {
            self.cached_tokens(request)
        });
        (self.stale_keys.iter().any(|keys| !keys.is_empty())).then_some(written)
    }

    /// Inputs of [`shardcheck_engine::Operation::Attend`]: decode, verify, draft.
    pub fn attend(&self) -> Tensors {
        let configuration = &self.case.configuration;
        let attention = configuration.attention;
        let mut tensors = self.layout().with("query", self.query_tensor());
        if let Some(w_uv) = &self.w_uv {
            let shape = [configuration.total_heads(), attention.value_dim(), attention.v_head_dim()];
            tensors.insert("w_uv", Tensor::from_f32(configuration.dtype, &shape, w_uv));
        }
        tensors
    }

    /// Inputs of [`shardcheck_engine::Operation::AttendSelected`].
    pub fn attend_selected(&self) -> Tensors {
        let columns = self.case.selected.map_or(0, |tokens| tokens.top_k);
        let mut topk = Vec::with_capacity(self.selected.len() * columns);
        for (row, positions) in self.selected.iter().enumerate() {
            topk.extend(positions.iter().map(|position| *position as i32));
            topk.resize((row + 1) * columns, -1);
        }
        self.attend().with("topk", Tensor::from_i32(&[self.selected.len(), columns], &topk))
    }

    /// Inputs of [`shardcheck_engine::Operation::AttendSinks`].
    pub fn attend_sinks(&self) -> Tensors {
        self.attend()
            .with("sinks", Tensor::from_f32(shardcheck_formats::Dtype::F32, &[self.sinks.len()], &self.sinks))
    }

    /// Inputs of [`shardcheck_engine::Operation::AttendContext`]; keys and values of graph-padding rows are NaN.
    pub fn attend_context(&self) -> Tensors {
        let mut new = self.write_new();
        let mut tensors = Tensors::new()
            .with("query", self.query_tensor())
            .with("context_lens", self.lens(|request| request.context_tokens))
            .with("query_start_loc", self.query_start_loc())
            .with("block_table", self.table());
        for name in ["key", "value"] {
            if let Some(tensor) = new.remove(name) {
                tensors.insert(name, tensor);
            }
        }
        tensors
    }

    /// Inputs of [`shardcheck_engine::Operation::LoadCache`]: the caches of all ranks with the cached and the stale tokens in
    /// their slots, and NaN in every slot that nobody may read.
    pub fn caches(&self, conventions: &Conventions) -> Tensors {
        let configuration = &self.case.configuration;
        let attention = configuration.attention;
        let mut caches = self.blank_caches();
        let key = attention.kv_heads() * attention.qk_dim();
        self.fill(caches.get_mut("key_cache"), [&self.keys, &self.stale_keys], key, conventions);
        let value = attention.kv_heads() * attention.value_dim();
        self.fill(caches.get_mut("value_cache"), [&self.values, &self.stale_values], value, conventions);
        caches
    }

    /// Caches whose every slot is NaN, to be loaded before tokens are written.
    pub fn blank_caches(&self) -> Tensors {
        let configuration = &self.case.configuration;
        let attention = configuration.attention;
        let blank = |width: usize| {
            let dtype = configuration.kv_dtype;
            let shape = vec![
                configuration.tp,
                configuration.blocks,
                configuration.block_size,
                attention.kv_heads(),
                width,
            ];
            let code = encode(dtype, f64::NAN, Overflow::NonFinite).to_le_bytes();
            let bytes = code[..dtype.size_bytes()].repeat(shape.iter().product());
            Tensor::new(dtype, shape, bytes).expect("the bytes were made for this shape")
        };
        let caches = Tensors::new().with("key_cache", blank(attention.qk_dim()));
        if attention.is_mla() { caches } else { caches.with("value_cache", blank(attention.value_dim())) }
    }

    /// The same queries, keys and values under another layout of the same model: the block table is laid anew, by the case's
    /// placement. Stale tokens that the new layout has no slot for are dropped.
    ///
    /// # Panics
    /// When the configuration has other head counts, widths or scales, or too few blocks.
    pub fn relaid(&self, configuration: &Configuration, seed: u64) -> Self {
        let old = &self.case.configuration;
        assert_eq!(old.attention, configuration.attention, "another attention shape needs other inputs");
        assert_eq!(old.total_heads(), configuration.total_heads(), "another head count needs other inputs");
        let attention = configuration.attention;
        let mut inputs = self.clone();
        inputs.case.configuration = configuration.clone();
        let mut counter = Draw::new(seed).placement();
        let elements = [self.key_elements(), attention.kv_heads() * attention.value_dim()];
        for (request, workload) in self.case.workload.requests.iter().enumerate() {
            let blocks = blocks::blocks_needed(configuration, workload.seq_len());
            let room = blocks * configuration.virtual_block_tokens() - self.cached_tokens(request);
            inputs.stale_keys[request].truncate(room * elements[0]);
            inputs.stale_values[request].truncate(room * elements[1]);
        }
        (inputs.block_table, inputs.width) =
            blocks::block_table(&self.case.workload, configuration, &mut counter);
        inputs
    }

    fn key_elements(&self) -> usize {
        let attention = self.case.configuration.attention;
        attention.kv_heads() * attention.qk_dim()
    }

    fn query_tensor(&self) -> Tensor {
        let configuration = &self.case.configuration;
        let rows = self.case.workload.total_rows();
        let shape = [rows, configuration.total_heads(), configuration.attention.qk_dim()];
        Tensor::from_f32(configuration.dtype, &shape, &self.query)
    }

    fn lens(&self, len: impl Fn(&crate::Request) -> usize) -> Tensor {
        let lens: Vec<i32> = self.case.workload.requests.iter().map(|request| len(request) as i32).collect();
        Tensor::from_i32(&[lens.len()], &lens)
    }

    fn query_start_loc(&self) -> Tensor {
        let starts = self.case.workload.query_start_loc();
        Tensor::from_i32(&[starts.len()], &starts)
    }

    fn table(&self) -> Tensor {
        Tensor::from_i32(&[self.case.workload.requests.len(), self.width], &self.block_table)
    }

    fn write(&self, tokens: impl Fn(usize) -> std::ops::Range<usize>, padding: usize) -> Tensors {
        self.write_from(&self.keys, &self.values, tokens, padding, |_| 0)
    }

    /// Writes positions `tokens(request)`, which lie in `keys[request]` from position `first(request)` on.
    fn write_from(
        &self,
        keys: &[Vec<f32>],
        values: &[Vec<f32>],
        tokens: impl Fn(usize) -> std::ops::Range<usize>,
        padding: usize,
        first: impl Fn(usize) -> usize,
    ) -> Tensors {
        let (attention, dtype) = (self.case.configuration.attention, self.case.configuration.dtype);
        let (mut positions, mut requests) = (Vec::new(), Vec::new());
        for request in 0..keys.len() {
            positions.extend(tokens(request).map(|position| position as i64));
            requests.extend(tokens(request).map(|_| request as i32));
        }
        positions.extend(std::iter::repeat_n(0, padding));
        requests.extend(std::iter::repeat_n(-1, padding));
        let count = positions.len();
        let gather = |source: &[Vec<f32>], width: usize| {
            let elements = attention.kv_heads() * width;
            let mut all = Vec::with_capacity(count * elements);
            for request in 0..source.len() {
                let range = tokens(request);
                let start = range.start - first(request);
                all.extend_from_slice(&source[request][start * elements..(start + range.len()) * elements]);
            }
            all.resize(count * elements, f32::NAN);
            Tensor::from_f32(dtype, &[count, attention.kv_heads(), width], &all)
        };
        let mut tensors = Tensors::new()
            .with("key", gather(keys, attention.qk_dim()))
            .with("positions", Tensor::from_i64(&[count], &positions))
            .with("requests", Tensor::from_i32(&[count], &requests))
            .with("block_table", self.table());
        if !attention.is_mla() {
            tensors.insert("value", gather(values, attention.value_dim()));
        }
        tensors
    }

    /// Puts cached and stale tokens into their slots on every rank that owns them.
    fn fill(
        &self,
        cache: Option<&mut Tensor>,
        sources: [&[Vec<f32>]; 2],
        elements: usize,
        conventions: &Conventions,
    ) {
        let Some(cache) = cache else { return };
        let configuration = &self.case.configuration;
        let size = configuration.kv_dtype.size_bytes();
        let block_bytes = configuration.block_size * elements * size;
        let [fresh, stale] = sources;
        for request in 0..fresh.len() {
            let cached = self.cached_tokens(request);
            let rows = fresh[request]
                .chunks_exact(elements)
                .take(cached)
                .chain(stale[request].chunks_exact(elements));
            for (position, row) in rows.enumerate() {
                let place = place(configuration, position);
                let block = self.block_table[request * self.width + place.entry] as usize;
                let codes: Vec<u8> = row
                    .iter()
                    .flat_map(|value| {
                        cache_code(configuration, conventions, *value).to_le_bytes().into_iter().take(size)
                    })
                    .collect();
                for group in 0..configuration.tp / configuration.dcp {
                    let rank = group * configuration.dcp + place.owner;
                    let start =
                        (rank * configuration.blocks + block) * block_bytes + place.offset * elements * size;
                    cache.bytes_mut()[start..start + codes.len()].copy_from_slice(&codes);
                }
            }
        }
    }
}
