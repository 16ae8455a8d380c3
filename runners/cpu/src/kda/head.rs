//! The delta rule of one head over the rows of a request: token by token, or in chunks that solve a triangular system by substitution.

use super::KdaPolicies;

/// What a head gets of one row.
pub(super) struct HeadRow {
    /// `[K]`, normalised and scaled.
    pub query: Vec<f32>,
    /// `[K]`, normalised.
    pub key: Vec<f32>,
    /// `[V]`.
    pub value: Vec<f32>,
    /// Log of the decay, `[K]`.
    pub decay: Vec<f32>,
    /// b.
    pub share: f32,
}

/// Runs rows behind a state `[K, V]`: what the state gives to each row's query, and the states behind `first` and more rows.
pub(super) fn run(
    start: &[f32],
    rows: &[HeadRow],
    width: usize,
    chunk: usize,
    first: usize,
    policies: &KdaPolicies,
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let mut state = start.to_vec();
    let (mut cores, mut states) = (Vec::new(), Vec::new());
    if first == 0 {
        states.push(state.clone());
    }
    let stored = |state: &mut Vec<f32>| state.iter_mut().for_each(|x| *x = (policies.stored)(*x));
    let mut done = 0;
    for part in rows.chunks(chunk.max(1)) {
        if chunk <= 1 {
            cores.push(token(&mut state, &part[0], width, policies));
        } else {
            let solved = Chunk::solve(&state, part, width, policies);
            cores.extend((0..part.len()).map(|row| solved.read(&part[row].query, row)));
            // states inside the chunk that can be asked back
            for row in first.saturating_sub(done + 1)..part.len() - 1 {
                let mut kept = solved.state(row);
                stored(&mut kept);
                states.push(kept);
            }
            state = solved.state(part.len() - 1);
        }
        stored(&mut state);
        done += part.len();
        if done >= first {
            states.push(state.clone());
        }
    }
    (cores, states)
}

/// `Σ_i by_i·S_ij` for each column.
fn read(state: &[f32], by: &[f32], width: usize) -> Vec<f32> {
    let column = |j: usize| by.iter().enumerate().map(|(i, x)| x * state[i * width + j]).sum();
    (0..width).map(column).collect()
}

fn token(state: &mut [f32], row: &HeadRow, width: usize, policies: &KdaPolicies) -> Vec<f32> {
    let decay = |state: &mut [f32]| {
        state.iter_mut().enumerate().for_each(|(at, x)| *x *= row.decay[at / width].exp());
    };
    if policies.decays_first {
        decay(state);
    }
    let early = policies.reads_first.then(|| read(state, &row.query, width));
    let known = read(state, &row.key, width);
    for (at, x) in state.iter_mut().enumerate() {
        let (i, j) = (at / width, at % width);
        *x += row.key[i] * (row.share * (policies.news)(row.value[j], known[j]));
    }
    if !policies.decays_first {
        decay(state);
    }
    early.unwrap_or_else(|| read(state, &row.query, width))
}

/// A chunk with its updates: `w_t = b_t(v_t − k_tᵀ(exp(G_t)S + Σ_{s<t} exp(G_t − G_s)k_s w_s))`.
struct Chunk<'a> {
    start: &'a [f32],
    rows: &'a [HeadRow],
    width: usize,
    policies: &'a KdaPolicies,
    /// Running sums of the logs of decays of each channel, `[K][rows]`.
    sums: Vec<Vec<f32>>,
    /// `[V]` of each row.
    updates: Vec<Vec<f32>>,
}

impl<'a> Chunk<'a> {
    fn solve(start: &'a [f32], rows: &'a [HeadRow], width: usize, policies: &'a KdaPolicies) -> Self {
        let running = |channel: usize| -> Vec<f32> {
            let add = |sum: &mut f32, row: &HeadRow| {
                *sum += row.decay[channel];
                Some(*sum)
            };
            rows.iter().scan(0.0, add).collect()
        };
        let sums = (0..rows[0].key.len()).map(running).collect();
        let mut chunk = Self { start, rows, width, policies, sums, updates: Vec::new() };
        for (place, row) in rows.iter().enumerate() {
            let known = chunk.read(&row.key, place);
            let news = row.value.iter().zip(known).map(|(v, known)| row.share * (policies.news)(*v, known));
            let news = news.collect();
            chunk.updates.push(news);
        }
        chunk
    }

    /// What the state at a row gives to a key or a query, with the updates that there are.
    fn read(&self, by: &[f32], row: usize) -> Vec<f32> {
        let entry = |(channel, x): (usize, &f32)| x * (self.policies.entry)(&self.sums[channel], row).exp();
        let faded: Vec<f32> = by.iter().enumerate().map(entry).collect();
        let mut sums = read(self.start, &faded, self.width);
        for (earlier, update) in self.updates.iter().enumerate().take(row + 1) {
            let key = &self.rows[earlier].key;
            let within = |channel: usize| {
                let sums = &self.sums[channel];
                by[channel] * key[channel] * (self.policies.within)(sums[row], sums[earlier])
            };
            let met: f32 = (0..by.len()).map(within).sum();
            sums.iter_mut().zip(update).for_each(|(sum, update)| *sum += met * update);
        }
        sums
    }

    /// State behind a row.
    fn state(&self, row: usize) -> Vec<f32> {
        let element = |at: usize| {
            let (channel, column) = (at / self.width, at % self.width);
            let sums = &self.sums[channel];
            let kept = self.start[at] * (self.policies.entry)(sums, row).exp();
            let added = (0..=row).map(|earlier| {
                let faded =
                    self.rows[earlier].key[channel] * (self.policies.within)(sums[row], sums[earlier]);
                faded * self.updates[earlier][column]
            });
            kept + added.sum::<f32>()
        };
        (0..self.start.len()).map(element).collect()
    }
}
