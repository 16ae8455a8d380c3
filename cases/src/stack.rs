//! Cases of a whole transformer: a session whose steps run through all its layers.

mod inputs;
mod mixture;
mod pcp;
mod recurrence;
mod script;
mod selection;
mod slots;
mod wired;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{
    Activation, Attention, Configuration, LayerPattern, Operation, StackPcp, StackPlan, StreamLayout,
};
use shardcheck_formats::Dtype;

pub use inputs::{StackInputs, StackTurn, generate_stack};
pub use mixture::StackMixture;
pub use recurrence::StackRecurrence;
pub use selection::StackSelection;
pub use slots::{StateTurn, state_turns};

use crate::check::elements;
use crate::tokens::Tokens;
use crate::{Body, Case, CaseError, Family, RunKind, SequenceCase, Step, Turn};

/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;
/// Most layers.
const MAX_LAYERS: usize = LayerPattern::MOST;
/// Widest stream, MLP and vocabulary.
const MAX_STACK_WIDTH: usize = 1 << 12;
/// Most elements of the weights, and of what all ranks show of all steps.
const MAX_STACK_ELEMENTS: usize = 1 << 24;

/// Most rows of a session whose weights are laid out: what it costs to follow them one at a time, through the keys of all before, grows with
/// their square, and bounds that grow with the keys decide nothing any more.
const MAX_WIRED_ROWS: usize = 1 << 10;

/// Weights that are not drawn but laid out, so that what a whole run must give is known: attention of each layer finds one token, and the
/// token behind a row is the one that stood behind the same token before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackWiring {
    /// Drafts of a request in each step, by a draft head; 0: there is none.
    pub drafts: usize,
    /// Steps behind those of the session in which every request's drafts are verified and new ones made.
    pub rounds: usize,
}

impl StackWiring {
    fn spell(self) -> String {
        match self.drafts {
            0 => ".wired".to_owned(),
            drafts => format!(".wired.m{drafts}.r{}", self.rounds),
        }
    }

    fn read(tokens: &mut Tokens) -> Result<Option<Self>, String> {
        if !tokens.take_flag("wired") {
            return Ok(None);
        }
        Ok(Some(match tokens.take_number("m") {
            None => Self { drafts: 0, rounds: 0 },
            Some(0) => return Err("m0 is no draft head: leave m and r out where there is none".to_owned()),
            Some(drafts) => Self { drafts, rounds: tokens.need_number("r")? },
        }))
    }
}

/// A transformer, and the session that runs it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackCase {
    /// Layers L.
    pub layers: usize,
    /// Width h of the stream.
    pub hidden: usize,
    /// Inner width I of an MLP.
    pub inner: usize,
    /// Tokens V of the vocabulary.
    pub vocabulary: usize,
    /// Where rows lie between layers.
    pub stream: StreamLayout,
    /// Layers that have experts in place of an MLP; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mixture: Option<StackMixture>,
    /// What each layer is; absent: all have latent attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<LayerPattern>,
    /// Sizes of the recurrent ones; absent: there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrence: Option<StackRecurrence>,
    /// How many tokens rows attend to in layers that have some named, and how these are listed; absent: no layer has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<StackSelection>,
    /// How weights and tokens are laid out; absent: they are drawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wiring: Option<StackWiring>,
    /// What MLPs and experts compute: gated by silu, or by SiTU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub situ: bool,
    /// Whether what attention gives passes a gate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub output_gate: bool,
    /// How rows are shared out over ranks of prefill context parallelism, of which the session's ranks are one; absent: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcp: Option<StackPcp>,
    /// What the session is opened with, and its steps, of which a run is one through all layers.
    pub session: SequenceCase,
}

impl StackCase {
    /// What the steps ask for.
    pub fn plan(&self) -> StackPlan {
        StackPlan {
            layers: self.layers,
            stream: self.stream,
            experts: self.mixture.map(|own| own.plan()),
            pattern: self.pattern,
            recurrent: self.recurrent_plan(),
            activation: if self.situ { Activation::SituGated } else { Activation::SiluGated },
            output_gate: self.output_gate,
            list: self.selection.map(|own| own.list),
            drafts: self.drafts(),
            pcp: self.pcp,
        }
    }

    /// Drafts of a request in each step; 0 without a draft head.
    pub fn drafts(&self) -> usize {
        self.wiring.map_or(0, |wiring| wiring.drafts)
    }

    /// Rows of each request in the steps of several rows.
    fn prompt_lengths(&self) -> BTreeMap<usize, usize> {
        let mut lengths = BTreeMap::new();
        for step in &self.session.steps {
            if let Step::Run { kind: RunKind::Verify, batch, .. } = step {
                batch.iter().for_each(|own| *lengths.entry(own.request).or_default() += own.tokens);
            }
        }
        lengths
    }

    /// Whether the session has nothing but runs of new rows.
    fn is_prompts(&self) -> bool {
        let is_run = |step: &Step| matches!(step, Step::Run { kind: RunKind::Verify, .. });
        self.session.steps.iter().all(is_run)
    }

    /// Each step.
    pub fn operation(&self) -> Operation {
        Operation::Forward { plan: self.plan() }
    }

    /// The steps that are run, those of drafts included.
    ///
    /// # Errors
    /// The first step that can't be taken, and why.
    pub fn turns(&self, seed: u64) -> Result<Vec<Turn>, String> {
        script::Script::of(self, seed)?.turns(seed)
    }

    /// What a session is opened with.
    pub fn configuration(&self) -> &Configuration {
        &self.session.configuration
    }

    /// Rotary width, the last elements of a query or key.
    pub fn rotary(&self) -> usize {
        match self.session.configuration.attention {
            Attention::Mla { qk_rope_head_dim, .. } => qk_rope_head_dim,
            Attention::Gqa { .. } => 0,
        }
    }

    /// Shape of each weight, without the rotary table, by name.
    pub fn weight_shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let Self { hidden, inner, vocabulary, .. } = *self;
        let (configuration, layers) = (self.configuration(), self.plan().attending().len());
        let (heads, attention) = (configuration.total_heads(), configuration.attention);
        let (key_dim, latent, up_dim) = (attention.qk_dim(), attention.value_dim(), attention.v_head_dim());
        let (head, mixtures) = (self.plan().heads_of_drafts(), self.plan().mixtures());
        let (layers, dense) = (layers + head, self.plan().dense() + head);
        let mut shapes = vec![
            ("embedding", vec![vocabulary, hidden]),
            ("w_query", vec![layers, heads, key_dim, hidden]),
            ("w_key", vec![layers, key_dim, hidden]),
            ("w_uv", vec![layers, heads, latent, up_dim]),
            ("w_output", vec![layers, hidden, heads * up_dim]),
            ("w_gate", vec![dense, inner, hidden]),
            ("w_up", vec![dense, inner, hidden]),
            ("w_down", vec![dense, hidden, inner]),
            ("w_head", vec![vocabulary, hidden]),
        ];
        if self.output_gate {
            shapes.push(("w_output_gate", vec![layers - head, heads * up_dim, hidden]));
        }
        if head > 0 {
            shapes.push(("w_draft", vec![hidden, 2 * hidden]));
        }
        if let Some(StackMixture { experts, latent, .. }) = self.mixture {
            // what experts read, and write
            let width = if latent > 0 { latent } else { hidden };
            shapes.extend([
                ("w_router", vec![mixtures, experts, hidden]),
                ("expert_gate", vec![mixtures, experts, inner, width]),
                ("expert_up", vec![mixtures, experts, inner, width]),
                ("expert_down", vec![mixtures, experts, width, inner]),
            ]);
        }
        shapes
    }

    /// Checks sizes, and that the session has nothing but steps through the layers.
    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        for (name, value, most) in [
            ("layers", self.layers, MAX_LAYERS),
            ("hidden", self.hidden, MAX_STACK_WIDTH),
            ("inner", self.inner, MAX_STACK_WIDTH),
            ("vocabulary", self.vocabulary, MAX_STACK_WIDTH),
        ] {
            if value == 0 || value > most {
                return fail(format!("{name} is {value}; it must be between 1 and {most}"));
            }
        }
        if let Some(own) = self.mixture {
            own.check(self.layers)?;
        }
        self.session.check()?;
        self.check_pattern()?;
        let configuration = self.configuration();
        if !configuration.attention.is_mla() || !self.rotary().is_multiple_of(2) {
            return fail(
                "a stack has latent attention whose rotary part is a whole number of pairs".to_owned(),
            );
        }
        if self.session.latent_output || configuration.second_group.is_some() {
            return fail("a stack has up-projections, and one KV group".to_owned());
        }
        if configuration.dtype != Dtype::Bf16 {
            return fail(format!("activations of a stack are bf16, not {}", configuration.dtype));
        }
        let other = |step: &&Step| match step {
            Step::Run { kind, .. } => !matches!(kind, RunKind::Decode | RunKind::Verify),
            Step::Import { .. } => true,
            _ => false,
        };
        if let Some(step) = self.session.steps.iter().find(other) {
            return fail(format!(
                "{step} is no step through layers; rows of any number are v, single ones d"
            ));
        }
        if self.wiring.is_some() {
            wired::check(self).map_err(CaseError::OutOfRange)?;
        }
        let weights = self.weight_shapes().iter().map(|(_, shape)| elements(shape)).max().unwrap_or(0);
        let script = script::Script::of(self, 0).map_err(CaseError::OutOfRange)?;
        let turns = script.turns(0).map_err(CaseError::OutOfRange)?;
        self.check_pcp(&turns, &script)?;
        let rows: usize =
            turns.iter().map(|turn| turn.new_tokens.iter().sum::<usize>() + turn.padded_rows).sum();
        if self.wiring.is_some() && rows > MAX_WIRED_ROWS {
            return fail(format!(
                "{rows} rows in all steps of a stack whose weights are laid out (.wired); there may be {MAX_WIRED_ROWS}"
            ));
        }
        let row = self.plan().places() * self.hidden * 3
            + self.layers * configuration.total_heads() * configuration.attention.qk_dim()
            + self.vocabulary;
        let requests = turns.iter().map(|turn| turn.requests.len()).sum();
        let shown = elements(&[rows, row, configuration.tp, self.plan().pcp_ranks()])
            .saturating_add(self.recurrent_elements(rows, requests));
        if weights > MAX_STACK_ELEMENTS || shown > MAX_STACK_ELEMENTS {
            return fail(format!("more than {MAX_STACK_ELEMENTS} elements of weights, or of what is shown"));
        }
        Ok(())
    }

    /// The part of an id before the session, such as `l2.h24.i20.v37.whole`, or `l2.h24.i20.v37.whole.e6.k2.d1` with experts behind one layer; then the pattern of the layers.
    /// `.wired.m3.r5` stands behind it for weights that are laid out, three drafts a step, and five steps of them; `.situ` for MLPs and experts that are gated by SiTU, `.gated` for attention behind a gate;
    /// `.pcp2.zigzag.replicated` for ranks of prefill context parallelism, with `.merged` where experts are shared out over all of them.
    pub(crate) fn spell(&self) -> String {
        let Self { layers, hidden, inner, vocabulary, stream, .. } = self;
        let mixture = self.mixture.map_or(String::new(), |own| own.spell());
        let pattern = self.pattern.map_or(String::new(), |pattern| format!(".{pattern}"));
        let recurrence = self.recurrence.map_or(String::new(), |own| own.spell());
        let selection = self.selection.map_or(String::new(), |own| own.spell());
        let wiring = self.wiring.map_or(String::new(), |own| own.spell());
        let pcp = self.spell_pcp();
        let situ = if self.situ { ".situ" } else { "" };
        let gate = if self.output_gate { ".gated" } else { "" };
        format!(
            "l{layers}.h{hidden}.i{inner}.v{vocabulary}.{stream}{mixture}{pattern}{recurrence}{selection}{wiring}{situ}{gate}{pcp}"
        )
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read(stack: &str, session: SequenceCase) -> Result<Self, String> {
        let mut tokens = Tokens::split(stack);
        let mixture = StackMixture::read(&mut tokens)?;
        let (pattern, recurrence, selection) = recurrence::read_pattern(&mut tokens)?;
        let wiring = StackWiring::read(&mut tokens)?;
        let pcp = pcp::read(&mut tokens)?;
        let (situ, output_gate) = (tokens.take_flag("situ"), tokens.take_flag("gated"));
        let case = Self {
            layers: tokens.need_number("l")?,
            hidden: tokens.need_number("h")?,
            inner: tokens.need_number("i")?,
            vocabulary: tokens.need_number("v")?,
            stream: tokens.need("layout of the stream", &StreamLayout::ALL, StreamLayout::name)?,
            mixture,
            pattern,
            recurrence,
            selection,
            wiring,
            situ,
            output_gate,
            pcp,
            session,
        };
        tokens.finish()?;
        Ok(case)
    }
}

impl Case {
    /// A case of a stack of the current schema version.
    pub fn stack(body: StackCase, seed: u64) -> Self {
        Self::of(Family::Stack, Body::Stack(Box::new(body)), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "sharded.kkkm.qh4.vh8.qd6.vd5.t4.c4.u3.softplus";
    const ID: &str = "stack/l2.h24.i20.v37.sharded/tiny-mla/tp4.dcp2.h1.s2.b4.n9.bf16.a2a.hi_lo/drafts/v0+9,1+3_v0+4,1+2.pad2_r0-3_d0,1/7";

    #[test]
    fn an_id_and_the_json_read_back() {
        let case = Case::read_back(ID);
        case.configuration().unwrap().check().unwrap();
        let Body::Stack(body) = &case.body else { panic!("another body") };
        assert_eq!(
            body.plan(),
            StackPlan {
                layers: 2,
                stream: StreamLayout::Sharded,
                experts: None,
                pattern: None,
                recurrent: None,
                activation: Activation::SiluGated,
                output_gate: false,
                list: None,
                drafts: 0,
                pcp: None,
            }
        );
        let id = ID.replacen("sharded", "whole.e6.k2.d1", 1);
        let case = Case::read_back(&id);
        let Body::Stack(body) = &case.body else { panic!("another body") };
        assert_eq!((body.plan().dense(), body.plan().mixtures()), (1, 1));
        let id = ID.replacen("sharded", HYBRID, 1).replacen("l2", "l4", 1);
        let case = Case::read_back(&id);
        let Body::Stack(body) = &case.body else { panic!("another body") };
        assert_eq!(body.plan().recurrences(), [0, 1, 2]);
        assert_eq!(body.plan().recurrent.unwrap().slots, 2);
    }

    #[test]
    fn recurrent_layers_that_can_not_be_are_refused_with_the_reason() {
        for (from, to, reason) in [
            ("kkkm", "kkk", "a letter for each"),
            ("kkkm", "kkkk", "and a layer that attends"),
            ("kkkm", "mmmm", "unknown here"),
            ("qh4", "qh3", "evenly"),
            ("vh8", "vh6", "evenly"),
            ("qd6.", "", "\"qd\" with a whole number is missing"),
            ("t4", "t0", "t is 0"),
            ("u3", "u2", "goes back 3 of 4 rows; at most 2"),
            (".softplus", "", "the gate is missing"),
        ] {
            let id = ID.replacen("sharded", HYBRID, 1).replacen("l2", "l4", 1).replacen(from, to, 1);
            let error = id.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{from} {to}: {error}");
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        for (from, to, reason) in [
            ("l2.", "l0.", "layers is 0"),
            ("l2.", "", "\"l\" with a whole number is missing"),
            ("h24", "h99999", "hidden is 99999"),
            ("i20", "i0", "inner is 0"),
            ("sharded", "split", "layout of the stream is missing"),
            ("sharded", "sharded.x1", "unknown here"),
            ("v37", "v0", "vocabulary is 0"),
            ("sharded", "sharded.e4.k5.d1", "k (experts of a row) is 5; it must be between 1 and 4"),
            (
                "sharded",
                "sharded.e4.k2.d2",
                "d (layers in front of those with experts) is 2; it must be between 0 and 1",
            ),
            (
                "sharded",
                "sharded.e4.k2.d1.y2",
                "y (layers routed by token id) is 2; it must be between 0 and 1",
            ),
            ("sharded", "sharded.j4", "unknown here"),
            ("sharded", "sharded.e4.k2", "\"d\" with a whole number is missing"),
            ("dcp2", "dcp3", "does not divide"),
            ("hi_lo/", "hi_lo.lat/", "up-projections"),
            ("d0,1/", "p0+2.c4/", "is no step through layers"),
            ("d0,1/", "b0+2/", "is no step through layers"),
            ("r0-3", "r0-30", "can't lose 30"),
            ("tp4.", "mla16+7v12.tp4.", "whole number of pairs"),
            ("bf16.a2a.hi_lo/", "bf16.a2a.hi_lo~tp4.dcp1.h1.s1.b4.bf16.ag_rs/", "one KV group"),
            ("v0+9,", "v0+9000,", "elements"),
            ("sharded/tiny-mla/", "sharded.wired.m0.r0/tiny-mla/", "leave m and r out"),
            ("/7", "", "parts between slashes"),
        ] {
            let text = ID.replacen("n9.", "", 1).replacen(from, to, 1);
            let error = text.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{from} {to}: {error}");
        }
    }
}
