//! Mixtures of experts: which experts a token has, with what weights, and what comes out, each with a bound.
//!
//! Nothing here knows of ranks: how tokens and experts are shared out must not change what a token gets. Formulas: DeepSeek-V3 and
//! Kimi (`sigmoid`, bias for the choice alone, groups), DeepSeek-V2 and Qwen (`softmax`), aiter, vLLM and SGLang for the fill of groups
//! that are not kept, DeepSeek-V4 for tables by token id.

mod experts;
mod router;

pub use experts::{Addend, Gating, Mlp, Reduction, Term, combine, mlp, mlp_of};
pub use router::{
    Choice, Fill, Renormalise, Rule, Scores, Scoring, Weights, admits, scores, selections, weights,
};
