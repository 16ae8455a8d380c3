//! Which tokens a failed row attended to: the case run again with values that spell their tokens, and read back.

use shardcheck_references::probe::{Attribution, AttributionKind, Sight, Tally, Token};

use crate::laboratory::{Halt, Laboratory};
use crate::probing::{Bench, FreeSlots, Reading};

/// Most sentences of one failure.
const MOST_SENTENCES: usize = 6;
/// Most dimensions of a reading token by token.
const MOST_GROUPS: usize = 640;

/// What is wrong with the rows of a case, a sentence each; that nothing is, where their tokens are right.
pub(crate) fn sentences(laboratory: &Laboratory) -> Vec<String> {
    let read_rows = || {
        let bench = Bench::new(laboratory)?;
        let reading = bench.tokens()?;
        Ok(read(&bench, &reading))
    };
    let lines = match read_rows() {
        Ok(rows) if rows.is_empty() => {
            vec!["every row counts its own tokens, each once, when values spell them".to_owned()]
        }
        Ok(rows) => rows,
        Err(Halt::Engine(status, text)) => {
            vec![format!("not read, the engine ended with {}: {text}", status.name())]
        }
        Err(Halt::Unsupported(why) | Halt::Inconclusive(why)) => vec![format!("not read: {why}")],
        Err(Halt::Broken(failure)) => vec![format!("not read: {}", failure.headline)],
    };
    let more = lines.len().saturating_sub(MOST_SENTENCES);
    let mut lines: Vec<String> =
        lines.into_iter().take(MOST_SENTENCES).map(|line| format!("tokens: {line}")).collect();
    if more > 0 {
        lines.push(format!("tokens: {more} more rows"));
    }
    lines
}

/// A row that does not see its tokens.
struct Wrong {
    row: usize,
    sight: Sight,
    attribution: Attribution,
    /// Whether some head of the row does.
    right_somewhere: bool,
}

/// A sentence for each row of a P1 reading that does not see its tokens.
pub(crate) fn read(bench: &Bench, reading: &Reading) -> Vec<String> {
    let mut rows = wrong_rows(bench, reading);
    let unexplained = |wrong: &Wrong| wrong.attribution.kind() == AttributionKind::Unexplained;
    if let Some(request) = rows.iter().find(|wrong| unexplained(wrong)).map(|wrong| wrong.sight.request) {
        // a second reading that fails leaves what the first one gave
        let counted = count_tokens(bench, request).unwrap_or_default();
        for wrong in rows.iter_mut().filter(|wrong| unexplained(wrong) && wrong.sight.request == request) {
            if let Some(set) = counted.get(wrong.row).and_then(|counts| wrong_set(counts, wrong.sight)) {
                wrong.attribution = set;
            }
        }
    }
    let sentence = |wrong: &Wrong| {
        let mut sentence = wrong.attribution.sentence(&bench.code, wrong.sight);
        if wrong.right_somewhere {
            sentence.push_str(" (on some heads; on others it sees its own)");
        }
        sentence
    };
    rows.iter().map(sentence).collect()
}

fn wrong_rows(bench: &Bench, reading: &Reading) -> Vec<Wrong> {
    let tables = bench.tables();
    let decoder = bench.decoder(&tables);
    let mut rows = Vec::new();
    for (row, sight) in bench.sights.iter().enumerate() {
        let Some(sight) = *sight else { continue };
        let right = Tally::seen(&bench.code, sight);
        // heads see the same tokens: outputs that are alike are read once
        let mut known: Vec<(usize, Option<Attribution>)> = Vec::new();
        for state in (0..reading.states()).filter(|state| reading.row_of(*state) == row) {
            let alike = |(other, _): &(usize, Option<Attribution>)| {
                reading.state(*other) == reading.state(state) && reading.lse[*other] == reading.lse[state]
            };
            if !known.iter().any(alike) {
                known.push((state, decoder.decode_against(sight, &right, &reading.seen(state))));
            }
        }
        let right_somewhere = known.iter().any(|(_, attribution)| attribution.is_none());
        if let Some(attribution) = known.into_iter().find_map(|(_, attribution)| attribution) {
            rows.push(Wrong { row, sight, attribution, right_somewhere });
        }
    }
    rows
}

/// What one dimension of a reading token by token counts.
#[derive(Clone, Copy)]
enum Group {
    Token(Token),
    Request(usize),
    Block(usize),
}

/// Reads the rows of a request token by token, where it is short enough: of each row of the batch, how often each token
/// counts. Tokens of other requests and free slots are looked at one by one only where some count at all.
fn count_tokens(bench: &Bench, request: usize) -> Result<Vec<Vec<(Token, usize)>>, Halt> {
    let requests = bench.material.case.workload.requests.len();
    let mut groups = of_request(bench, request);
    groups.extend((0..requests).filter(|other| *other != request).map(Group::Request));
    groups.extend((0..bench.code.space().blocks).map(Group::Block));
    let counts = count(bench, &groups)?;
    let counted = |index: usize| counts.iter().any(|row| row.get(index).is_some_and(|count| *count > 0));
    let foreign: Vec<Group> = groups
        .iter()
        .enumerate()
        .filter(|(index, _)| counted(*index))
        .flat_map(|(_, group)| match group {
            Group::Token(_) => Vec::new(),
            Group::Request(other) => of_request(bench, *other),
            Group::Block(block) => of_block(bench, *block),
        })
        .collect();
    let others = count(bench, &foreign)?;
    let single = |groups: &[Group], counts: &[usize]| -> Vec<(Token, usize)> {
        let tokens = groups.iter().zip(counts);
        tokens.filter_map(|(group, count)| Some((group.token()?, *count))).collect()
    };
    let row = |index: usize| {
        let mut tokens = single(&groups, &counts[index]);
        tokens.extend(others.get(index).map(|counts| single(&foreign, counts)).unwrap_or_default());
        tokens
    };
    Ok((0..counts.len()).map(row).collect())
}

impl Group {
    fn token(self) -> Option<Token> {
        match self {
            Self::Token(token) => Some(token),
            Self::Request(_) | Self::Block(_) => None,
        }
    }
}

/// The positions of a request, those behind its length in its last block included.
fn of_request(bench: &Bench, request: usize) -> Vec<Group> {
    let span = bench.code.layout().virtual_block_tokens();
    let tokens = bench.material.case.workload.requests[request].seq_len().div_ceil(span) * span;
    (0..tokens).map(|position| Group::Token(Token { request, position })).collect()
}

/// The slots of a physical block on every rank.
fn of_block(bench: &Bench, block: usize) -> Vec<Group> {
    let layout = bench.code.layout();
    let slots = (0..layout.world()).flat_map(|rank| (0..layout.block()).map(move |offset| (rank, offset)));
    slots.map(|(rank, offset)| Group::Token(bench.code.slot(rank, block, offset))).collect()
}

/// How often each row counted each group, by its first state: nothing for rows that do not count in whole numbers, and for
/// all where there are too many groups.
fn count(bench: &Bench, groups: &[Group]) -> Result<Vec<Vec<usize>>, Halt> {
    if groups.is_empty() || groups.len() > MOST_GROUPS {
        return Ok(Vec::new());
    }
    let nobody = bench.code.nobody();
    let value = |token: Token, dim: usize| {
        let counts = match &groups[dim] {
            Group::Token(single) => *single == token,
            Group::Request(request) => *request == token.request,
            Group::Block(block) => token.request == nobody && bench.code.place(token).1 == *block,
        };
        f32::from(u8::from(counts))
    };
    let reading = bench.launched(groups.len(), FreeSlots::Spelt, &value, &|_, _| {}, &|_, _, _| {})?;
    let row = |row: usize| {
        // the row on the first rank, its first head
        let state = row * reading.heads;
        let tokens = reading.lse[state].exp().round();
        let counts: Vec<f64> = reading.state(state).iter().map(|share| share * tokens).collect();
        let whole = counts.iter().all(|count| (count - count.round()).abs() < 0.3);
        let counts = counts.into_iter().filter(|_| whole);
        counts.map(|count| count.round().max(0.0) as usize).collect()
    };
    Ok((0..reading.rows).map(row).collect())
}

/// What is missing and what is too much; `None` where nothing is, or nothing was counted.
fn wrong_set(counted: &[(Token, usize)], sight: Sight) -> Option<Attribution> {
    let own = |token: &Token| token.request == sight.request && token.position < sight.visible;
    let lost: Vec<Token> =
        counted.iter().filter(|(token, count)| own(token) && *count == 0).map(|(token, _)| *token).collect();
    let extra: Vec<(Token, usize)> = counted
        .iter()
        .map(|(token, count)| (*token, count - usize::from(own(token)).min(*count)))
        .filter(|(_, count)| *count > 0)
        .collect();
    (!lost.is_empty() || !extra.is_empty()).then_some(Attribution::WrongSet { lost, extra })
}

#[cfg(test)]
mod tests;
