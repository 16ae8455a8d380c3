//! What is wrong with the set of tokens that a row attended to, in one sentence.

use std::fmt::{self, Write as _};
use std::ops::Range;
use std::str::FromStr;

use super::code::{Code, Token};
use crate::layout::Layout;

/// A page: `B` local tokens of a request, on one rank or, as one entry of a block table, on all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page {
    /// Request; [`Code::nobody`] for a physical block that belongs to none.
    pub request: usize,
    /// Entry of the request's block table; of nobody, the physical block.
    pub page: usize,
}

/// What is wrong with the tokens of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribution {
    /// One token is missing.
    Lost(Token),
    /// One token counts twice.
    Doubled(Token),
    /// A token counts that the row may not see: beyond its edge, of another request, or of nobody.
    Foreign(Token),
    /// A token is missing and another one counts in its place. `among` pairs have the same sum; these are the closest.
    Exchanged {
        /// The missing token.
        lost: Token,
        /// The token that counts once too often.
        counted: Token,
        /// Pairs that cannot be told apart: 1 where it is this one for certain.
        among: usize,
    },
    /// The row sees the first tokens of its request, but too few.
    PrefixShort {
        /// Tokens seen.
        seen: usize,
    },
    /// The row sees tokens behind its edge.
    PrefixLong {
        /// Tokens seen.
        seen: usize,
    },
    /// Ranks see the first of their own tokens, but the wrong number of them.
    WrongShares {
        /// Tokens seen of each rank.
        seen: Vec<usize>,
    },
    /// Nothing of a rank counts.
    RankMissing {
        /// Rank within its group.
        rank: usize,
    },
    /// The tokens of a page are missing.
    PageLost {
        /// The page.
        page: Page,
        /// The rank that lost it; `None` for all.
        rank: Option<usize>,
    },
    /// The tokens of another page count in place of a page's own.
    PageAliased {
        /// The page that is missing.
        page: Page,
        /// The page that was read.
        read: Page,
        /// The rank that read it; `None` for all.
        rank: Option<usize>,
    },
    /// The row sees what a row of another request has to see, or nothing where it has to see something.
    RowMisplaced {
        /// The request whose tokens it sees; `None` for none.
        request: Option<usize>,
        /// How many.
        seen: usize,
    },
    /// The row sees what it would see if tokens were dealt in other runs.
    WrongInterleave {
        /// The interleave size that explains it.
        interleave: usize,
    },
    /// The right tokens of every rank count, but a rank's weight in the merge is wrong.
    WrongWeights {
        /// Weight of each rank as seen.
        seen: Vec<f64>,
    },
    /// Read token by token: what is missing and what counts too often.
    WrongSet {
        /// Missing tokens.
        lost: Vec<Token>,
        /// Tokens that count more often than they should, and how often too many.
        extra: Vec<(Token, usize)>,
    },
    /// The output is NaN or infinite.
    NotFinite,
    /// No set that was tried has these sums.
    Unexplained {
        /// Tokens that the LSE counts, where it tells.
        tokens: Option<usize>,
    },
}

/// Kinds of [`Attribution`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AttributionKind {
    /// [`Attribution::Lost`].
    Lost,
    /// [`Attribution::Doubled`].
    Doubled,
    /// [`Attribution::Foreign`].
    Foreign,
    /// [`Attribution::Exchanged`].
    Exchanged,
    /// [`Attribution::PrefixShort`].
    PrefixShort,
    /// [`Attribution::PrefixLong`].
    PrefixLong,
    /// [`Attribution::WrongShares`].
    WrongShares,
    /// [`Attribution::RankMissing`].
    RankMissing,
    /// [`Attribution::PageLost`].
    PageLost,
    /// [`Attribution::PageAliased`].
    PageAliased,
    /// [`Attribution::RowMisplaced`].
    RowMisplaced,
    /// [`Attribution::WrongInterleave`].
    WrongInterleave,
    /// [`Attribution::WrongWeights`].
    WrongWeights,
    /// [`Attribution::WrongSet`].
    WrongSet,
    /// [`Attribution::NotFinite`].
    NotFinite,
    /// [`Attribution::Unexplained`].
    Unexplained,
}

impl AttributionKind {
    /// All kinds, in a stable order.
    pub const ALL: [Self; 16] = [
        Self::Lost,
        Self::Doubled,
        Self::Foreign,
        Self::Exchanged,
        Self::PrefixShort,
        Self::PrefixLong,
        Self::WrongShares,
        Self::RankMissing,
        Self::PageLost,
        Self::PageAliased,
        Self::RowMisplaced,
        Self::WrongInterleave,
        Self::WrongWeights,
        Self::WrongSet,
        Self::NotFinite,
        Self::Unexplained,
    ];

    /// Name as it stands in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "token lost",
            Self::Doubled => "token doubled",
            Self::Foreign => "foreign token",
            Self::Exchanged => "token exchanged",
            Self::PrefixShort => "prefix too short",
            Self::PrefixLong => "prefix too long",
            Self::WrongShares => "wrong local lengths",
            Self::RankMissing => "rank missing",
            Self::PageLost => "page lost",
            Self::PageAliased => "page aliased",
            Self::RowMisplaced => "row misplaced",
            Self::WrongInterleave => "wrong interleave",
            Self::WrongWeights => "wrong weights",
            Self::WrongSet => "wrong set",
            Self::NotFinite => "not finite",
            Self::Unexplained => "unexplained",
        }
    }
}

impl fmt::Display for AttributionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AttributionKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            format!("unknown attribution {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// The row that an attribution is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    /// Request.
    pub request: usize,
    /// Row within the request.
    pub row: usize,
    /// Tokens that the row has to see: the first ones of its request.
    pub visible: usize,
    /// Where tokens from a position on are a part of their own beside those of the ranks: the position.
    pub beside_from: Option<usize>,
}

/// Consecutive tokens of a rank's cache that one partial result counts.
pub(super) struct Piece {
    pub rank: usize,
    /// Local indices.
    pub span: Range<usize>,
    /// Number of the partial result: the rank's, or the number of ranks for one of its own.
    pub part: usize,
}

impl Sight {
    /// Of the first `visible` tokens of a request, each of which its rank counts.
    pub fn of(request: usize, row: usize, visible: usize) -> Self {
        Self { request, row, visible, beside_from: None }
    }

    /// Partial results over a layout.
    pub(super) fn parts(self, layout: &Layout) -> usize {
        layout.world() + usize::from(self.beside_from.is_some())
    }

    /// What each of them counts.
    pub(super) fn pieces(self, layout: &Layout) -> Vec<Piece> {
        let (world, from) = (layout.world(), self.beside_from.unwrap_or(self.visible).min(self.visible));
        let piece = |rank: usize| {
            let (held, seen) = (layout.local_len(from, rank), layout.local_len(self.visible, rank));
            [Piece { rank, span: 0..held, part: rank }, Piece { rank, span: held..seen, part: world }]
        };
        (0..world).flat_map(piece).filter(|piece| !piece.span.is_empty()).collect()
    }
}

/// Most tokens that a sentence names.
const MOST_NAMED: usize = 6;

impl Attribution {
    /// The kind.
    pub fn kind(&self) -> AttributionKind {
        match self {
            Self::Lost(_) => AttributionKind::Lost,
            Self::Doubled(_) => AttributionKind::Doubled,
            Self::Foreign(_) => AttributionKind::Foreign,
            Self::Exchanged { .. } => AttributionKind::Exchanged,
            Self::PrefixShort { .. } => AttributionKind::PrefixShort,
            Self::PrefixLong { .. } => AttributionKind::PrefixLong,
            Self::WrongShares { .. } => AttributionKind::WrongShares,
            Self::RankMissing { .. } => AttributionKind::RankMissing,
            Self::PageLost { .. } => AttributionKind::PageLost,
            Self::PageAliased { .. } => AttributionKind::PageAliased,
            Self::RowMisplaced { .. } => AttributionKind::RowMisplaced,
            Self::WrongInterleave { .. } => AttributionKind::WrongInterleave,
            Self::WrongWeights { .. } => AttributionKind::WrongWeights,
            Self::WrongSet { .. } => AttributionKind::WrongSet,
            Self::NotFinite => AttributionKind::NotFinite,
            Self::Unexplained { .. } => AttributionKind::Unexplained,
        }
    }

    /// The sentence, such as `row 2 of request 5 (rank 1) lacks token 4097 and counts token 4096 twice`. The rank in
    /// parentheses is the one that owns the token concerned.
    pub fn sentence(&self, code: &Code, sight: Sight) -> String {
        let rank = match self {
            Self::Lost(token) | Self::Doubled(token) | Self::Foreign(token) => {
                Some(code.layout().owner(token.position))
            }
            Self::Exchanged { lost, .. } => Some(code.layout().owner(lost.position)),
            Self::PageLost { rank, .. } | Self::PageAliased { rank, .. } => *rank,
            _ => None,
        };
        let mut text = format!("row {} of request {}", sight.row, sight.request);
        if let Some(rank) = rank {
            let _ = write!(text, " (rank {rank})");
        }
        text.push(' ');
        text.push_str(&self.predicate(code, sight));
        text
    }

    fn predicate(&self, code: &Code, sight: Sight) -> String {
        let name = |token: &Token| name(code, sight, *token);
        match self {
            Self::Lost(token) => format!("lacks {}", name(token)),
            Self::Doubled(token) => format!("counts {} twice", name(token)),
            Self::Foreign(token) => format!("sees {}", name(token)),
            Self::Exchanged { lost, counted, among } => {
                let mut text =
                    format!("lacks {} and {}", name(lost), counted_words(code, sight, *counted, 1));
                if *among > 1 {
                    let _ = write!(text, " (or one of {} other pairs with the same signs)", among - 1);
                }
                text
            }
            Self::PrefixShort { seen } => {
                let missing = sight.visible - seen;
                let which = match missing {
                    1 => format!("token {seen} is missing"),
                    _ => format!("tokens {seen} to {} are missing", sight.visible - 1),
                };
                format!(
                    "sees the first {seen} of its {} tokens: its prefix is too short, {which}",
                    sight.visible
                )
            }
            Self::PrefixLong { seen } => {
                let which = match seen - sight.visible {
                    1 => format!("token {}", sight.visible),
                    _ => format!("tokens {} to {}", sight.visible, seen - 1),
                };
                format!("sees {seen} tokens instead of {}: its prefix is too long, by {which}", sight.visible)
            }
            Self::WrongShares { seen } => {
                format!("sees {seen:?} tokens of the ranks instead of {:?}", shares(code, sight))
            }
            Self::RankMissing { rank } => {
                let count = shares(code, sight)[*rank];
                format!("sees nothing of rank {rank}: its {count} tokens are missing")
            }
            Self::PageLost { page, .. } => format!("lacks {}", page_name(code, sight, *page)),
            Self::PageAliased { page, read, .. } => {
                format!(
                    "reads {} in place of {}",
                    page_name(code, sight, *read),
                    page_name(code, sight, *page)
                )
            }
            Self::RowMisplaced { request: Some(request), seen } => {
                format!("sees the first {seen} tokens of request {request} instead of its own")
            }
            Self::RowMisplaced { request: None, .. } => {
                format!("sees no token instead of {}", sight.visible)
            }
            Self::WrongInterleave { interleave } => {
                let own = code.layout().interleave();
                format!("sees tokens as if they were dealt in runs of {interleave} instead of {own}")
            }
            Self::WrongWeights { seen } => {
                let shares = shares(code, sight);
                let right = shares.iter().map(|n| format!("{:.3}", *n as f64 / sight.visible as f64));
                let seen = seen.iter().map(|weight| format!("{weight:.3}"));
                format!(
                    "sees its own tokens, but ranks have the weights [{}] instead of [{}]",
                    seen.collect::<Vec<_>>().join(", "),
                    right.collect::<Vec<_>>().join(", ")
                )
            }
            Self::WrongSet { lost, extra } => set_words(code, sight, lost, extra),
            Self::NotFinite => "is NaN or infinite, although all its values are finite".to_owned(),
            Self::Unexplained { tokens: Some(tokens) } => format!(
                "counts {tokens} tokens where it has to see {}, and not the right ones",
                sight.visible
            ),
            Self::Unexplained { tokens: None } => {
                format!("does not see its {} tokens, each once", sight.visible)
            }
        }
    }
}

fn shares(code: &Code, sight: Sight) -> Vec<usize> {
    (0..code.layout().world()).map(|rank| code.layout().local_len(sight.visible, rank)).collect()
}

fn name(code: &Code, sight: Sight, token: Token) -> String {
    let position = token.position;
    if token.request == code.nobody() {
        let (rank, block, offset) = code.place(token);
        format!("slot {offset} of block {block} on rank {rank}, to which no token was written")
    } else if token.request != sight.request {
        format!("token {position} of request {}", token.request)
    } else if position >= sight.visible {
        format!("token {position}, behind its edge at {}", sight.visible)
    } else {
        format!("token {position}")
    }
}

/// A token that counts `times` too often.
fn counted_words(code: &Code, sight: Sight, token: Token, times: usize) -> String {
    let own = token.request == sight.request && token.position < sight.visible;
    match (own, times) {
        (true, 1) => format!("counts {} twice", name(code, sight, token)),
        (true, _) => format!("counts {} {} times", name(code, sight, token), times + 1),
        (false, 1) => format!("counts {}", name(code, sight, token)),
        (false, _) => format!("counts {times} times {}", name(code, sight, token)),
    }
}

fn page_name(code: &Code, sight: Sight, page: Page) -> String {
    let span = code.layout().virtual_block_tokens();
    let first = page.page * span;
    if page.request == code.nobody() {
        format!("block {}, which belongs to no request", page.page)
    } else if page.request == sight.request {
        format!("page {} (tokens {first} to {})", page.page, first + span - 1)
    } else {
        format!("page {} of request {}", page.page, page.request)
    }
}

fn set_words(code: &Code, sight: Sight, lost: &[Token], extra: &[(Token, usize)]) -> String {
    let mut parts = Vec::new();
    if !lost.is_empty() {
        let positions: Vec<usize> = lost.iter().map(|token| token.position).collect();
        parts.push(format!("lacks {}", runs(&positions)));
    }
    let mut named: Vec<String> = extra
        .iter()
        .take(MOST_NAMED)
        .map(|(token, times)| counted_words(code, sight, *token, *times))
        .collect();
    if extra.len() > MOST_NAMED {
        named.push(format!("{} more", extra.len() - MOST_NAMED));
    }
    parts.extend(named);
    match parts.split_last() {
        Some((last, first)) if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        Some((only, _)) => only.clone(),
        None => "sees its tokens".to_owned(),
    }
}

/// Positions in words, neighbours joined: `tokens 3, 5 to 7`.
fn runs(positions: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for position in positions {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *position => *last = *position,
            _ => runs.push((*position, *position)),
        }
    }
    let mut words: Vec<String> = runs
        .iter()
        .take(MOST_NAMED)
        .map(|(first, last)| if first == last { format!("{first}") } else { format!("{first} to {last}") })
        .collect();
    if runs.len() > MOST_NAMED {
        words.push(format!("and more ({} in all)", positions.len()));
    }
    let noun = if positions.len() == 1 { "token" } else { "tokens" };
    format!("{noun} {}", words.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::probe::code::Space;

    const SIGHT: Sight = Sight { request: 5, row: 2, visible: 5000, beside_from: None };

    fn code() -> Code {
        let layout = Layout::new(8, 1, 16).unwrap();
        Code::new(Space { layout, requests: 6, tokens: 6000, blocks: 60 }, &[])
    }

    fn own(position: usize) -> Token {
        Token { request: 5, position }
    }

    #[test]
    fn an_exchange_names_row_request_rank_and_both_tokens() {
        let exchanged = Attribution::Exchanged { lost: own(4097), counted: own(4096), among: 1 };
        assert_eq!(
            exchanged.sentence(&code(), SIGHT),
            "row 2 of request 5 (rank 1) lacks token 4097 and counts token 4096 twice"
        );
    }

    #[test]
    fn foreign_tokens_say_whose_they_are() {
        let code = code();
        let sentence = |token| Attribution::Foreign(token).sentence(&code, SIGHT);
        assert_eq!(
            sentence(Token { request: 3, position: 8 }),
            "row 2 of request 5 (rank 0) sees token 8 of request 3"
        );
        assert_eq!(
            sentence(own(5001)),
            "row 2 of request 5 (rank 1) sees token 5001, behind its edge at 5000"
        );
        assert_eq!(
            sentence(code.slot(3, 40, 7)),
            "row 2 of request 5 (rank 3) sees slot 7 of block 40 on rank 3, to which no token was written"
        );
    }

    #[test]
    fn prefixes_and_pages_give_their_tokens() {
        let code = code();
        let short = Attribution::PrefixShort { seen: 4998 }.sentence(&code, SIGHT);
        assert!(short.ends_with("tokens 4998 to 4999 are missing"), "{short}");
        let long = Attribution::PrefixLong { seen: 5001 }.sentence(&code, SIGHT);
        assert!(long.ends_with("too long, by token 5000"), "{long}");
        let page = Attribution::PageLost { page: Page { request: 5, page: 2 }, rank: Some(1) };
        assert_eq!(
            page.sentence(&code, SIGHT),
            "row 2 of request 5 (rank 1) lacks page 2 (tokens 256 to 383)"
        );
    }

    #[test]
    fn local_lengths_stand_beside_the_right_ones() {
        let seen = vec![625, 625, 625, 625, 625, 625, 625, 600];
        assert_eq!(
            Attribution::WrongShares { seen }.sentence(&code(), Sight { visible: 5003, ..SIGHT }),
            "row 2 of request 5 sees [625, 625, 625, 625, 625, 625, 625, 600] tokens of the ranks instead of \
             [626, 626, 626, 625, 625, 625, 625, 625]"
        );
        let missing = Attribution::RankMissing { rank: 2 }.sentence(&code(), SIGHT);
        assert!(missing.ends_with("sees nothing of rank 2: its 625 tokens are missing"), "{missing}");
    }

    #[test]
    fn long_sets_are_cut_and_neighbours_joined() {
        let lost: Vec<Token> = [1, 2, 3, 9].map(own).to_vec();
        let extra: Vec<(Token, usize)> = (10..20).map(|position| (own(position), 2)).collect();
        let text = Attribution::WrongSet { lost, extra }.sentence(&code(), SIGHT);
        assert!(text.contains("lacks tokens 1 to 3, 9"), "{text}");
        assert!(text.contains("counts token 10 3 times"), "{text}");
        assert!(text.ends_with("and 4 more"), "{text}");
    }

    #[test]
    fn kinds_parse_back() {
        for kind in AttributionKind::ALL {
            assert_eq!(kind.name().parse::<AttributionKind>().unwrap(), kind);
        }
        assert!("lost".parse::<AttributionKind>().unwrap_err().contains("token lost"));
    }
}
