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
    match attributed(laboratory) {
        Ok(rows) if rows.is_empty() => {
            vec!["tokens: every row counts its own tokens, each once, when values spell them".to_owned()]
        }
        Ok(rows) => {
            let mut lines: Vec<String> =
                rows.iter().take(MOST_SENTENCES).map(|row| format!("tokens: {}", row.sentence)).collect();
            if rows.len() > MOST_SENTENCES {
                lines.push(format!("tokens: {} more rows", rows.len() - MOST_SENTENCES));
            }
            lines
        }
        Err(Halt::Engine(status, text)) => {
            vec![format!("tokens: not read, the engine ended with {}: {text}", status.name())]
        }
        Err(Halt::Unsupported(why) | Halt::Inconclusive(why)) => vec![format!("tokens: not read: {why}")],
        Err(Halt::Broken(failure)) => vec![format!("tokens: not read: {}", failure.headline)],
    }
}

/// A row that does not see its tokens.
pub(crate) struct Attributed {
    pub sentence: String,
}

fn attributed(laboratory: &Laboratory) -> Result<Vec<Attributed>, Halt> {
    let bench = Bench::new(laboratory)?;
    let reading = bench.tokens()?;
    Ok(read(&bench, &reading))
}

/// Rows of a P1 reading that do not see their tokens.
pub(crate) fn read(bench: &Bench, reading: &Reading) -> Vec<Attributed> {
    let tables = bench.tables();
    let decoder = bench.decoder(&tables);
    let mut rows = Vec::new();
    for (row, sight) in bench.sights.iter().enumerate() {
        let Some(sight) = *sight else { continue };
        let right = Tally::prefix(&bench.code, sight.request, sight.visible);
        let states: Vec<usize> =
            (0..reading.states()).filter(|state| reading.row_of(*state) == row).collect();
        // heads see the same tokens: outputs that are alike are read once
        let mut known: Vec<(usize, Option<Attribution>)> = Vec::new();
        for state in &states {
            let alike = |(other, _): &&(usize, Option<Attribution>)| {
                reading.state(*other) == reading.state(*state) && reading.lse[*other] == reading.lse[*state]
            };
            if known.iter().find(alike).is_none() {
                known.push((*state, decoder.decode_against(sight, &right, &reading.seen(*state))));
            }
        }
        let right_somewhere = known.iter().any(|(_, attribution)| attribution.is_none());
        if let Some((_, Some(attribution))) = known.iter().find(|(_, attribution)| attribution.is_some()) {
            rows.push((sight, attribution.clone(), right_somewhere));
        }
    }
    let refined = refine(bench, &mut rows);
    if let Err(Halt::Engine(..)) = refined {
        // the first reading stands
    }
    rows.into_iter()
        .map(|(sight, attribution, right_somewhere)| {
            let mut sentence = attribution.sentence(&bench.code, sight);
            if right_somewhere {
                sentence.push_str(" (on some heads; on others it sees its own)");
            }
            Attributed { sentence }
        })
        .collect()
}

/// What one dimension of a reading token by token counts.
enum Group {
    Token(Token),
    Request(usize),
    Block(usize),
}

/// Reads rows of the first request with an unexplained row token by token, where it is short enough.
fn refine(bench: &Bench, rows: &mut [(Sight, Attribution, bool)]) -> Result<(), Halt> {
    let unexplained = |attribution: &Attribution| attribution.kind() == AttributionKind::Unexplained;
    let Some(request) = rows.iter().find(|row| unexplained(&row.1)).map(|row| row.0.request) else {
        return Ok(());
    };
    let (code, span) = (&bench.code, bench.code.layout().virtual_block_tokens());
    let padded = bench.material.case.workload.requests[request].seq_len().div_ceil(span) * span;
    let requests = bench.material.case.workload.requests.len();
    let mut groups: Vec<Group> =
        (0..padded).map(|position| Group::Token(Token { request, position })).collect();
    groups.extend((0..requests).filter(|other| *other != request).map(Group::Request));
    groups.extend((0..code.space().blocks).map(Group::Block));
    if groups.len() > MOST_GROUPS {
        return Ok(());
    }
    let counts = count(bench, &groups)?;
    // whatever is foreign is named in a second reading
    let mut foreign: Vec<Group> = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        let counted = counts.iter().any(|state| state.get(index).is_some_and(|count| *count > 0));
        match group {
            Group::Request(other) if counted => foreign.extend(
                (0..bench.material.case.workload.requests[*other].seq_len().div_ceil(span) * span)
                    .map(|position| Group::Token(Token { request: *other, position })),
            ),
            Group::Block(block) if counted => foreign.extend(
                (0..code.layout().world())
                    .flat_map(|rank| (0..code.layout().block()).map(move |offset| (rank, offset)))
                    .map(|(rank, offset)| Group::Token(code.slot(rank, *block, offset))),
            ),
            _ => {}
        }
    }
    if foreign.len() > MOST_GROUPS {
        return Ok(());
    }
    let others = if foreign.is_empty() { Vec::new() } else { count(bench, &foreign)? };
    for (row, sight) in bench.sights.iter().enumerate() {
        let Some(at) = rows.iter().position(|(other, attribution, _)| {
            Some(*other) == *sight && other.request == request && unexplained(attribution)
        }) else {
            continue;
        };
        let seen = |counts: &[Vec<usize>], groups: &[Group]| -> Vec<(Token, usize)> {
            let tokens = groups.iter().zip(counts.get(row).into_iter().flatten());
            let single = tokens.filter_map(|(group, count)| match group {
                Group::Token(token) => Some((*token, *count)),
                _ => None,
            });
            single.collect()
        };
        let mut counted = seen(&counts, &groups);
        counted.extend(seen(&others, &foreign));
        if let Some(set) = wrong_set(&counted, rows[at].0) {
            rows[at].1 = set;
        }
    }
    Ok(())
}

/// How often each row counted each group, by its first state: nothing for rows that do not count in whole numbers.
fn count(bench: &Bench, groups: &[Group]) -> Result<Vec<Vec<usize>>, Halt> {
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
    Ok((0..reading.rows)
        .map(|row| {
            // the row on the first rank, its first head
            let state = row * reading.heads;
            let tokens = reading.lse[state].exp().round();
            let counts: Vec<f64> = reading.state(state).iter().map(|share| share * tokens).collect();
            let whole = counts.iter().all(|count| (count - count.round()).abs() < 0.3);
            if whole {
                counts.iter().map(|count| count.round().max(0.0) as usize).collect()
            } else {
                Vec::new()
            }
        })
        .collect())
}

/// What is missing and what is too much; `None` where nothing is.
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
