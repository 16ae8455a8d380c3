//! Ranks of prefill context parallelism in a stack: which of a step's rows are a prompt's, and what goes together.

use shardcheck_engine::{PcpDecodes, PcpStrategy, StackPcp};

use super::script::Script;
use super::{StackCase, StackTurn};
use crate::tokens::Tokens;
use crate::{CaseError, RunKind, Turn};

/// Most ranks.
const MAX_STACK_PCP: usize = 8;

/// Reads what [`StackCase::spell_pcp`] wrote.
pub(super) fn read(tokens: &mut Tokens) -> Result<Option<StackPcp>, String> {
    let Some(world) = tokens.take_number("pcp") else { return Ok(None) };
    let strategy = tokens.need("strategy of pcp", &PcpStrategy::ALL, PcpStrategy::name)?;
    let decodes = tokens.need("word for decodes", &PcpDecodes::ALL, PcpDecodes::name)?;
    Ok(Some(StackPcp { world, strategy, decodes, merged: tokens.take_flag("merged") }))
}

/// Whether the rows of a run are a prompt's: those of a step of any number of rows in which no drafts are verified.
fn is_prompt(kind: RunKind, verifies: bool) -> bool {
    kind == RunKind::Verify && !verifies
}

impl StackTurn {
    /// Whether the rows of each request are a prompt's, which ranks of prefill context parallelism share out by another rule.
    pub fn prefills(&self) -> Vec<bool> {
        vec![is_prompt(self.turn.kind, self.verifies); self.turn.requests.len()]
    }
}

impl StackCase {
    /// Last part of a stack's id before its session, such as `.pcp2.zigzag.replicated.merged`.
    pub(super) fn spell_pcp(&self) -> String {
        let Some(StackPcp { world, strategy, decodes, merged }) = self.pcp else { return String::new() };
        format!(".pcp{world}.{strategy}.{decodes}{}", if merged { ".merged" } else { "" })
    }

    /// Checks the ranks, and the runs of the session for them.
    pub(super) fn check_pcp(&self, turns: &[Turn], script: &Script) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        let Some(StackPcp { world, strategy, decodes, merged }) = self.pcp else { return Ok(()) };
        if !(2..=MAX_STACK_PCP).contains(&world) {
            return fail(format!("pcp is {world}; it must be between 2 and {MAX_STACK_PCP}, or left out"));
        }
        let goes_with = match strategy {
            PcpStrategy::RoundRobin => decodes != PcpDecodes::Owned,
            PcpStrategy::HeadTailOrWhole | PcpStrategy::Zigzag => decodes == PcpDecodes::Replicated,
            PcpStrategy::HeadTail | PcpStrategy::Contiguous => decodes != PcpDecodes::Split,
        };
        if !goes_with {
            let words = match strategy {
                PcpStrategy::RoundRobin => "replicated or split ones",
                PcpStrategy::HeadTailOrWhole | PcpStrategy::Zigzag => "replicated ones",
                PcpStrategy::HeadTail | PcpStrategy::Contiguous => "replicated or owned ones",
            };
            return fail(format!("strategy {strategy} does not go with {decodes} decodes, but with {words}"));
        }
        if merged && self.mixture.is_none() {
            return fail("experts are merged over pcp, and there are none (e)".to_owned());
        }
        let shortest = 2 * world;
        for (index, turn) in turns.iter().enumerate().filter(|_| strategy == PcpStrategy::Zigzag) {
            let verifies = script.runs.get(index).is_some_and(|run| run.verifies);
            let mut rows = turn.requests.iter().zip(&turn.new_tokens);
            let short = rows.find(|(_, rows)| (1..shortest).contains(*rows));
            if let Some((request, rows)) = short.filter(|_| is_prompt(turn.kind, verifies)) {
                return fail(format!(
                    "step {}: zigzag over {world} ranks takes prompts without rows or with {shortest} and more; request {request} has {rows}",
                    turn.step + 1
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Body, Case};

    const ID: &str = "stack/l2.h24.i20.v37.sharded.e6.k2.d1.pcp2.head_tail.replicated.merged/tiny-mla/tp2.dcp2.h1.s2.b4.n9.bf16.a2a.hi_lo/drafts/v0+9,1+3_d0,1/7";

    #[test]
    fn an_id_reads_back_with_its_ranks() {
        let case = Case::read_back(ID);
        let Body::Stack(body) = &case.body else { panic!("another body") };
        let pcp = body.plan().pcp.unwrap();
        assert_eq!((pcp.world, pcp.strategy, pcp.merged), (2, PcpStrategy::HeadTail, true));
        let inputs = crate::generate_stack(body, 7).unwrap();
        assert_eq!(inputs.turns.iter().map(StackTurn::prefills).collect::<Vec<_>>(), [[true; 2], [false; 2]]);
    }

    #[test]
    fn drafts_are_no_rows_of_a_prompt() {
        let case = "stack/l2.h40.i9.v8.whole.wired.m3.r2.pcp2.head_tail.replicated/tiny-mla/mla24+8v12.tp2.dcp2.h1.s1.b2.n40.bf16.ag_rs/drafts/v0+5,1+6/7";
        let case = case.parse::<Case>().unwrap_or_else(|error| panic!("{error}"));
        let Body::Stack(body) = &case.body else { panic!("another body") };
        let inputs = crate::generate_stack(body, 7).unwrap();
        let prefills: Vec<Vec<bool>> = inputs.turns.iter().map(StackTurn::prefills).collect();
        assert_eq!(prefills, [[true; 2], [false; 2], [false; 2]]);
    }

    #[test]
    fn a_row_without_drafts_beside_rows_with_some_is_no_prompt() {
        let case = "stack/l2.h40.i9.v8.whole.wired.m1.r1.pcp2.round_robin.replicated/tiny-mla/mla24+8v12.tp1.dcp1.h1.s1.b4.n120.bf16.ag_rs/x/v0+3,1+3,2+3/1";
        let Body::Stack(body) = case.parse::<Case>().unwrap().body else { panic!("another body") };
        let inputs = crate::generate_stack(&body, 1).unwrap();
        assert!(inputs.turns[1].drafted.contains(&0) && inputs.turns[1].drafted.contains(&1));
        assert_eq!(inputs.turns[1].prefills(), [false; 3]);
    }

    #[test]
    fn a_session_of_padding_alone_has_a_position_for_it() {
        let case = "stack/l2.h20.i14.v19.whole/tiny-mla/tp2.dcp2.h1.s1.b4.bf16.ag_rs/x/d0+0.pad4/1";
        let Body::Stack(body) = case.parse::<Case>().unwrap().body else { panic!("another body") };
        let inputs = crate::generate_stack(&body, 1).unwrap();
        assert_eq!(inputs.weights.get("rotary").unwrap().shape()[0], 1);
    }

    #[test]
    fn ranks_that_can_not_be_are_refused_with_the_reason() {
        for (from, to, reason) in [
            ("pcp2", "pcp1", "pcp is 1"),
            ("pcp2", "pcp9", "between 2 and 8"),
            ("head_tail.", "", "strategy of pcp is missing"),
            ("head_tail.replicated", "head_tail.split", "does not go with"),
            (
                "head_tail",
                "zigzag",
                "step 1: zigzag over 2 ranks takes prompts without rows or with 4 and more; request 1 has 3",
            ),
            (".e6.k2.d1", "", "experts are merged"),
        ] {
            let error = ID.replacen(from, to, 1).parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{from} {to}: {error}");
        }
    }
}
