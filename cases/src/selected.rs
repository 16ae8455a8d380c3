//! Selected tokens of attention cases: which of the tokens that a row sees it attends to.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{Configuration, Operation, SlotList, vocabulary};

use crate::check::elements;
use crate::inputs::blocks::place;
use crate::sparse::MAX_TOP_K;
use crate::stream::Stream;
use crate::tokens::Tokens;
use crate::{CaseError, MAX_ELEMENTS, Workload};

/// Of so many rows, one attends to no token where rows are ragged.
const EMPTY_ROWS: u64 = 3;

vocabulary! {
    /// Which of the tokens that it sees a row attends to. They are listed in an order of no meaning, other than by position.
    TokenChoice ("choice of tokens") {
        /// Any k of them, or all where they are fewer.
        Random = "random",
        /// Any number of them up to k; a third of the rows attend to none.
        Ragged = "ragged",
        /// The newest k, the newest first, as a window would.
        Newest = "newest",
        /// Those of one rank alone: all others own nothing of any row.
        OneRank = "one_rank",
    }
}

/// Which tokens the rows of a batch attend to, and how a rank lists their slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectedTokens {
    /// Most tokens k of a row.
    pub top_k: usize,
    /// How a rank lists the slots of those that it owns.
    pub list: SlotList,
    /// Which tokens they are.
    pub choice: TokenChoice,
}

impl SelectedTokens {
    /// The step.
    pub fn operation(&self) -> Operation {
        Operation::AttendSelected { list: self.list, shared: false }
    }

    /// Positions that each row attends to, in the order in which they are given; none for padding.
    pub fn draw(&self, workload: &Workload, configuration: &Configuration, seed: u64) -> Vec<Vec<usize>> {
        let mut drawn = Stream::Selected.counter(seed);
        let owner = drawn.below(configuration.dcp as u64) as usize;
        let of_row = |row: Option<(usize, usize)>| {
            let Some((request, t)) = row else { return Vec::new() };
            let seen = workload.requests[request].context_tokens + t + 1;
            let mut pool: Vec<usize> = match self.choice {
                TokenChoice::Newest => return (0..seen).rev().take(self.top_k).collect(),
                TokenChoice::OneRank => {
                    (0..seen).filter(|position| place(configuration, *position).owner == owner).collect()
                }
                TokenChoice::Random | TokenChoice::Ragged => (0..seen).collect(),
            };
            let most = self.top_k.min(pool.len());
            let count = match self.choice {
                TokenChoice::Ragged if drawn.below(EMPTY_ROWS) == 0 => 0,
                TokenChoice::Ragged => drawn.below(most as u64 + 1) as usize,
                _ => most,
            };
            for index in 0..count {
                let other = index + drawn.below((pool.len() - index) as u64) as usize;
                pool.swap(index, other);
            }
            pool.truncate(count);
            pool
        };
        workload.rows().into_iter().map(of_row).collect()
    }

    pub(crate) fn check(&self, configuration: &Configuration, workload: &Workload) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        if self.top_k == 0 || self.top_k > MAX_TOP_K {
            return fail(format!("k is {}; it must be between 1 and {MAX_TOP_K}", self.top_k));
        }
        if !configuration.attention.is_mla() {
            return fail("attention to selected tokens is that of MLA".to_owned());
        }
        if workload.chunk_budget_tokens > 0 {
            return fail("attention to selected tokens has no chunk budget".to_owned());
        }
        let extents = [configuration.tp, workload.total_rows(), self.top_k];
        if elements(&extents) > MAX_ELEMENTS {
            return fail(format!("lists of shape {extents:?} have more than 2^31 entries"));
        }
        Ok(())
    }

    /// One part of an id, such as `k8.packed.ragged`.
    pub(crate) fn spell(&self) -> String {
        format!("k{}.{}.{}", self.top_k, self.list, self.choice)
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let mut tokens = Tokens::split(text);
        let own = Self {
            top_k: tokens.need_number("k")?,
            list: tokens.need("list", &SlotList::ALL, SlotList::name)?,
            choice: tokens.need("choice", &TokenChoice::ALL, TokenChoice::name)?,
        };
        tokens.finish()?;
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Body, Case};

    const CASE: &str = "attend_selected/tiny-mla/tp4.dcp2.h2.s2.b8.n14.bf16.a2a.hi_lo/40+3_0+0_7+2.pad2.shuf/k8.packed.random/gaussian/7";

    fn drawn(id: &str) -> (Vec<Vec<usize>>, Configuration) {
        let case: Case = id.parse().unwrap_or_else(|error| panic!("{error}"));
        let Body::Attention(body) = case.body else { panic!("{id} is no attention") };
        let selected = body.selected.unwrap();
        (selected.draw(&body.workload, &body.configuration, case.seed), body.configuration)
    }

    #[test]
    fn an_id_and_the_json_read_back() {
        for choice in TokenChoice::ALL {
            for list in SlotList::ALL {
                let id = CASE.replace("packed", list.name()).replace("random", choice.name());
                let case: Case = id.parse().unwrap();
                assert_eq!(case.id(), id);
                assert_eq!(Case::from_json(&case.to_json()).unwrap(), case);
                assert_eq!(case.operation(), Some(Operation::AttendSelected { list, shared: false }));
            }
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        for (part, other, reason) in [
            ("k8", "k0", "k is 0"),
            ("packed", "ragged", "list"),
            ("random", "first", "choice"),
            (".shuf", ".shuf.c4", "chunk budget"),
            ("tiny-mla", "tiny-gqa", "MLA"),
            ("/k8.packed.random", "", "selected tokens"),
            ("attend_selected", "verify", "parts between slashes"),
        ] {
            let error = CASE.replace(part, other).parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{part} → {other}: {error}");
        }
        let plain = "verify/tiny-mla/tp2.dcp2.h2.s2.b8.n8.bf16.a2a.hi_lo/7+2.seq/gaussian/7".parse::<Case>();
        let json = plain.unwrap().to_json();
        let error = Case::from_json(&json.replace("\"verify\"", "\"attend_selected\"")).unwrap_err();
        assert!(error.to_string().contains("selected tokens"), "{error}");
    }

    #[test]
    fn a_row_attends_to_different_tokens_that_it_sees_and_padding_to_none() {
        for choice in TokenChoice::ALL {
            let (rows, configuration) = drawn(&CASE.replace("random", choice.name()));
            assert_eq!(rows.len(), 7, "five rows of requests and two of padding");
            assert!(rows[5].is_empty() && rows[6].is_empty());
            for (row, bound) in [41, 42, 43, 8, 9].into_iter().enumerate() {
                let mut own = rows[row].clone();
                own.sort_unstable();
                assert!(own.windows(2).all(|pair| pair[0] < pair[1]) && own.last() < Some(&bound));
                let owners = own.iter().map(|position| position / configuration.interleave % 2);
                match choice {
                    TokenChoice::Random => assert_eq!(own.len(), 8),
                    TokenChoice::Newest => assert!(own.into_iter().eq(bound - 8..bound)),
                    TokenChoice::OneRank => {
                        assert_eq!(owners.collect::<std::collections::HashSet<_>>().len(), 1)
                    }
                    TokenChoice::Ragged => assert!(own.len() <= 8),
                }
            }
        }
        let many = CASE.replace("40+3_0+0_7+2", "0+60").replace("random", "ragged");
        let counts: Vec<usize> = drawn(&many).0[..60].iter().map(Vec::len).collect();
        assert!(
            counts.contains(&0) && counts.contains(&8) && counts.iter().filter(|n| **n == 0).count() < 40
        );
    }
}
