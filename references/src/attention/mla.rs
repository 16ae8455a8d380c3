//! Multi-head latent attention, absorbed and not: the same result by two ways.
//!
//! Not absorbed, each cached latent is expanded to a key and a value per head. Absorbed, the query takes the key
//! projection over (`q̃ = q_nope·W_UK`), attention runs on the latents themselves, and the output is projected
//! after (`y = o·W_UV`): `q_nope·(W_UK c) = (q_nope·W_UK)·c`, and `Σ p (c·W_UV) = (Σ p c)·W_UV` (DeepSeek-V2,
//! 2024).

use super::plain::{Attention, Problem, Values, attend};
use crate::visibility::Visible;

/// The up-projections of one layer and the lengths that belong to them.
#[derive(Debug, Clone, PartialEq)]
pub struct Mla {
    /// Query heads.
    pub heads: usize,
    /// Numbers of a head's query and key that are not rotated, `N` (`qk_nope_head_dim`).
    pub nope_dim: usize,
    /// Rotated numbers, shared by the heads on the key's side, `P` (`qk_rope_head_dim`).
    pub rope_dim: usize,
    /// Numbers of a head's value, `V` (`v_head_dim`).
    pub v_dim: usize,
    /// Numbers of a latent, `R` (`kv_lora_rank`).
    pub latent_dim: usize,
    /// `W_UK`, `[heads, N, R]`.
    pub up_key: Vec<f64>,
    /// `W_UV`, `[heads, R, V]`.
    pub up_value: Vec<f64>,
}

impl Mla {
    /// Takes both projections out of a checkpoint's `kv_b_proj`, `[heads·(N + V), R]` with each head's `N` key
    /// rows before its `V` value rows. `dims` is `(N, P, V, R)`.
    ///
    /// # Panics
    /// `kv_b` has another length.
    pub fn from_kv_b(heads: usize, dims: (usize, usize, usize, usize), kv_b: &[f64]) -> Self {
        let (nope_dim, rope_dim, v_dim, latent_dim) = dims;
        assert_eq!(kv_b.len(), heads * (nope_dim + v_dim) * latent_dim, "kv_b is not [heads·(N + V), R]");
        let (mut up_key, mut up_value) = (Vec::new(), vec![0.0; heads * latent_dim * v_dim]);
        for (head, rows) in kv_b.chunks_exact((nope_dim + v_dim) * latent_dim).enumerate() {
            let (key_rows, value_rows) = rows.split_at(nope_dim * latent_dim);
            up_key.extend_from_slice(key_rows);
            for (v, row) in value_rows.chunks_exact(latent_dim).enumerate() {
                for (c, weight) in row.iter().enumerate() {
                    up_value[(head * latent_dim + c) * v_dim + v] = *weight;
                }
            }
        }
        Self { heads, nope_dim, rope_dim, v_dim, latent_dim, up_key, up_value }
    }

    /// Attention with expanded keys and values. `q_nope` is `[rows, heads, N]`, `q_pe` `[rows, heads, P]`,
    /// `latent` `[tokens, R]`, `k_pe` `[tokens, P]`; the result's `out` is `[rows, heads, V]`.
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn attend_expanded(&self, inputs: &Inputs, visible: &[Visible]) -> Attention {
        let (mut key, mut value) = (Vec::new(), Vec::new());
        for (latent, k_pe) in
            inputs.latent.chunks_exact(self.latent_dim).zip(inputs.k_pe.chunks_exact(self.rope_dim))
        {
            for head in 0..self.heads {
                let up_key = &self.up_key[head * self.nope_dim * self.latent_dim..];
                key.extend((0..self.nope_dim).map(|n| dot(&up_key[n * self.latent_dim..], latent)));
                key.extend_from_slice(k_pe);
                value.extend(self.project_one(head, latent));
            }
        }
        let query = join(inputs.q_nope, self.nope_dim, inputs.q_pe, self.rope_dim);
        let qk_dim = self.nope_dim + self.rope_dim;
        let values = Values::Separate(&value);
        attend(
            &Problem::new(self.heads, self.heads, qk_dim, self.v_dim, inputs.scale, &query, &key, values),
            visible,
        )
    }

    /// Attention on the latents themselves; the result's `out` is `[rows, heads, R]`, to be projected.
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn attend_absorbed(&self, inputs: &Inputs, visible: &[Visible]) -> Attention {
        let query = self.absorb(inputs.q_nope, inputs.q_pe);
        let key = join(inputs.latent, self.latent_dim, inputs.k_pe, self.rope_dim);
        let qk_dim = self.latent_dim + self.rope_dim;
        let problem = Problem::new(
            self.heads,
            1,
            qk_dim,
            self.latent_dim,
            inputs.scale,
            &query,
            &key,
            Values::KeyPrefix,
        );
        attend(&problem, visible)
    }

    /// `[rows, heads, R + P]`: the queries that attend to latents: `q_nope·W_UK`, then `q_pe`.
    pub fn absorb(&self, q_nope: &[f64], q_pe: &[f64]) -> Vec<f64> {
        let absorbed: Vec<f64> = q_nope
            .chunks_exact(self.nope_dim)
            .enumerate()
            .flat_map(|(index, query)| {
                let head = index % self.heads;
                let mut latent = vec![0.0; self.latent_dim];
                for (n, q) in query.iter().enumerate() {
                    let row = &self.up_key[(head * self.nope_dim + n) * self.latent_dim..];
                    for (sum, weight) in latent.iter_mut().zip(row) {
                        *sum += q * weight;
                    }
                }
                latent
            })
            .collect();
        join(&absorbed, self.latent_dim, q_pe, self.rope_dim)
    }

    /// `[rows, heads, V]` from `[rows, heads, R]`: `y = o·W_UV` for each head. Linear, so that it commutes with
    /// the merge of partials, whose weights are one number per row and head.
    pub fn project(&self, out: &[f64]) -> Vec<f64> {
        out.chunks_exact(self.latent_dim)
            .enumerate()
            .flat_map(|(index, latent)| self.project_one(index % self.heads, latent))
            .collect()
    }

    fn project_one(&self, head: usize, latent: &[f64]) -> Vec<f64> {
        let mut value = vec![0.0; self.v_dim];
        for (c, x) in latent.iter().enumerate() {
            let row = &self.up_value[(head * self.latent_dim + c) * self.v_dim..];
            for (sum, weight) in value.iter_mut().zip(row) {
                *sum += x * weight;
            }
        }
        value
    }
}

/// Queries and cache of one attention call.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[rows, heads, N]`.
    pub q_nope: &'a [f64],
    /// `[rows, heads, P]`, rotated.
    pub q_pe: &'a [f64],
    /// `[tokens, R]`, normalised as cached.
    pub latent: &'a [f64],
    /// `[tokens, P]`, rotated as cached.
    pub k_pe: &'a [f64],
    /// Softmax scale: `(N + P)^−½`, times [`super::rope::Yarn::scale_factor`]; not `(R + P)^−½`.
    pub scale: f64,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Vectors of `a_len` and `b_len` numbers, end to end.
fn join(a: &[f64], a_len: usize, b: &[f64], b_len: usize) -> Vec<f64> {
    assert_eq!(a.len() / a_len, b.len() / b_len, "as many vectors on either side");
    a.chunks_exact(a_len).zip(b.chunks_exact(b_len)).flat_map(|(a, b)| a.iter().chain(b).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::merge::{Partial, merge};
    use shardcheck_formats::recipe::Counter;

    const ROWS: usize = 2;
    const TOKENS: usize = 9;

    struct Made {
        mla: Mla,
        q_nope: Vec<f64>,
        q_pe: Vec<f64>,
        latent: Vec<f64>,
        k_pe: Vec<f64>,
    }

    impl Made {
        fn new() -> Self {
            let mut random = Counter::new(5, 0);
            let mut draw = |count: usize| (0..count).map(|_| random.gaussian()).collect::<Vec<_>>();
            let (heads, dims) = (3, (4, 2, 5, 6));
            Self {
                mla: Mla::from_kv_b(heads, dims, &draw(heads * (4 + 5) * 6)),
                q_nope: draw(ROWS * heads * 4),
                q_pe: draw(ROWS * heads * 2),
                latent: draw(TOKENS * 6),
                k_pe: draw(TOKENS * 2),
            }
        }

        fn inputs(&self) -> Inputs<'_> {
            Inputs {
                q_nope: &self.q_nope,
                q_pe: &self.q_pe,
                latent: &self.latent,
                k_pe: &self.k_pe,
                scale: 6f64.powf(-0.5),
            }
        }
    }

    fn close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            approx::assert_abs_diff_eq!(a, b, epsilon = 1e-13);
        }
    }

    #[test]
    fn absorption_changes_nothing() {
        let made = Made::new();
        let visible = Visible::causal(TOKENS, ROWS);
        let expanded = made.mla.attend_expanded(&made.inputs(), &visible);
        let absorbed = made.mla.attend_absorbed(&made.inputs(), &visible);
        close(&expanded.lse, &absorbed.lse);
        close(&expanded.out, &made.mla.project(&absorbed.out));
    }

    #[test]
    fn projecting_before_the_merge_changes_nothing() {
        let made = Made::new();
        let layout = Layout::new(3, 1, 1).unwrap();
        let visible = Visible::causal(TOKENS, ROWS);
        let after = made.mla.project(&made.mla.attend_absorbed(&made.inputs(), &visible).out);
        let partials: Vec<Partial> = (0..3)
            .map(|rank| {
                let held: Vec<Visible> = visible.iter().map(|seen| seen.on_rank(&layout, rank)).collect();
                let Attention { out, lse } = made.mla.attend_absorbed(&made.inputs(), &held);
                Partial { out: made.mla.project(&out), lse }
            })
            .collect();
        close(&merge(&partials).out, &after);
    }

    #[test]
    fn heads_have_projections_of_their_own() {
        let made = Made::new();
        let latent = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0].repeat(3);
        let projected = made.mla.project(&latent);
        assert_ne!(projected[..5], projected[5..10]);
    }
}
