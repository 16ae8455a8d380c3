//! A batch: its requests, how their blocks lie in memory, and how far the graph is padded.

use serde::{Deserialize, Serialize};

/// One request of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Tokens that are in the cache before the step.
    pub context_tokens: usize,
    /// New rows of the step. 0 together with a context of 0 is a request of length zero, which must not disturb its neighbours.
    pub query_tokens: usize,
}

impl Request {
    /// Total length L once the new rows are in.
    pub fn seq_len(&self) -> usize {
        self.context_tokens + self.query_tokens
    }
}

/// Which physical blocks a request gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Block 1, 2, 3, … in order of need (block 0 stays free, as the null block of vLLM).
    Sequential,
    /// A fragmented pool: ids in an order drawn from the seed.
    Shuffled,
    /// From the last block down, interleaved between requests.
    Descending,
}

impl Placement {
    /// All placements, in a stable order.
    pub const ALL: [Self; 3] = [Self::Sequential, Self::Shuffled, Self::Descending];

    /// Name as it stands in case ids.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sequential => "seq",
            Self::Shuffled => "shuf",
            Self::Descending => "desc",
        }
    }
}

/// A batch of requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Requests in batch order.
    pub requests: Vec<Request>,
    /// Graph-padding rows behind the last request.
    pub padded_rows: usize,
    /// Where the blocks lie.
    pub placement: Placement,
    /// Workspace of one context gather in tokens; used by the context family only.
    pub chunk_budget_tokens: usize,
}

impl Workload {
    /// Rows of all requests, without padding.
    pub fn query_rows(&self) -> usize {
        self.requests.iter().map(|r| r.query_tokens).sum()
    }

    /// Rows with padding: T.
    pub fn total_rows(&self) -> usize {
        self.query_rows() + self.padded_rows
    }

    /// Tokens of all requests, new rows included.
    pub fn total_tokens(&self) -> usize {
        self.requests.iter().map(Request::seq_len).sum()
    }

    /// The largest number of new rows of one request: q.
    pub fn max_query_tokens(&self) -> usize {
        self.requests.iter().map(|r| r.query_tokens).max().unwrap_or(0)
    }

    /// `query_start_loc`: first row of each request, then the number of rows.
    pub fn query_start_loc(&self) -> Vec<i32> {
        let mut starts = vec![0];
        for request in &self.requests {
            starts.push(starts[starts.len() - 1] + request.query_tokens as i32);
        }
        starts
    }

    /// `(request, row within the request)` of each row; `None` for padding.
    pub fn rows(&self) -> Vec<Option<(usize, usize)>> {
        let mut rows = Vec::with_capacity(self.total_rows());
        for (index, request) in self.requests.iter().enumerate() {
            rows.extend((0..request.query_tokens).map(|t| Some((index, t))));
        }
        rows.extend(std::iter::repeat_n(None, self.padded_rows));
        rows
    }
}
