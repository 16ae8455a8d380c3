//! The readable id of a case, and the case that it spells.
//!
//! ```text
//! FAMILY/MODEL/CONFIGURATION/WORKLOAD/PROBE/SEED      attention
//! attend_selected/MODEL/CONFIGURATION/WORKLOAD/SELECTED/PROBE/SEED
//! FAMILY/STATES/PATTERN/VIEW/SEED                     merges
//! sequence/MODEL/CONFIGURATION/NAME/STEPS/SEED        steps of one session; CONFIGURATION~CONFIGURATION for two KV groups
//! stack/LAYERS/… as for a sequence …/SEED            the same through all layers of a transformer
//! rules/RULE_SET/RULE                                 configuration rules
//!
//! configuration  tp4.dcp4.h2.s2.b8.n12.e4m3fn@0.02.f16.a2a.lo_hi.qrep.pbm.k16+32
//!                ranks, W, heads a rank, S, B, blocks, cache format @ scale, type of activations (f16 where the cache does not say
//!                it already; none for bf16), exchange, lane order, switches (`lat`: latent
//!                output), kernel widths; shape (`mla16+8v12`, `gqa2x16v14`) and softmax scale (`sm0.25`) only where they are
//!                not the model's
//! workload       12+3_0+0_7+3x4.pad2.shuf.c64
//!                context+rows of each request (x4: four alike), graph padding, block placement, chunk budget
//! steps          p0+12,1+5.c64_d0,1.pad2_v0+4_r0-2: prefill (c: chunk budget), decode, verify, reject; b (draft block), h1=0x2
//!                (request 1 hits two blocks of request 0), f0 (free), e0 (evict)
//! selected       k8.packed.ragged: most tokens of a row, how a rank lists their slots, which they are
//! states         w3.t4.h2.d16.bf16.a2a.hi_lo
//! ```
//!
//! Without `n`, a configuration gets [`default_blocks`], that of a sequence as many as its steps need at once; an id that a program prints always has it.
//! Apart from that each case has one spelling, and another one is refused.

use std::str::FromStr;

use shardcheck_engine::{Attention, CommBackend, Configuration, LaneOrder, RuleSetName};
use shardcheck_formats::Dtype;

use crate::sequence::{peak_blocks, read_steps, spell_steps};
use crate::tokens::{Tokens, number};
use crate::{
    AcceptanceCase, AttendPcpCase, AttentionCase, Body, CUSTOM_MODEL, Case, CaseError, CompressPcpCase,
    Family, IndexLayersCase, KdaCase, MergeCase, MergePattern, Model, MoeCase, PcpCase, Placement, Request,
    RouteCase, SelectCase, SelectPcpCase, SelectedTokens, SequenceCase, StackCase, StateView, Workload,
    rules,
};

/// Blocks of a cache for a workload: the null block, what the requests need, and at least two that stay free.
pub fn default_blocks(workload: &Workload, virtual_block_tokens: usize) -> usize {
    let needed: usize = workload.requests.iter().map(|r| r.seq_len().div_ceil(virtual_block_tokens)).sum();
    1 + needed + (needed / 4).max(2)
}

impl Case {
    /// The id: readable, unique among cases, and the whole case ([`Case::from_str`] reads it back), except that a rule case is
    /// found by its name.
    pub fn id(&self) -> String {
        let (family, seed) = (self.family, self.seed);
        match &self.body {
            Body::Attention(case) => {
                let configuration = spell_configuration(&case.model, &case.configuration, case.latent_output);
                let workload = spell_workload(&case.workload);
                let selected =
                    case.selected.map_or_else(String::new, |tokens| format!("/{}", tokens.spell()));
                format!("{family}/{}/{configuration}/{workload}{selected}/{}/{seed}", case.model, case.probe)
            }
            Body::Merge(case) => {
                let states = spell_states(case);
                format!("{family}/{states}/{}/{}/{seed}", case.pattern.name(), case.view.name())
            }
            Body::Sequence(case) => format!("{family}/{}/{seed}", spell_sequence(case)),
            Body::Stack(case) => {
                format!("{family}/{}/{}/{seed}", case.spell(), spell_sequence(&case.session))
            }
            Body::Pcp(case) => format!("{family}/{}", case.spell()),
            Body::AttendPcp(case) => format!("{family}/{}/{seed}", case.spell()),
            Body::SelectPcp(case) => format!("{family}/{}/{seed}", case.spell()),
            Body::CompressPcp(case) => format!("{family}/{}/{seed}", case.spell()),
            Body::Route(case) => format!("{family}/{}/{seed}", case.spell()),
            Body::Moe(case) => format!("{family}/{}/{seed}", case.spell()),
            Body::Acceptance(case) => format!("{family}/{}/{seed}", case.spell()),
            Body::SelectSparse(case) => format!("{family}/{}/{seed}", case.spell()),
            Body::IndexLayers(case) => format!("{family}/{}", case.spell()),
            Body::Kda(case) => format!("{family}/{}/{seed}", case.spell()),
            Body::Rules(case) => format!("{family}/{}/{}", case.rules, case.rule),
        }
    }
}

impl FromStr for Case {
    type Err = CaseError;

    fn from_str(id: &str) -> Result<Self, CaseError> {
        let fail = |reason: String| CaseError::Id { id: id.to_owned(), reason };
        let parts: Vec<&str> = id.split('/').collect();
        let family: Family = parts[0].parse().map_err(fail)?;
        let case = if family.is_attention() {
            read_attention_case(family, &parts).map_err(fail)?
        } else if matches!(family, Family::Sequence | Family::Stack) {
            read_session(family, &parts).map_err(fail)?
        } else if matches!(family, Family::Pcp | Family::AttendPcp | Family::SelectPcp | Family::CompressPcp)
        {
            read_shared(&parts).map_err(fail)?
        } else if family == Family::Acceptance {
            let [_, sampler, batch, pattern, seed] = parts[..] else {
                return Err(fail(format!("{} parts between slashes; an acceptance id has 5", parts.len())));
            };
            let body = AcceptanceCase::read(sampler, batch, pattern).map_err(fail)?;
            Self::acceptance(body, number("seed", seed).map_err(fail)?)
        } else if family == Family::SelectSparse {
            let [_, selector, layout, workload, pattern, seed] = parts[..] else {
                return Err(fail(format!("{} parts between slashes; a selection id has 6", parts.len())));
            };
            let body = SelectCase::read(selector, layout, workload, pattern).map_err(fail)?;
            Self::select_sparse(body, number("seed", seed).map_err(fail)?)
        } else if family == Family::IndexLayers {
            let [_, period, pattern, types] = parts[..] else {
                return Err(fail(format!("{} parts between slashes; an index_layers id has 4", parts.len())));
            };
            Self::index_layers(IndexLayersCase::read(period, pattern, types).map_err(fail)?)
        } else if family == Family::Kda {
            let [_, layer, ranks, steps, pattern, seed] = parts[..] else {
                return Err(fail(format!("{} parts between slashes; a kda id has 6", parts.len())));
            };
            let body = KdaCase::read(layer, ranks, steps, pattern).map_err(fail)?;
            Self::kda(body, number("seed", seed).map_err(fail)?)
        } else if family == Family::Route {
            let [_, router, tokens, seed] = parts[..] else {
                return Err(fail(format!("{} parts between slashes; a route id has 4", parts.len())));
            };
            let body = RouteCase::read(router, tokens).map_err(fail)?;
            Self::route(body, number("seed", seed).map_err(fail)?)
        } else if family == Family::Moe {
            let [_, router, plan, tokens, seed] = parts[..] else {
                return Err(fail(format!("{} parts between slashes; a moe id has 5", parts.len())));
            };
            let body = MoeCase::read(router, plan, tokens).map_err(fail)?;
            Self::moe(body, number("seed", seed).map_err(fail)?)
        } else if family.is_merge() {
            let [_, states, pattern, view, seed] = parts[..] else {
                return Err(fail(format!("{} parts between slashes; a merge id has 5", parts.len())));
            };
            let pattern =
                named("merge pattern", &MergePattern::ALL, MergePattern::name, pattern).map_err(fail)?;
            let view = named("view", &StateView::ALL, StateView::name, view).map_err(fail)?;
            let body = read_states(states, pattern, view).map_err(fail)?;
            Self::merge(family, body, number("seed", seed).map_err(fail)?)
        } else {
            let [_, set, rule] = parts[..] else {
                return Err(fail(format!("{} parts between slashes; a rule id has 3", parts.len())));
            };
            let set: RuleSetName = set.parse().map_err(fail)?;
            let known =
                rules::find(set, rule).ok_or_else(|| fail(format!("rule set {set} has no rule {rule:?}")))?;
            Self::rules(known.clone())
        };
        case.check()?;
        let right = case.id();
        if !is_spelt(id, &right) {
            return Err(CaseError::Spelling { id: id.to_owned(), right });
        }
        Ok(case)
    }
}

/// Whether a text is the id of a case, with or without the number of blocks of its caches.
fn is_spelt(given: &str, right: &str) -> bool {
    let is_blocks = |token: &&str| token.strip_prefix('n').is_some_and(|n| n.parse::<usize>().is_ok());
    let halves = |text: &str| text.split(['/', '~']).map(str::to_owned).collect::<Vec<_>>();
    let without =
        |right: &str| right.split('.').filter(|token| !is_blocks(token)).collect::<Vec<_>>().join(".");
    let (given, right) = (halves(given), halves(right));
    let is_half = |(given, right): (&String, &String)| {
        given == right || (right.contains(".dcp") && *given == without(right))
    };
    given.len() == right.len() && given.iter().zip(&right).all(is_half)
}

/// An attention case, given the parts of its id.
fn read_attention_case(family: Family, parts: &[&str]) -> Result<Case, String> {
    let mut rest = parts.to_vec();
    // a selection stands between the workload and the probe
    let selected = (family == Family::AttendSelected && parts.len() == 7).then(|| rest.remove(4));
    let [_, model, configuration, workload, probe, seed] = rest[..] else {
        let count = parts.len();
        return Err(format!("{count} parts between slashes; an attention id has 6, of selected tokens 7"));
    };
    let selected = selected.map(SelectedTokens::read).transpose()?;
    let workload = read_workload(workload)?;
    let probe = probe.parse()?;
    let blocks = |virtual_block: usize| Ok(default_blocks(&workload, virtual_block));
    let (configuration, latent_output) = read_configuration(model, configuration, blocks)?;
    let model = model.to_owned();
    let body = AttentionCase { model, configuration, workload, probe, latent_output, selected };
    Ok(Case::attention(family, body, number("seed", seed)?))
}

/// Model, configurations, name and steps.
fn spell_sequence(case: &SequenceCase) -> String {
    let mut configuration = spell_configuration(&case.model, &case.configuration, case.latent_output);
    if let Some(second) = &case.configuration.second_group {
        let latent = case.latent_output && second.attention.is_mla();
        configuration += &format!("~{}", spell_configuration(&case.model, second, latent));
    }
    let (model, name, steps) = (&case.model, &case.name, spell_steps(&case.steps));
    format!("{model}/{configuration}/{name}/{steps}")
}

/// A batch over the ranks of prefill context parallelism, and one that attends.
fn read_shared(parts: &[&str]) -> Result<Case, String> {
    match *parts {
        ["pcp", split, batch] => Ok(Case::pcp(PcpCase::read(split, batch)?)),
        ["attend_pcp", split, batch, model, configuration, rest, probe, seed] => {
            let body = AttendPcpCase::read((split, batch), (model, configuration), rest, probe)?;
            Ok(Case::attend_pcp(body, number("seed", seed)?))
        }
        ["select_pcp", split, batch, indexer, pattern, seed] => {
            let body = SelectPcpCase::read((split, batch), indexer, pattern)?;
            Ok(Case::select_pcp(body, number("seed", seed)?))
        }
        ["compress_pcp", split, batch, blocks, pattern, seed] => {
            let body = CompressPcpCase::read((split, batch), blocks, pattern)?;
            Ok(Case::compress_pcp(body, number("seed", seed)?))
        }
        _ => Err(format!(
            "{} parts between slashes; a pcp id has 3, an attend_pcp id 8, select_pcp and compress_pcp have 6",
            parts.len()
        )),
    }
}

pub(crate) fn spell_configuration(model: &str, c: &Configuration, latent_output: bool) -> String {
    let mut tokens = Vec::new();
    let model = Model::find(model);
    if model.is_none_or(|model| model.attention(c.gathered_heads()) != c.attention) {
        tokens.push(match c.attention {
            Attention::Mla { kv_lora_rank, qk_rope_head_dim, v_head_dim } => {
                format!("mla{kv_lora_rank}+{qk_rope_head_dim}v{v_head_dim}")
            }
            Attention::Gqa { kv_heads, head_dim, v_head_dim } => {
                format!("gqa{kv_heads}x{head_dim}v{v_head_dim}")
            }
        });
    }
    if model.is_none_or(|model| model.softmax_scale != c.softmax_scale) {
        tokens.push(format!("sm{}", c.softmax_scale));
    }
    tokens.push(format!("tp{}", c.tp));
    tokens.push(format!("dcp{}", c.dcp));
    tokens.push(format!("h{}", c.heads_per_rank));
    tokens.push(format!("s{}", c.interleave));
    tokens.push(format!("b{}", c.block_size));
    tokens.push(format!("n{}", c.blocks));
    tokens.push(match c.kv_scale {
        1.0 => c.kv_dtype.name().to_owned(),
        scale => format!("{}@{scale}", c.kv_dtype),
    });
    // an f16 cache says by itself that activations are f16
    if c.dtype != Dtype::Bf16 && c.kv_dtype != c.dtype {
        tokens.push(c.dtype.name().to_owned());
    }
    push_exchange(&mut tokens, c.comm_backend, c.lane_order);
    for (set, name) in
        [(c.query_replication, "qrep"), (c.project_before_merge, "pbm"), (latent_output, "lat")]
    {
        if set {
            tokens.push(name.to_owned());
        }
    }
    if !c.kernel_head_widths.is_empty() {
        let widths: Vec<String> = c.kernel_head_widths.iter().map(usize::to_string).collect();
        tokens.push(format!("k{}", widths.join("+")));
    }
    tokens.join(".")
}

/// The lane order matters to the A2A alone; elsewhere only the second one is spelt, so that the id stays whole.
fn push_exchange(tokens: &mut Vec<String>, backend: CommBackend, lane_order: LaneOrder) {
    tokens.push(backend.name().to_owned());
    if backend == CommBackend::A2a || lane_order != LaneOrder::HiLo {
        tokens.push(lane_order.name().to_owned());
    }
}

pub(crate) fn spell_workload(workload: &Workload) -> String {
    let mut requests: Vec<String> = Vec::new();
    let mut rest = workload.requests.as_slice();
    while let Some(first) = rest.first() {
        let count = rest.iter().take_while(|request| *request == first).count();
        let one = format!("{}+{}", first.context_tokens, first.query_tokens);
        requests.push(if count == 1 { one } else { format!("{one}x{count}") });
        rest = &rest[count..];
    }
    let mut text = requests.join("_");
    if workload.padded_rows > 0 {
        text += &format!(".pad{}", workload.padded_rows);
    }
    text += &format!(".{}", workload.placement.name());
    if workload.chunk_budget_tokens > 0 {
        text += &format!(".c{}", workload.chunk_budget_tokens);
    }
    text
}

fn spell_states(case: &MergeCase) -> String {
    let mut tokens = vec![
        format!("w{}", case.world),
        format!("t{}", case.rows),
        format!("h{}", case.heads_per_rank),
        format!("d{}", case.dim),
        case.dtype.name().to_owned(),
    ];
    push_exchange(&mut tokens, case.comm_backend, case.lane_order);
    tokens.join(".")
}

fn named<T: Copy>(what: &str, all: &[T], name: fn(T) -> &'static str, text: &str) -> Result<T, String> {
    all.iter().copied().find(|value| name(*value) == text).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|value| name(*value)).collect();
        format!("unknown {what} {text:?}; known are {}", names.join(", "))
    })
}

pub(crate) fn read_workload(text: &str) -> Result<Workload, String> {
    let (requests_text, rest) = text.split_once('.').ok_or("the placement is missing: seq, shuf or desc")?;
    let mut requests = Vec::new();
    for entry in requests_text.split('_') {
        let (one, count) = match entry.split_once('x') {
            None => (entry, 1),
            Some((one, count)) => (one, number("number of requests", count)?),
        };
        if count == 0 || count > crate::MAX_REQUESTS {
            return Err(format!("{count} requests alike; there may be 1 to {}", crate::MAX_REQUESTS));
        }
        let (context, query) = one
            .split_once('+')
            .ok_or_else(|| format!("request {entry:?} is not CONTEXT+ROWS, such as 12+3"))?;
        let request = Request {
            context_tokens: number("context length", context)?,
            query_tokens: number("number of rows", query)?,
        };
        if request.context_tokens > crate::MAX_TOKENS || request.query_tokens > crate::MAX_TOKENS {
            return Err(format!("request {entry:?} is longer than {} tokens", crate::MAX_TOKENS));
        }
        requests.extend(std::iter::repeat_n(request, count));
        if requests.len() > crate::MAX_REQUESTS {
            return Err(format!("more than {} requests", crate::MAX_REQUESTS));
        }
    }
    let mut tokens = Tokens::split(rest);
    let padded_rows = tokens.take_number("pad").unwrap_or(0);
    let chunk_budget_tokens = tokens.take_number("c").unwrap_or(0);
    let placement = tokens
        .take(|token| Placement::ALL.into_iter().find(|placement| placement.name() == token))
        .ok_or("the placement is missing: seq, shuf or desc")?;
    tokens.finish()?;
    Ok(Workload { requests, padded_rows, placement, chunk_budget_tokens })
}

/// Tokens of a virtual block, where both numbers are what [`Configuration::check`] takes: other sizes are counted in it.
pub(crate) fn read_virtual_block(dcp: usize, block_size: usize) -> Result<usize, String> {
    check_read("dcp", dcp)?;
    check_read("b", block_size)?;
    Ok(dcp * block_size)
}

fn check_read(name: &str, value: usize) -> Result<(), String> {
    match (1..=Configuration::MOST).contains(&value) {
        true => Ok(()),
        false => Err(format!("{name} is {value}; it must be between 1 and {}", Configuration::MOST)),
    }
}

/// The configuration and whether the output is latent; `blocks` gives their number for a virtual block where the text does not.
pub(crate) fn read_configuration(
    model: &str,
    text: &str,
    blocks: impl Fn(usize) -> Result<usize, String>,
) -> Result<(Configuration, bool), String> {
    let known = Model::find(model);
    if known.is_none() && model != CUSTOM_MODEL {
        return Err(format!("unknown model {model:?}; known are {}, {CUSTOM_MODEL}", Model::names()));
    }
    let mut tokens = Tokens::split(text);
    let shape = tokens.take(read_attention);
    let softmax_scale = tokens.take(|token| token.strip_prefix("sm")?.parse().ok());
    let tp = tokens.need_number("tp")?;
    let dcp = tokens.need_number("dcp")?;
    let heads_per_rank = tokens.need_number("h")?;
    let interleave = tokens.need_number("s")?;
    let block_size = tokens.need_number("b")?;
    let virtual_block = read_virtual_block(dcp, block_size)?;
    check_read("h", heads_per_rank)?;
    let gathered_heads = heads_per_rank * dcp;
    let blocks = tokens.take_number("n").map_or_else(|| blocks(virtual_block), Ok)?;
    let (kv_dtype, kv_scale) =
        tokens.take(read_cache_format).ok_or("the cache format is missing, such as bf16")?;
    let half = kv_dtype == Dtype::F16 || tokens.take_flag(Dtype::F16.name());
    let (comm_backend, lane_order) = tokens.take_exchange()?;
    let query_replication = tokens.take_flag("qrep");
    let project_before_merge = tokens.take_flag("pbm");
    let latent_output = tokens.take_flag("lat");
    let kernel_head_widths = tokens
        .take(|token| {
            token.strip_prefix('k')?.split('+').map(|width| width.parse().ok()).collect::<Option<Vec<_>>>()
        })
        .unwrap_or_default();
    tokens.finish()?;
    let attention = shape
        .or_else(|| known.map(|model| model.attention(gathered_heads)))
        .ok_or("a custom model needs its shape, such as mla16+8v12 or gqa2x16v14")?;
    let softmax_scale = softmax_scale
        .or_else(|| known.map(|model| model.softmax_scale))
        .ok_or("a custom model needs its softmax scale, such as sm0.25")?;
    let configuration = Configuration {
        attention,
        tp,
        dcp,
        heads_per_rank,
        interleave,
        block_size,
        blocks,
        dtype: if half { Dtype::F16 } else { Dtype::Bf16 },
        kv_dtype,
        kv_scale,
        softmax_scale,
        comm_backend,
        lane_order,
        query_replication,
        project_before_merge,
        kernel_head_widths,
        second_group: None,
    };
    Ok((configuration, latent_output))
}

/// A case of several steps: a sequence, or a stack, whose layers stand before what a sequence has.
fn read_session(family: Family, parts: &[&str]) -> Result<Case, String> {
    let count = parts.len();
    if family == Family::Stack {
        let [_, stack, model, configuration, name, steps, seed] = *parts else {
            return Err(format!("{count} parts between slashes; a stack id has 7"));
        };
        let session = read_sequence(model, configuration, name, steps)?;
        return Ok(Case::stack(StackCase::read(stack, session)?, number("seed", seed)?));
    }
    let [_, model, configuration, name, steps, seed] = *parts else {
        return Err(format!("{count} parts between slashes; a sequence id has 6"));
    };
    Ok(Case::sequence(read_sequence(model, configuration, name, steps)?, number("seed", seed)?))
}

/// A sequence; the configuration of a second KV group stands behind a `~`.
fn read_sequence(model: &str, configuration: &str, name: &str, steps: &str) -> Result<SequenceCase, String> {
    let steps = read_steps(steps)?;
    let (first, second) = configuration.split_once('~').map_or((configuration, None), |(a, b)| (a, Some(b)));
    let blocks = |virtual_block: usize| Ok(1 + peak_blocks(&steps, virtual_block)?);
    let (configuration, latent_output) = read_configuration(model, first, blocks)?;
    let (name, model) = (name.to_owned(), model.to_owned());
    let mut case = SequenceCase { name, model, configuration, latent_output, steps };
    let Some(text) = second else { return Ok(case) };
    // steps are counted in the blocks of the group, so that its configuration comes first
    let (group, latent) = read_configuration(&case.model, text, |_| Ok(1))?;
    let given = group.blocks;
    case.configuration.second_group = Some(Box::new(group));
    let own = case.in_second_group()?.ok_or("there is no second KV group")?;
    if own.latent_output != latent {
        return Err("lat of the second KV group is that of the first, where its values are latent".to_owned());
    }
    let blocks = 1 + peak_blocks(&own.steps, own.configuration.virtual_block_tokens())?;
    if let Some(group) = &mut case.configuration.second_group {
        // an n in the text is never 1: block 0 is given to nobody
        group.blocks = if given == 1 { blocks } else { given };
    }
    Ok(case)
}

fn read_attention(token: &str) -> Option<Attention> {
    let (widths, v_head_dim) = token.get(3..)?.split_once('v')?;
    let v_head_dim = v_head_dim.parse().ok()?;
    if token.starts_with("mla") {
        let (kv_lora_rank, qk_rope_head_dim) = widths.split_once('+')?;
        let (kv_lora_rank, qk_rope_head_dim) = (kv_lora_rank.parse().ok()?, qk_rope_head_dim.parse().ok()?);
        return Some(Attention::Mla { kv_lora_rank, qk_rope_head_dim, v_head_dim });
    }
    let (kv_heads, head_dim) = widths.split_once('x')?;
    let (kv_heads, head_dim) = (kv_heads.parse().ok()?, head_dim.parse().ok()?);
    token.starts_with("gqa").then_some(Attention::Gqa { kv_heads, head_dim, v_head_dim })
}

pub(crate) fn read_cache_format(token: &str) -> Option<(Dtype, f32)> {
    match token.split_once('@') {
        None => Some((token.parse().ok()?, 1.0)),
        Some((dtype, scale)) => Some((dtype.parse().ok()?, scale.parse().ok()?)),
    }
}

fn read_states(text: &str, pattern: MergePattern, view: StateView) -> Result<MergeCase, String> {
    let mut tokens = Tokens::split(text);
    let case = MergeCase {
        world: tokens.need_number("w")?,
        rows: tokens.need_number("t")?,
        heads_per_rank: tokens.need_number("h")?,
        dim: tokens.need_number("d")?,
        dtype: tokens.take(|token| token.parse().ok()).ok_or("the element type is missing: f32 or bf16")?,
        comm_backend: CommBackend::A2a,
        lane_order: LaneOrder::HiLo,
        pattern,
        view,
    };
    let (comm_backend, lane_order) = tokens.take_exchange()?;
    tokens.finish()?;
    Ok(MergeCase { comm_backend, lane_order, ..case })
}
