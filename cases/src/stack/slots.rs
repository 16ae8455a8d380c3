//! Slots of the states of recurrent layers, step by step: which one a request goes on from, and how many rows of it count.
//!
//! A slot that was freed last is given away first. A request that begins with a shared prefix goes on from the slot of the other one, as
//! long as that can be taken back to the end of the prefix, and leaves its own states in a slot of its own.

use std::collections::BTreeMap;

use crate::{NewTokens, SequenceCase, Step};

/// What the requests of a run read and write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StateTurn {
    /// Slot that each request goes on from; none for a new one.
    pub read: Vec<Option<usize>>,
    /// Slot that gets its states.
    pub write: Vec<usize>,
    /// Rows that count of the step that wrote the slot which it reads.
    pub accepted: Vec<usize>,
    /// Tokens that its states are made of before the run.
    pub before: Vec<usize>,
}

/// What a slot holds.
#[derive(Debug, Clone, Copy, Default)]
struct Content {
    /// Times that it was written.
    writes: usize,
    /// Tokens behind which it stands.
    end: usize,
    /// Rows of the step that wrote it.
    rows: usize,
}

/// A request between two runs.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    slot: Option<usize>,
    /// Slot whose states it begins with, as of so many writes.
    from: Option<(usize, usize)>,
    tokens: usize,
}

/// The runs of a session whose layers can take back `drafts` rows of a step.
///
/// # Errors
/// The first step that asks for a state that is not there any more.
pub fn state_turns(session: &SequenceCase, drafts: usize) -> Result<Vec<StateTurn>, String> {
    let mut allotment =
        Allotment { drafts, block: session.configuration.virtual_block_tokens(), ..Allotment::default() };
    let mut turns = Vec::new();
    for (index, step) in session.steps.iter().enumerate() {
        turns.extend(allotment.take(step).map_err(|why| format!("step {}: {why}", index + 1))?);
    }
    Ok(turns)
}

#[derive(Default)]
struct Allotment {
    drafts: usize,
    block: usize,
    free: Vec<usize>,
    contents: Vec<Content>,
    held: BTreeMap<usize, Held>,
}

impl Allotment {
    fn take(&mut self, step: &Step) -> Result<Option<StateTurn>, String> {
        match step {
            Step::Run { batch, .. } => return self.run(batch).map(Some),
            Step::Reject { request, tokens } => {
                if let Some(held) = self.held.get_mut(request) {
                    held.tokens = held.tokens.saturating_sub(*tokens);
                }
            }
            Step::Hit { request, source, blocks } => {
                let from = self.held.get(source).copied().unwrap_or_default();
                let from = from.slot.map(|slot| (slot, self.contents[slot].writes)).or(from.from);
                self.held.insert(*request, Held { slot: None, from, tokens: blocks * self.block });
            }
            Step::Free { request } => {
                let held = self.held.remove(request);
                self.free.extend(held.and_then(|held| held.slot));
            }
            Step::Evict { request } => {
                let held = self.held.insert(*request, Held::default());
                self.free.extend(held.and_then(|held| held.slot));
            }
            Step::Import { .. } => return Err("states do not come from another session".to_owned()),
        }
        Ok(None)
    }

    fn run(&mut self, batch: &[NewTokens]) -> Result<StateTurn, String> {
        let mut turn = StateTurn::default();
        for NewTokens { request, .. } in batch {
            let held = self.held.entry(*request).or_default();
            let read = match (held.slot, held.from) {
                (Some(slot), _) => Some(slot),
                (None, Some((slot, writes))) if self.contents[slot].writes == writes => Some(slot),
                (None, Some(_)) => {
                    let tokens = held.tokens;
                    return Err(format!(
                        "the states behind the {tokens} shared tokens of request {request} are gone: it must run before its source does again"
                    ));
                }
                (None, None) => None,
            };
            turn.accepted.push(match read {
                None => 0,
                Some(slot) => {
                    let Content { end, rows, .. } = self.contents[slot];
                    let back = end - held.tokens;
                    if back > self.drafts.min(rows) {
                        return Err(format!(
                            "request {request} goes back {back} of {rows} rows; at most {} can be taken back (u)",
                            self.drafts
                        ));
                    }
                    rows - back
                }
            });
            turn.before.push(held.tokens);
            turn.read.push(read);
            if held.slot.is_none() {
                held.slot = Some(self.free.pop().unwrap_or(self.contents.len()));
                self.contents.resize(
                    self.contents.len().max(held.slot.map_or(0, |slot| slot + 1)),
                    Content::default(),
                );
            }
            held.from = None;
            turn.write.extend(held.slot);
        }
        for (NewTokens { request, tokens }, slot) in batch.iter().zip(&turn.write) {
            if let Some(held) = self.held.get_mut(request) {
                held.tokens += tokens;
                let writes = self.contents[*slot].writes + 1;
                self.contents[*slot] = Content { writes, end: held.tokens, rows: *tokens };
            }
        }
        Ok(turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Body, Case};

    fn played(steps: &str, drafts: usize) -> Result<Vec<StateTurn>, String> {
        let id = format!("sequence/tiny-mla/tp2.dcp2.h1.s1.b4.n40.bf16.ag_rs/slots/{steps}/0");
        let Body::Sequence(session) = id.parse::<Case>().unwrap().body else { panic!("another body") };
        state_turns(&session, drafts)
    }

    #[test]
    fn a_request_goes_on_behind_the_rows_that_were_accepted() {
        let turns = played("v0+5,1+2_v0+4,1+0_r0-3_d0,1", 3).unwrap();
        assert_eq!(turns[0].read, [None, None]);
        assert_eq!(turns[1].accepted, [5, 2]);
        assert_eq!((&turns[2].accepted[..], &turns[2].before[..]), (&[1, 0][..], &[6, 2][..]));
        assert_eq!(turns[2].read, [Some(0), Some(1)]);
    }

    #[test]
    fn a_shared_prefix_is_read_in_the_slot_of_the_other_and_left_in_a_slot_of_its_own() {
        let turns = played("v0+17_h1=0x2_v1+3,0+1_d1", 1).unwrap();
        assert_eq!(turns[1].read, [Some(0), Some(0)]);
        assert_eq!(turns[1].write, [1, 0]);
        assert_eq!((&turns[1].accepted[..], &turns[1].before[..]), (&[16, 17][..], &[16, 17][..]));
        assert_eq!(turns[2].read, [Some(1)]);
    }

    #[test]
    fn slots_of_freed_and_evicted_requests_go_to_the_next_new_one() {
        let turns = played("v0+5,1+2_f0_v2+3_e1_v3+1_v1+2", 0).unwrap();
        assert_eq!((turns[1].read[0], turns[1].write[0]), (None, 0));
        assert_eq!((turns[2].read[0], turns[2].write[0]), (None, 1));
        assert_eq!((turns[3].read[0], turns[3].write[0], turns[3].before[0]), (None, 2, 0));
    }

    #[test]
    fn a_state_that_is_gone_is_named() {
        for (steps, reason) in [
            ("v0+8_r0-3_d0", "step 3: request 0 goes back 3 of 8 rows"),
            ("d0_d0_r0-2_d0", "step 4: request 0 goes back 2 of 1 rows"),
            ("v0+8_h1=0x1_d0_d1", "step 4: the states behind the 8 shared tokens"),
            ("v0+8_h1=0x1_f0_v2+3_d1", "step 5: the states behind"),
        ] {
            let why = played(steps, 2).unwrap_err();
            assert!(why.contains(reason), "{steps}: {why}");
        }
    }
}
