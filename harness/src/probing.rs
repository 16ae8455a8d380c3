//! The exact probes on a case's own configuration and lengths: inputs made for them, and what the engine gives.

use shardcheck_cases::{Inputs, cache_code, cache_value};
use shardcheck_engine::{Attention, Conventions, Operation, OperationKind, Tensor, Tensors};
use shardcheck_formats::{Contract, Dtype, round_f32};
use shardcheck_references::probe::{Code, Decoder, Rounding, Seen, Sight, Space, Token};

use crate::laboratory::{Halt, Laboratory, Observed, Run, Watched};
use crate::material::AttentionMaterial;

/// Most elements of caches whose free slots are filled with signs of their own.
const MOST_PRESET_ELEMENTS: usize = 1 << 24;

/// What a token's value and the free part of its key hold, in units of the cache scale: numbers that the cache format holds.
pub struct Content<'c> {
    /// Value of a token, as wide as it reaches the output.
    pub value: &'c dyn Fn(Token, &mut [f32]),
    /// The part of a key that carries no value: all of it, or the rotary part of MLA.
    pub key: &'c dyn Fn(Token, &mut [f32]),
}

/// What slots hold to which no token is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreeSlots {
    /// What the engine leaves there.
    Untouched,
    /// Signs of their own, so that a row that reads one names it.
    Spelt,
}

/// A case on which exact probes are run.
pub struct Bench<'a> {
    /// The case.
    pub material: &'a AttentionMaterial,
    /// The code of its tokens.
    pub code: Code,
    /// The rounding contract of its step.
    pub contract: Contract,
    /// What stands for 1 in values, as the cache holds it.
    pub unit: f64,
    /// Elements of a value that reach the output.
    pub width: usize,
    /// What each row has to see; `None` for padding.
    pub sights: Vec<Option<Sight>>,
    engine: &'a Watched<'a>,
    rows: Vec<Sight>,
    written: Vec<usize>,
}

/// Outputs and LSEs of every rank, row and head, in the dimensions of a code.
pub struct Reading {
    /// Dimensions.
    pub dims: usize,
    /// `[ranks·rows·heads, dims]`, in units of 1.
    pub out: Vec<f64>,
    /// `[ranks·rows·heads]`.
    pub lse: Vec<f64>,
    /// Rows.
    pub rows: usize,
    /// Heads of a rank.
    pub heads: usize,
}

impl Reading {
    /// Output of a state.
    pub fn state(&self, state: usize) -> &[f64] {
        &self.out[state * self.dims..(state + 1) * self.dims]
    }

    /// States: ranks times rows times heads.
    pub fn states(&self) -> usize {
        self.lse.len()
    }

    /// What a decoder reads of a state.
    pub fn seen(&self, state: usize) -> Seen<'_> {
        Seen { out: self.state(state), lse: Some(self.lse[state]) }
    }

    /// Row of a state.
    pub fn row_of(&self, state: usize) -> usize {
        state / self.heads % self.rows
    }
}

impl<'a> Bench<'a> {
    /// The case of a laboratory, on its engine.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] where the engine declares no contract.
    pub fn new(laboratory: &'a Laboratory) -> Result<Self, Halt> {
        let material = laboratory.attention();
        let configuration = material.configuration();
        let requests = &material.case.workload.requests;
        let written: Vec<usize> = requests.iter().map(|request| request.seq_len()).collect();
        let space = Space {
            layout: material.layout,
            requests: requests.len(),
            tokens: written.iter().copied().max().unwrap_or(0).max(1),
            blocks: configuration.blocks,
        };
        let sight = |row: usize| {
            let (request, index) = material.rows[row]?;
            let visible = material.visible_tokens(row);
            Some(Sight { request, row: index, visible, beside_from: material.beside_from(request) })
        };
        let sights: Vec<Option<Sight>> = (0..material.rows.len()).map(sight).collect();
        let attention = configuration.attention;
        let width = if material.is_projected() {
            attention.value_dim().min(attention.v_head_dim())
        } else {
            attention.value_dim()
        };
        let mut bench = Self {
            material,
            code: Code::new(space, &[]),
            contract: material.contract()?,
            unit: 1.0,
            width,
            rows: sights.iter().copied().flatten().collect(),
            sights,
            engine: &laboratory.engine,
            written,
        };
        bench.unit = bench.held(1.0);
        Ok(bench)
    }

    /// How sums of units round.
    pub fn rounding(&self) -> Rounding<'_> {
        Rounding::of(&self.contract).with_unit(self.unit)
    }

    /// Reads rows of [`Self::tokens`]; `tables` come from [`Self::tables`].
    pub fn decoder<'s>(&'s self, tables: &'s [&'s [i32]]) -> Decoder<'s> {
        Decoder {
            code: &self.code,
            rounding: self.rounding(),
            rows: &self.rows,
            written: &self.written,
            tables,
        }
    }

    /// Block table of each request.
    pub fn tables(&self) -> Vec<&[i32]> {
        (0..self.written.len()).map(|request| self.material.block_table(request)).collect()
    }

    /// Columns of a key that carry no value.
    pub fn spare_columns(&self) -> usize {
        match self.material.configuration().attention {
            Attention::Mla { qk_rope_head_dim, .. } => qk_rope_head_dim,
            Attention::Gqa { head_dim, .. } => head_dim,
        }
    }

    /// `units` of the cache scale as the cache holds them.
    pub fn held(&self, units: f32) -> f64 {
        let configuration = self.material.configuration();
        let code = cache_code(
            configuration,
            self.written_by(),
            round_f32(configuration.dtype, units * configuration.kv_scale),
        );
        f64::from(cache_value(configuration, code))
    }

    fn written_by(&self) -> &Conventions {
        let profile = self.engine.engine.profile();
        let write = profile.operation(OperationKind::WriteKv).map(|operation| &operation.conventions);
        write.unwrap_or(&self.material.conventions)
    }

    /// The case with keys, values and queries of a probe; an up-projection becomes the identity.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when the case contradicts itself.
    pub fn with(
        &self,
        content: &Content,
        query: &dyn Fn(usize, usize, &mut [f32]),
    ) -> Result<AttentionMaterial, Halt> {
        let attention = self.material.configuration().attention;
        let mut inputs: Inputs = self.material.inputs.clone();
        inputs.stale_keys.iter_mut().chain(&mut inputs.stale_values).for_each(Vec::clear);
        for (request, tokens) in self.written.iter().enumerate() {
            for position in 0..*tokens {
                let (keys, values) = self.token_rows(content, Token { request, position });
                inputs.keys[request][position * keys.len()..(position + 1) * keys.len()]
                    .copy_from_slice(&keys);
                if !attention.is_mla() {
                    inputs.values[request][position * values.len()..(position + 1) * values.len()]
                        .copy_from_slice(&values);
                }
            }
        }
        let (heads, dim) = (self.material.heads(), attention.qk_dim());
        for (state, head) in inputs.query.chunks_exact_mut(dim).enumerate() {
            if self.sights[state / heads].is_some() {
                head.fill(0.0);
                query(state / heads, state % heads, &mut head[dim - self.spare_columns()..]);
            }
        }
        if let Some(weights) = &mut inputs.w_uv {
            let (from, to) = (attention.value_dim(), attention.v_head_dim());
            weights.fill(0.0);
            for head in weights.chunks_exact_mut(from * to) {
                (0..from.min(to)).for_each(|index| head[index * to + index] = 1.0);
            }
        }
        self.material.with_inputs(inputs)
    }

    /// Keys and values of a token, all KV heads alike, as they are written.
    fn token_rows(&self, content: &Content, token: Token) -> (Vec<f32>, Vec<f32>) {
        let configuration = self.material.configuration();
        let attention = configuration.attention;
        let (mut key, mut value) = (vec![0.0; attention.qk_dim()], vec![0.0; attention.value_dim()]);
        (content.value)(token, &mut value[..self.width]);
        let spare = attention.qk_dim() - self.spare_columns();
        (content.key)(token, &mut key[spare..]);
        if attention.is_mla() {
            key[..value.len()].copy_from_slice(&value);
        }
        let written = |row: Vec<f32>| {
            row.iter().map(|units| round_f32(configuration.dtype, units * configuration.kv_scale)).collect()
        };
        let (key, value): (Vec<f32>, Vec<f32>) = (written(key), written(value));
        (key.repeat(attention.kv_heads()), value.repeat(attention.kv_heads()))
    }

    /// A session whose caches hold the case's tokens, written through the engine's own slot mapping. With
    /// [`FreeSlots::Spelt`] every other slot holds what it would spell, where the engine takes caches.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do it or fails.
    pub fn open(
        &self,
        content: &Content,
        free: FreeSlots,
        material: &AttentionMaterial,
    ) -> Result<Run, Halt> {
        let mut run = Run::open(self.engine, material.configuration())?;
        let preset = (free == FreeSlots::Spelt).then(|| self.preset(content)).flatten();
        if let Some(caches) = preset {
            match run.step(&Operation::LoadCache, &caches) {
                Err(Halt::Unsupported(_)) => run = Run::open(self.engine, material.configuration())?,
                other => drop(other?),
            }
        }
        run.step(&Operation::WriteKv, &material.write_inputs())?;
        Ok(run)
    }

    /// Caches before the write: positions behind a request in its own blocks, and slots of nobody everywhere else.
    fn preset(&self, content: &Content) -> Option<Tensors> {
        let configuration = self.material.configuration();
        let (block, world) = (configuration.block_size, configuration.dcp);
        let names =
            if configuration.attention.is_mla() { &["key_cache"][..] } else { &["key_cache", "value_cache"] };
        let shapes: Vec<Vec<usize>> = names.iter().map(|name| self.material.cache_shape(name)).collect();
        if shapes.iter().map(|shape| shape.iter().product::<usize>()).sum::<usize>() > MOST_PRESET_ELEMENTS {
            return None;
        }
        let mut owner = vec![None; configuration.blocks];
        for request in 0..self.written.len() {
            for (entry, id) in self.material.used_blocks(request).iter().enumerate() {
                if let Some(owner) = usize::try_from(*id).ok().and_then(|id| owner.get_mut(id)) {
                    *owner = Some((request, entry));
                }
            }
        }
        let mut codes = vec![Vec::new(); names.len()];
        for rank in 0..configuration.tp {
            for (id, offset) in (0..configuration.blocks).flat_map(|id| (0..block).map(move |o| (id, o))) {
                let behind = owner[id].and_then(|(request, entry)| {
                    let position = self.material.layout.global_position(entry * block + offset, rank % world);
                    (position >= self.written[request]).then_some(Token { request, position })
                });
                let token = behind.unwrap_or_else(|| self.code.slot(rank % world, id, offset));
                let (keys, values) = self.token_rows(content, token);
                for (codes, row) in codes.iter_mut().zip([keys, values]) {
                    codes
                        .extend(row.iter().map(|value| cache_code(configuration, self.written_by(), *value)));
                }
            }
        }
        let mut tensors = Tensors::new();
        for ((name, shape), codes) in names.iter().zip(&shapes).zip(&codes) {
            tensors.insert(name, Tensor::from_codes(configuration.kv_dtype, shape, codes));
        }
        Some(tensors)
    }

    /// One step on an open session with the queries of `material`: outputs in units of 1 and LSEs, the first `width` elements
    /// of each output.
    ///
    /// # Errors
    /// [`Halt`] when the engine fails, or its outputs have another shape.
    pub fn step(&self, run: &mut Run, material: &AttentionMaterial, width: usize) -> Result<Reading, Halt> {
        let observed = run.step(&material.operation(), &material.step_inputs())?;
        self.reading(&observed, width)
    }

    fn reading(&self, observed: &Observed, width: usize) -> Result<Reading, Halt> {
        let shape = self.material.output_shape();
        let out = observed.output("out", self.material.output_dtype(), &shape)?.to_f64();
        let lse = observed.output("lse", Dtype::F32, &shape[..3])?.to_f64();
        let states = out.chunks_exact(shape[3]);
        let out = states.flat_map(|state| state[..width].iter().map(|value| value / self.unit)).collect();
        Ok(Reading { dims: width, out, lse, rows: shape[1], heads: shape[2] })
    }

    /// P1: equal scores, values that spell their tokens, in as many launches as the code needs.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do it or fails.
    pub fn tokens(&self) -> Result<Reading, Halt> {
        let sign = |token: Token, dim: usize| self.code.sign(dim, token) as f32;
        self.launched(self.code.dims(), FreeSlots::Spelt, &sign, &|_, _| {}, &|_, _, _| {})
    }

    /// Values of `dims` dimensions in as many launches as they need, under keys and queries that stay the same.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do it or fails.
    pub fn launched(
        &self,
        dims: usize,
        free: FreeSlots,
        value: &dyn Fn(Token, usize) -> f32,
        key: &dyn Fn(Token, &mut [f32]),
        query: &dyn Fn(usize, usize, &mut [f32]),
    ) -> Result<Reading, Halt> {
        let mut all: Option<Reading> = None;
        for first in (0..dims).step_by(self.width) {
            let count = self.width.min(dims - first);
            let fill = |token: Token, out: &mut [f32]| {
                (0..count).for_each(|index| out[index] = value(token, first + index));
            };
            let content = Content { value: &fill, key };
            let material = self.with(&content, query)?;
            let mut run = self.open(&content, free, &material)?;
            let part = self.step(&mut run, &material, count)?;
            let whole = all.get_or_insert_with(|| Reading {
                dims,
                out: vec![0.0; part.states() * dims],
                lse: part.lse.clone(),
                rows: part.rows,
                heads: part.heads,
            });
            for state in 0..part.states() {
                whole.out[state * dims + first..state * dims + first + count]
                    .copy_from_slice(part.state(state));
            }
        }
        all.ok_or_else(|| Halt::Inconclusive("a code has at least one dimension".to_owned()))
    }
}
