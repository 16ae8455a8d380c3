//! Cases of Kimi delta attention: steps of one session whose requests go on, fork, go back behind rejected rows, and leave their slots.

mod inputs;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{Configuration, KdaGate, KdaPlan, Operation, vocabulary};

pub use inputs::{KdaInputs, KdaRow, KdaStep, generate_kda};

use crate::pcp::nothing;
use crate::tokens::keyed;
use crate::{Body, Case, CaseError, Family, MAX_RANKS};

/// Most rows of all steps together.
const MAX_STEP_ROWS: usize = 4096;
/// Most slots of a session.
const MAX_SLOTS: usize = 256;
/// Most elements of the states of a session, and of what a case draws.
const MAX_DRAWN: usize = 1 << 22;
/// Most steps of a session.
const MAX_KDA_STEPS: usize = 64;

vocabulary! {
    /// How gates are drawn.
    KdaPattern ("pattern of decays") {
        /// Gaussian inputs; decays that leave a state some tokens.
        Gaussian = "gaussian",
        /// Decays near 1: what happened long ago still counts.
        Slow = "slow",
        /// In every other step all decays are exactly 1 and all updates exactly 0.
        Hold = "hold",
        /// In some rows decays are as strong as the gate can make them, below the smallest number of 32 bits, and updates are whole.
        Forget = "forget",
    }
}

/// A request of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KdaRequest {
    /// Its rows; 0 is legal.
    pub rows: usize,
    /// Slot that it goes on from; absent: it is new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<usize>,
    /// Last rows of the step that wrote that slot which were rejected.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rejected: usize,
    /// Slot that it leaves its states in.
    pub write: usize,
}

fn is_zero(value: &usize) -> bool {
    *value == 0
}

/// Steps of one session of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KdaCase {
    /// How decays are made.
    pub gate: KdaGate,
    /// Query and key heads H of all ranks.
    pub heads: usize,
    /// Value heads HV of all ranks.
    pub value_heads: usize,
    /// Width K of a query or key head.
    pub key_dim: usize,
    /// Width V of a value head.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Tensor-parallel ranks P.
    pub tp: usize,
    /// Decode-context-parallel size W.
    pub dcp: usize,
    /// Most tokens that are computed together.
    pub chunk: usize,
    /// Most rows of a step that may be rejected.
    pub drafts: usize,
    /// How gates are drawn.
    pub pattern: KdaPattern,
    /// Requests of each step.
    pub steps: Vec<Vec<KdaRequest>>,
}

impl KdaCase {
    /// Rows of all steps.
    pub fn rows(&self) -> usize {
        self.steps.iter().flatten().map(|request| request.rows).sum()
    }

    /// What a session for the case is opened with: the ranks, and caches of nothing.
    pub fn configuration(&self) -> Configuration {
        Configuration { tp: self.tp, dcp: self.dcp, ..nothing() }
    }

    /// What the steps ask for.
    pub fn plan(&self) -> KdaPlan {
        let slots = self.steps.iter().flatten().map(|request| request.write + 1).max().unwrap_or(1);
        KdaPlan { gate: self.gate, slots, drafts: self.drafts, chunk: self.chunk }
    }

    /// Each step.
    pub fn operation(&self) -> Operation {
        Operation::Kda { plan: self.plan() }
    }

    /// Rows that count of the step that wrote the slot which a request of a step reads; 0 for a new one.
    pub fn accepted(&self, step: usize, request: KdaRequest) -> usize {
        let Some(slot) = request.read else { return 0 };
        let earlier = self.steps[..step].iter().rev().flatten().find(|earlier| earlier.write == slot);
        earlier.map_or(0, |earlier| earlier.rows.saturating_sub(request.rejected))
    }

    /// Checks sizes, and that every request goes on from what there is.
    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        for (name, value, most) in [
            ("tp", self.tp, MAX_RANKS),
            ("dcp", self.dcp, MAX_RANKS),
            ("heads", self.heads, 1 << 10),
            ("value_heads", self.value_heads, 1 << 10),
            ("key_dim", self.key_dim, 1 << 10),
            ("value_dim", self.value_dim, 1 << 10),
            ("taps", self.taps, 16),
            ("chunk", self.chunk, 1 << 10),
            ("steps", self.steps.len(), MAX_KDA_STEPS),
        ] {
            if value == 0 || value > most {
                return fail(format!("{name} is {value}; it must be between 1 and {most}"));
            }
        }
        if !self.tp.is_multiple_of(self.dcp) {
            return fail(format!("dcp {} does not divide tp {}", self.dcp, self.tp));
        }
        if !self.value_heads.is_multiple_of(self.heads) || !self.heads.is_multiple_of(self.tp) {
            return fail(format!(
                "{} ranks do not share {} heads, or these {} value heads, evenly",
                self.tp, self.heads, self.value_heads
            ));
        }
        let mut slots = BTreeMap::new();
        let mut rows = 0usize;
        for step in &self.steps {
            let written = self.check_step(step, &slots)?;
            rows = step.iter().fold(rows, |rows, request| rows.saturating_add(request.rows));
            slots.extend(written);
        }
        if rows > MAX_STEP_ROWS {
            return fail(format!("{rows} rows; there may be {MAX_STEP_ROWS}"));
        }
        let state = self.value_heads * self.key_dim * self.value_dim;
        let row = self.value_heads * (self.key_dim + self.value_dim) + self.heads * self.key_dim;
        if state * self.plan().slots > MAX_DRAWN || row * rows > MAX_DRAWN || state * rows > 16 * MAX_DRAWN {
            return fail(format!("more than {MAX_DRAWN} elements of states or inputs"));
        }
        Ok(())
    }

    /// Checks a step, given the rows of the step that last wrote each slot; says what it writes.
    fn check_step(
        &self,
        step: &[KdaRequest],
        slots: &BTreeMap<usize, usize>,
    ) -> Result<BTreeMap<usize, usize>, CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        let mut written = BTreeMap::new();
        if step.is_empty() {
            return fail("a step has no request".to_owned());
        }
        for request in step {
            if request.write >= MAX_SLOTS || request.rows > MAX_STEP_ROWS {
                return fail(format!(
                    "a slot is beyond {MAX_SLOTS}, or a request beyond {MAX_STEP_ROWS} rows"
                ));
            }
            if written.insert(request.write, request.rows).is_some() {
                return fail(format!("two requests of a step write slot {}", request.write));
            }
            match request.read {
                None if request.rejected > 0 => return fail("a new request has no rejected rows".to_owned()),
                None => {}
                Some(slot) => match slots.get(&slot) {
                    None => return fail(format!("slot {slot} is read before anything is written there")),
                    Some(rows) if request.rejected > self.drafts.min(*rows) => {
                        return fail(format!(
                            "{} of {rows} rows are rejected; at most {} may be",
                            request.rejected, self.drafts
                        ));
                    }
                    Some(_) => {}
                },
            }
        }
        Ok(written)
    }

    /// Four parts of an id: layer, ranks, steps and pattern, such as `softplus.h2.hv4.k8.v6.t4/tp2.dcp2.c4.d3/5.n0_4.0_1.0-2w1/slow`.
    pub(crate) fn spell(&self) -> String {
        let layer = format!(
            "{}.h{}.hv{}.k{}.v{}.t{}",
            self.gate, self.heads, self.value_heads, self.key_dim, self.value_dim, self.taps
        );
        let ranks = format!("tp{}.dcp{}.c{}.d{}", self.tp, self.dcp, self.chunk, self.drafts);
        let step = |step: &Vec<KdaRequest>| step.iter().map(spell_request).collect::<Vec<_>>().join("+");
        let steps: Vec<String> = self.steps.iter().map(step).collect();
        format!("{layer}/{ranks}/{}/{}", steps.join("_"), self.pattern)
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read(layer: &str, ranks: &str, steps: &str, pattern: &str) -> Result<Self, String> {
        let layer_parts: Vec<&str> = layer.split('.').collect();
        let [gate, heads, value_heads, key_dim, value_dim, taps] = layer_parts[..] else {
            return Err(format!("{layer:?} is not GATE.hHEADS.hvVALUE_HEADS.kWIDTH.vWIDTH.tTAPS"));
        };
        let rank_parts: Vec<&str> = ranks.split('.').collect();
        let [tp, dcp, chunk, drafts] = rank_parts[..] else {
            return Err(format!("{ranks:?} is not tpRANKS.dcpSIZE.cCHUNK.dDRAFTS"));
        };
        let steps = steps.split('_').map(|step| step.split('+').map(read_request).collect());
        Ok(Self {
            gate: gate.parse()?,
            heads: keyed("h", heads)?,
            value_heads: keyed("hv", value_heads)?,
            key_dim: keyed("k", key_dim)?,
            value_dim: keyed("v", value_dim)?,
            taps: keyed("t", taps)?,
            tp: keyed("tp", tp)?,
            dcp: keyed("dcp", dcp)?,
            chunk: keyed("c", chunk)?,
            drafts: keyed("d", drafts)?,
            pattern: pattern.parse()?,
            steps: steps.collect::<Result<_, String>>()?,
        })
    }
}

/// `ROWS.nSLOT` of a new request, `ROWS.SLOT` of one that goes on in its slot; `-N` where N rows were rejected, `wSLOT` where it leaves
/// its states in another.
fn spell_request(request: &KdaRequest) -> String {
    let KdaRequest { rows, read, rejected, write } = *request;
    let Some(slot) = read else { return format!("{rows}.n{write}") };
    let rejected = if rejected > 0 { format!("-{rejected}") } else { String::new() };
    let moved = if write == slot { String::new() } else { format!("w{write}") };
    format!("{rows}.{slot}{rejected}{moved}")
}

fn read_request(text: &str) -> Result<KdaRequest, String> {
    let (rows, rest) = text.split_once('.').ok_or_else(|| format!("{text:?} is not ROWS.SLOT"))?;
    let rows = keyed("", rows)?;
    if let Some(slot) = rest.strip_prefix('n') {
        return Ok(KdaRequest { rows, read: None, rejected: 0, write: keyed("", slot)? });
    }
    let (rest, write) = match rest.split_once('w') {
        None => (rest, None),
        Some((rest, write)) => (rest, Some(keyed("", write)?)),
    };
    let (slot, rejected) = match rest.split_once('-') {
        None => (keyed("", rest)?, 0),
        Some((slot, rejected)) => (keyed("", slot)?, keyed("", rejected)?),
    };
    Ok(KdaRequest { rows, read: Some(slot), rejected, write: write.unwrap_or(slot) })
}

impl Case {
    /// A case of Kimi delta attention of the current schema version.
    pub fn kda(body: KdaCase, seed: u64) -> Self {
        Self::of(Family::Kda, Body::Kda(body), seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "kda/softplus.h2.hv4.k8.v6.t4/tp2.dcp2.c4.d3/5.n0+0.n1_4.0+1.1_1.0-2w2+2.0+3.n1/slow/7";

    #[test]
    fn an_id_and_the_json_read_back() {
        let case = Case::read_back(ID);
        case.configuration().unwrap().check().unwrap();
        let Body::Kda(body) = &case.body else { panic!("another body") };
        assert_eq!(body.plan().slots, 3);
        let accepted: Vec<usize> = body.steps[2].iter().map(|request| body.accepted(2, *request)).collect();
        assert_eq!(accepted, [2, 4, 0]);
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        for (from, to, reason) in [
            ("5.n0", "5.0", "before anything is written"),
            ("0.n1", "0.n0", "two requests of a step write slot 0"),
            ("-2w2", "-4w2", "4 of 4 rows are rejected; at most 3"),
            ("4.0+", "4.0-9+", "rejected"),
            ("dcp2", "dcp3", "does not divide"),
            ("hv4", "hv3", "evenly"),
            ("h2.", "h1.", "evenly"),
            ("t4", "t0", "taps is 0"),
            ("c4", "c0", "chunk is 0"),
            ("n1_", "n300_", "a slot is beyond"),
            ("5.n0", "5000.n0", "beyond 4096 rows"),
            ("k8", "k1024000", "key_dim"),
            ("slow", "fast", "unknown pattern"),
            ("softplus", "sigmoid", "unknown gate"),
            ("tp2.dcp2.c4.d3", "tp2.dcp2.c4", "tpRANKS.dcpSIZE"),
            ("5.n0", "5", "is not ROWS.SLOT"),
            ("/7", "", "parts between slashes"),
        ] {
            let error = ID.replacen(from, to, 1).parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{from} {to}: {error}");
        }
    }

    #[test]
    fn a_step_without_requests_is_refused() {
        let mut case: Case = ID.parse().unwrap();
        if let Body::Kda(body) = &mut case.body {
            body.steps.push(Vec::new());
        }
        assert!(case.check().unwrap_err().to_string().contains("no request"));
    }
}
