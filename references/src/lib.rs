//! The oracle: what a context-parallel attention engine has to compute, and how far it may be from it.
//!
//! Everything here is a pure function of its arguments. Nothing reads a file, starts an engine or
//! shares code with one, so that agreement between an engine and this crate means something.
//!
//! * [`layout`] — which rank owns a token, and in which slot of its cache.
//! * [`chunk`] — how a cached context is gathered in chunks for prefill.
//! * [`visibility`] — which tokens a query row may see.
//! * [`attention`] — softmax attention over the visible tokens, twice: as a definition and fast.
//! * [`exp`] — elementary functions that give the same bits everywhere.
//! * [`merge`] — partial results joined by log-sum-exp.
//! * [`split`] — which part of a merge a token belongs to.
//! * [`moments`] — what a bound needs to know of the data.
//! * [`bound`] — how far a conforming engine may be off, element by element.
//! * [`probable`] — how far it is likely to be off; to be reported, not to judge by.
//! * [`statistics`] — what a whole output says that no single element does.
//! * [`moe`] — experts of a token, their weights, and what comes out.
//! * [`pcp`] — which rank of prefill context parallelism has which row.
//! * [`sparse`] — which tokens an indexer selects for a row.
//! * [`sharing`] — which layers compute such a selection, and which share one.
//! * [`compressor`] — entries that blocks of tokens are pooled into.
//! * [`acceptance`] — which drafted tokens are accepted, and what may stand behind them.
//! * [`kda`] — the recurrence of Kimi delta attention with what stands around it.
//! * [`stack`] — what stands between two attentions of a transformer.
//! * [`whole`] — a transformer from its first stage to its last, without looking at an engine.
//! * [`probe`] — inputs whose right answers are integers.

pub mod acceptance;
pub mod attention;
pub mod bound;
pub mod chunk;
pub mod compressor;
pub mod exp;
pub mod kda;
pub mod layout;
pub mod merge;
pub mod moe;
pub mod moments;
pub mod pcp;
pub mod probable;
pub mod probe;
pub mod sharing;
pub mod sparse;
pub mod split;
pub mod stack;
pub mod statistics;
pub mod visibility;
pub mod whole;
