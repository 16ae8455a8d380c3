//! Weights that are laid out, so that what a whole run must give is known however long it is and however it is rounded.
//!
//! The stream is five blocks of one length: a constant, the row's token, the token before it, older ones, and the answer. A token is a row of
//! a Hadamard matrix. The first layer finds the position before its own, by the turn of its rotary part alone; the last one finds
//! the token that stood behind the same token before, by content, or a text's first token where there was none; those between find all
//! rows with the row's own token. An MLP, or an expert, looks a block up: one inner element a token. Heads share the elements of a token out, so that none may be missing.

use shardcheck_engine::Attention;

use super::script::MISTAKEN;
use super::{StackCase, THETA};
use crate::sequence::MAX_STEPS;

/// Blocks of the stream.
const BLOCKS: usize = 5;
const CONSTANT: usize = 0;
const TOKEN: usize = 1;
const BEFORE: usize = 2;
const OLDER: usize = 3;
const ANSWER: usize = 4;

/// Lead of the found token over the others, in units of a score, where a content is looked for.
const CONTENT_LEAD: f64 = 200.0;
/// Lead of the first token of a text over the others, for rows whose token was not there before: half of that of a found one.
const FIRST_LEAD: f64 = CONTENT_LEAD / 2.0;
/// Factor of the cosines by which a position is found: the second nearest is a fifth of it behind.
const POSITION_FACTOR: f64 = 200.0;
/// Steepness of a look-up: an inner element of another token is `silu(−LOOK_UP / 2)`.
const LOOK_UP: f64 = 16.0;

/// Size of the constant: the larger, the less a norm moves by what other blocks are off.
const STEADY: f64 = 8.0;

/// A matrix of weights, row by row.
struct Matrix {
    values: Vec<f64>,
    width: usize,
}

impl Matrix {
    fn new(rows: usize, width: usize) -> Self {
        Self { values: vec![0.0; rows * width], width }
    }

    fn set(&mut self, row: usize, column: usize, value: f64) {
        self.values[row * self.width + column] = value;
    }
}

/// Largest power of two that is not above a number; 0 of 0.
fn power_of_two(most: usize) -> usize {
    match most {
        0 => 0,
        most => 1 << most.ilog2(),
    }
}

/// Elements of a token's code: a latent holds two of them and one element more.
fn code_length(case: &StackCase) -> usize {
    power_of_two(case.configuration().attention.value_dim().saturating_sub(1) / 2)
}

/// Sign of an element of a token's code.
fn sign(token: usize, element: usize) -> f64 {
    if (token & element).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// Checks that a case has room for weights that are laid out.
///
/// # Errors
/// What is missing.
pub(super) fn check(case: &StackCase) -> Result<(), String> {
    let (length, configuration) = (code_length(case), case.configuration());
    let parts = length.div_ceil(configuration.total_heads().max(1));
    let is_half = configuration.kv_dtype == shardcheck_formats::Dtype::Bf16;
    let wiring = case.wiring.unwrap_or(super::StackWiring { drafts: 0, rounds: 0 });
    for (is_met, needed) in [
        (case.layers >= 2, "two layers".to_owned()),
        (
            case.vocabulary <= length && case.vocabulary >= 2,
            format!("2 to {length} tokens, half a latent less an element"),
        ),
        (case.hidden >= BLOCKS * length, format!("a stream of {BLOCKS} blocks of {length}")),
        (
            case.inner >= case.vocabulary + usize::from(wiring.drafts > 0),
            "an inner element for each token, and one more where there are drafts".to_owned(),
        ),
        (case.rotary() >= 4, "two pairs that turn".to_owned()),
        (parts <= configuration.attention.v_head_dim(), format!("heads as wide as {parts}")),
        (is_half, "a cache in bf16".to_owned()),
        (
            case.mixture.is_none_or(|own| own.is_plain() && own.top_k == 1),
            "one expert a row, and none beside it".to_owned(),
        ),
        (
            !case.situ && !case.output_gate,
            "MLPs that are gated by silu, and attention without a gate".to_owned(),
        ),
        (case.pattern.is_none(), "latent attention over all tokens in every layer".to_owned()),
        (wiring.drafts <= 8 && wiring.rounds <= 32, "at most 8 drafts and 32 rounds".to_owned()),
        ((wiring.drafts == 0) == (wiring.rounds == 0), "rounds where there are drafts".to_owned()),
        (wiring.drafts == 0 || case.is_prompts(), "prompts alone in front of drafts".to_owned()),
        (
            wiring.drafts == 0 || case.prompt_lengths().values().all(|rows| *rows >= 3),
            "prompts of three rows or more in front of drafts: a text goes on as it began from there on"
                .to_owned(),
        ),
        (
            wiring
                .drafts
                .saturating_add(1)
                .saturating_mul(wiring.rounds)
                .saturating_add(case.session.steps.len())
                < MAX_STEPS,
            format!("fewer than {MAX_STEPS} steps when tokens are made one by one"),
        ),
    ] {
        if !is_met {
            return Err(format!("a stack whose weights are laid out needs {needed}"));
        }
    }
    Ok(())
}

/// What a layer looks for, and where it puts what it finds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The position before: its token goes to the block of the token before.
    Position,
    /// Rows with the same token: it goes to the block of older ones.
    Alike,
    /// The token behind one that is the row's own: it goes to the block of the answer.
    Content,
}

/// Weights of all layers, one after the other.
struct Wiring<'a> {
    case: &'a StackCase,
    /// Elements of a code.
    length: usize,
    /// Root mean square of each block, as far as the wiring has come.
    size: [f64; BLOCKS],
    found: std::collections::BTreeMap<&'static str, Vec<f64>>,
}

/// The weights by name, without norms and the rotary table, as [`StackCase::weight_shapes`] lists them.
pub(super) fn weights(case: &StackCase) -> std::collections::BTreeMap<&'static str, Vec<f64>> {
    let length = code_length(case);
    let mut size = [0.0; BLOCKS];
    (size[CONSTANT], size[TOKEN]) = (STEADY, 1.0);
    let mut wiring = Wiring { case, length, size, found: Default::default() };
    let names = case.weight_shapes();
    names.iter().for_each(|(name, _)| {
        wiring.found.insert(name, Vec::new());
    });
    wiring.embedding();
    for layer in 0..case.layers {
        let role = match layer {
            last if last + 1 == case.layers => Role::Content,
            0 => Role::Position,
            _ => Role::Alike,
        };
        wiring.attention(role, TOKEN);
        let (from, to, gain) =
            if role == Role::Content { (ANSWER, ANSWER, 0.125) } else { (BEFORE, OLDER, 0.0625) };
        let turn = layer + 1;
        let answer = |token: usize| if to == ANSWER { token } else { (token + turn) % case.vocabulary };
        match case.mixture.filter(|own| layer >= own.dense) {
            None => wiring.mlp(from, to, gain, answer),
            Some(own) => wiring.experts(from, to, (gain, own.experts), answer),
        }
    }
    if case.drafts() > 0 {
        wiring.draft_head();
    }
    wiring.head();
    wiring.found
}

impl Wiring<'_> {
    /// Root mean square of the stream.
    fn root(&self) -> f64 {
        let squares: f64 = self.size.iter().map(|size| size * size).sum();
        (squares * self.length as f64 / self.case.hidden as f64).sqrt()
    }

    fn column(&self, block: usize, element: usize) -> usize {
        block * self.length + element
    }

    fn push(&mut self, name: &'static str, matrix: Matrix) {
        self.found.entry(name).or_default().extend(matrix.values);
    }

    fn embedding(&mut self) {
        let mut table = Matrix::new(self.case.vocabulary, self.case.hidden);
        for token in 0..self.case.vocabulary {
            for element in 0..self.length {
                table.set(token, self.column(CONSTANT, element), STEADY);
                table.set(token, self.column(TOKEN, element), sign(token, element));
            }
        }
        self.push("embedding", table);
    }

    fn head(&mut self) {
        let mut head = Matrix::new(self.case.vocabulary, self.case.hidden);
        for token in 0..self.case.vocabulary {
            for element in 0..self.length {
                head.set(token, self.column(ANSWER, element), sign(token, element));
            }
        }
        self.push("w_head", head);
    }

    /// Keys: the address of a token, its value, whether the block `first` holds a text's first token, and the position; queries by the role; values
    /// of each head's own elements.
    fn attention(&mut self, role: Role, first: usize) {
        let (configuration, hidden, length) = (self.case.configuration(), self.case.hidden, self.length);
        let attention = configuration.attention;
        let Attention::Mla { kv_lora_rank, qk_rope_head_dim, v_head_dim, .. } = attention else { return };
        let (width, heads, half) = (attention.qk_dim(), configuration.total_heads(), qk_rope_head_dim / 2);
        let (root, scale) = (self.root(), f64::from(configuration.softmax_scale));
        // what does not lead to the answer is small, since a norm passes its errors on to everything
        let (asked, address, to, gain) = match role {
            Role::Position => (None, TOKEN, BEFORE, 1.0),
            Role::Alike => (Some(TOKEN), TOKEN, OLDER, 0.25),
            Role::Content => (Some(TOKEN), BEFORE, ANSWER, 1.0),
        };
        let constant = self.size[CONSTANT] / root;
        let mut key = Matrix::new(width, hidden);
        for element in 0..length {
            key.set(element, self.column(address, element), 1.0);
            key.set(length + element, self.column(TOKEN, element), 1.0);
            let opening = sign(self.case.vocabulary - 1, element) / length as f64;
            key.set(2 * length, self.column(first, element), opening);
            for pair in 0..half {
                key.set(kv_lora_rank + pair, self.column(CONSTANT, element), 1.0 / length as f64);
            }
        }
        let mut query = Matrix::new(width, hidden);
        for element in 0..length {
            if let Some(asked) = asked {
                let match_size = self.size[address] * self.size[asked] / (root * root) * length as f64;
                query.set(element, self.column(asked, element), CONTENT_LEAD / (scale * match_size));
                if role == Role::Content {
                    let opening = constant * self.size[first] / root * length as f64;
                    query.set(2 * length, self.column(CONSTANT, element), FIRST_LEAD / (scale * opening));
                }
                continue;
            }
            let factor = POSITION_FACTOR / (scale * constant * constant * length as f64);
            for pair in 0..half.min(2) {
                let angle = THETA.powf(-2.0 * pair as f64 / qk_rope_head_dim as f64);
                // one position back: turned by −angle before it turns to its own
                query.set(kv_lora_rank + pair, self.column(CONSTANT, element), factor * angle.cos());
                query.set(kv_lora_rank + half + pair, self.column(CONSTANT, element), -factor * angle.sin());
            }
        }
        let mut up = Matrix::new(heads * kv_lora_rank, v_head_dim);
        let mut output = Matrix::new(hidden, heads * v_head_dim);
        for element in 0..length {
            let (head, place) = (element % heads, element / heads);
            up.set(head * kv_lora_rank + length + element, place, 1.0);
            output.set(self.column(to, element), head * v_head_dim + place, gain);
        }
        let query = query.values.repeat(heads);
        self.push("w_key", key);
        self.push("w_query", Matrix { values: query, width: hidden });
        self.push("w_uv", up);
        self.push("w_output", output);
        self.size[to] = self.size[to].hypot(gain * self.size[TOKEN] / root);
    }

    /// Gate, up and down of a look-up of some tokens: of the token that the block `from` holds, the code of its answer goes to the block `to`.
    fn look_up(
        &self,
        (from, to, gain): (usize, usize, f64),
        holds: impl Fn(usize) -> bool,
        answer: impl Fn(usize) -> usize,
    ) -> [Matrix; 3] {
        let (case, length, root) = (self.case, self.length as f64, self.root());
        let (mut gate, mut up) = (Matrix::new(case.inner, case.hidden), Matrix::new(case.inner, case.hidden));
        let mut down = Matrix::new(case.hidden, case.inner);
        for token in (0..case.vocabulary).filter(|token| holds(*token)) {
            for element in 0..self.length {
                let unit = root / length;
                let own = LOOK_UP * unit / self.size[from] * sign(token, element);
                gate.set(token, self.column(from, element), own);
                let constant = self.column(CONSTANT, element);
                gate.set(token, constant, -0.5 * LOOK_UP * unit / self.size[CONSTANT]);
                up.set(token, constant, unit / self.size[CONSTANT]);
                let code = sign(answer(token), element);
                down.set(self.column(to, element), token, gain * 2.0 / LOOK_UP * code);
            }
        }
        [gate, up, down]
    }

    fn mlp(&mut self, from: usize, to: usize, gain: f64, answer: impl Fn(usize) -> usize) {
        let [gate, up, down] = self.look_up((from, to, gain), |_| true, answer);
        self.push("w_gate", gate);
        self.push("w_up", up);
        self.push("w_down", down);
        self.grow(to, gain);
    }

    fn grow(&mut self, to: usize, gain: f64) {
        // the answer is added to what is the same already, older tokens to others
        self.size[to] = if to == ANSWER { self.size[to] + gain } else { self.size[to].hypot(gain) };
    }

    /// Experts that have the tokens of one remainder each, and a router that knows which.
    fn experts(
        &mut self,
        from: usize,
        to: usize,
        (gain, experts): (f64, usize),
        answer: impl Fn(usize) -> usize + Copy,
    ) {
        let mut router = Matrix::new(experts, self.case.hidden);
        let unit = 8.0 * self.root() / (self.length as f64 * self.size[from]);
        for token in 0..self.case.vocabulary {
            for element in 0..self.length {
                let (row, column) = (token % experts, self.column(from, element));
                router.values[row * router.width + column] += unit * sign(token, element);
            }
        }
        self.push("w_router", router);
        for expert in 0..experts {
            let holds = |token: usize| token % experts == expert;
            let [gate, up, down] = self.look_up((from, to, gain), holds, answer);
            self.push("expert_gate", gate);
            self.push("expert_up", up);
            self.push("expert_down", down);
        }
        self.grow(to, gain);
    }

    /// The draft head: the token that follows, and from the row's stream its own token; then a layer by content. A row whose own token is a
    /// certain one is given another answer by one more element of its MLP, so that what the head has of the stream shows.
    fn draft_head(&mut self) {
        let (hidden, behind) = (self.case.hidden, self.root());
        let mut size = [0.0; BLOCKS];
        (size[CONSTANT], size[TOKEN]) = (STEADY, 1.0);
        let streams = [behind, Wiring { size, found: Default::default(), ..*self }.root()];
        let mut joined = Matrix::new(hidden, 2 * hidden);
        for element in 0..self.length {
            for block in [CONSTANT, TOKEN] {
                joined.set(self.column(block, element), self.column(block, element), streams[1]);
            }
            joined.set(self.column(BEFORE, element), hidden + self.column(TOKEN, element), streams[0]);
        }
        self.push("w_draft", joined);
        size[BEFORE] = 1.0;
        self.size = size;
        self.attention(Role::Content, BEFORE);
        let [mut gate, mut up, mut down] = self.look_up((ANSWER, ANSWER, 0.125), |_| true, |token| token);
        let [before, answer] = MISTAKEN;
        if self.case.vocabulary > answer + 1 {
            let one = |token: usize| token == before;
            let [own_gate, own_up, own_down] = self.look_up((BEFORE, ANSWER, 6.0), one, |_| answer);
            let (row, last) = (before, self.case.vocabulary);
            for column in 0..hidden {
                gate.set(last, column, own_gate.values[row * hidden + column]);
                up.set(last, column, own_up.values[row * hidden + column]);
                down.set(column, last, own_down.values[column * own_down.width + row]);
            }
        }
        self.push("w_gate", gate);
        self.push("w_up", up);
        self.push("w_down", down);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_two_tokens_have_nothing_in_common() {
        for (one, other) in (0..8).flat_map(|one| (0..8).map(move |other| (one, other))) {
            let common: f64 = (0..8).map(|element| sign(one, element) * sign(other, element)).sum();
            assert_eq!(common, if one == other { 8.0 } else { 0.0 });
        }
    }

    #[test]
    fn a_length_is_the_largest_power_of_two_that_has_room() {
        assert_eq!([0, 1, 2, 3, 4, 7, 8].map(power_of_two), [0, 1, 2, 2, 4, 4, 8]);
    }
}
