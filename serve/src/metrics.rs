//! What the server counts, shown in Prometheus' text format under vLLM's names.
//!
//! Only what is really counted is shown: no preemptions (there are none), no speculation counters when it is off.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::attention::AttentionPath;
use crate::engine::request::Finish;

/// A number that only grows, or that is set.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    /// Adds.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Sets.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds in seconds (vLLM's for time to first token, then for whole requests).
const FIRST_TOKEN_S: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
];
const REQUEST_S: &[f64] =
    &[0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0];

#[derive(Debug, Default)]
struct Histogram {
    /// Observations per bucket, not cumulative; the last is above all bounds.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn observe(&mut self, bounds: &[f64], value: f64) {
        self.counts.resize(bounds.len() + 1, 0);
        self.counts[bounds.partition_point(|bound| *bound < value)] += 1;
        self.sum += value;
    }
}

/// All counters of a server.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Sequences that run.
    pub running: Number,
    /// Requests that wait.
    pub waiting: Number,
    /// Cache blocks that sequences hold.
    pub blocks_held: Number,
    /// Cache blocks.
    pub blocks_total: Number,
    /// Prompt tokens that looked for a remembered prefix.
    pub prefix_queries: Number,
    /// Prompt tokens that were found.
    pub prefix_hits: Number,
    /// Prompt tokens of requests whose prompt is done, found ones included.
    pub prompt_tokens: Number,
    /// Tokens that were generated.
    pub generation_tokens: Number,
    /// Requests that were cancelled or failed.
    pub aborted: Number,
    stopped: Number,
    cut: Number,
    drafts: Number,
    draft_tokens: Number,
    accepted_tokens: Number,
    accepted_per_position: Mutex<Vec<u64>>,
    first_token_s: Mutex<Histogram>,
    request_s: Mutex<Histogram>,
}

impl Metrics {
    /// Counts a finished request and its time since arrival.
    pub fn finished(&self, finish: &Finish, elapsed: Duration) {
        match finish {
            Finish::Length => self.cut.add(1),
            Finish::End | Finish::StopToken(_) | Finish::StopText(_) => self.stopped.add(1),
        }
        lock(&self.request_s).observe(REQUEST_S, elapsed.as_secs_f64());
    }

    /// Counts a first token and its time since arrival.
    pub fn first_token(&self, elapsed: Duration) {
        lock(&self.first_token_s).observe(FIRST_TOKEN_S, elapsed.as_secs_f64());
    }

    /// Counts one draft of `drafted` tokens, of which the first `accepted` were right.
    pub fn drafted(&self, drafted: usize, accepted: usize) {
        self.drafts.add(1);
        self.draft_tokens.add(drafted as u64);
        self.accepted_tokens.add(accepted as u64);
        let mut positions = lock(&self.accepted_per_position);
        if positions.len() < drafted {
            positions.resize(drafted, 0);
        }
        positions[..accepted].iter_mut().for_each(|count| *count += 1);
    }

    /// The page that `/metrics` serves.
    pub fn page(&self, model: &str, path: &AttentionPath, speculates: bool) -> String {
        let mut page =
            Page { text: String::new(), labels: format!("engine=\"0\",model_name=\"{}\"", escape(model)) };
        page.number("vllm:num_requests_running", "gauge", "Requests that run", self.running.get());
        page.number("vllm:num_requests_waiting", "gauge", "Requests that wait", self.waiting.get());
        let usage = self.blocks_held.get() as f64 / self.blocks_total.get().max(1) as f64;
        page.value("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache that is held, 0 to 1", usage);
        let counters = [
            ("vllm:prefix_cache_queries_total", "Prompt tokens looked up", &self.prefix_queries),
            ("vllm:prefix_cache_hits_total", "Prompt tokens found", &self.prefix_hits),
            ("vllm:prompt_tokens_total", "Prompt tokens, found ones included", &self.prompt_tokens),
            ("vllm:generation_tokens_total", "Tokens generated", &self.generation_tokens),
        ];
        for (name, help, number) in counters {
            page.number(name, "counter", help, number.get());
        }
        page.head("vllm:request_success_total", "counter", "Requests that ended, by reason");
        for (reason, number) in [("stop", &self.stopped), ("length", &self.cut), ("abort", &self.aborted)] {
            let label = format!("finished_reason=\"{reason}\"");
            page.sample("vllm:request_success_total", &label, number.get() as f64);
        }
        if speculates {
            self.speculation(&mut page);
        }
        let first = ("vllm:time_to_first_token_seconds", "Seconds to the first token");
        page.histogram(first, FIRST_TOKEN_S, &lock(&self.first_token_s));
        let whole = ("vllm:e2e_request_latency_seconds", "Seconds of a request");
        page.histogram(whole, REQUEST_S, &lock(&self.request_s));
        page.path(path);
        page.text
    }

    fn speculation(&self, page: &mut Page) {
        let counters = [
            ("vllm:spec_decode_num_drafts_total", "Drafts", &self.drafts),
            ("vllm:spec_decode_num_draft_tokens_total", "Draft tokens", &self.draft_tokens),
            (
                "vllm:spec_decode_num_accepted_tokens_total",
                "Draft tokens that were right",
                &self.accepted_tokens,
            ),
        ];
        for (name, help, number) in counters {
            page.number(name, "counter", help, number.get());
        }
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        page.head(name, "counter", "Draft tokens that were right, by position in the draft");
        for (position, count) in lock(&self.accepted_per_position).iter().enumerate() {
            page.sample(name, &format!("position=\"{position}\""), *count as f64);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string can't fail.
        let _ = writeln!(self.text, "{line}");
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}.\n# TYPE {name} {kind}"));
    }

    fn sample(&mut self, name: &str, label: &str, value: f64) {
        let comma = if label.is_empty() { "" } else { "," };
        let labels = self.labels.clone();
        self.line(format_args!("{name}{{{labels}{comma}{label}}} {value}"));
    }

    fn value(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.sample(name, "", value);
    }

    fn number(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.value(name, kind, help, value as f64);
    }

    fn histogram(&mut self, (name, help): (&str, &str), bounds: &[f64], histogram: &Histogram) {
        self.head(name, "histogram", help);
        let mut below = 0;
        for (index, bound) in bounds.iter().enumerate() {
            below += histogram.counts.get(index).copied().unwrap_or(0);
            self.sample(&format!("{name}_bucket"), &format!("le=\"{bound:?}\""), below as f64);
        }
        let all: u64 = histogram.counts.iter().sum();
        self.sample(&format!("{name}_bucket"), "le=\"+Inf\"", all as f64);
        self.sample(&format!("{name}_sum"), "", histogram.sum);
        self.sample(&format!("{name}_count"), "", all as f64);
    }

    /// What computes attention, as labels of a constant 1.
    fn path(&mut self, path: &AttentionPath) {
        let name = "shardcheck_serve_attention_info";
        self.head(name, "gauge", "What computes attention");
        let AttentionPath { engine, ranks, interleave_tokens, block_tokens, merge, dtype, kv_dtype, fault } =
            path;
        let fault = fault.as_deref().unwrap_or("");
        let label = format!(
            "attention=\"{}\",dcp=\"{ranks}\",interleave=\"{interleave_tokens}\",block_size=\"{block_tokens}\",\
             merge=\"{}\",dtype=\"{}\",kv_dtype=\"{}\",fault=\"{}\"",
            escape(engine),
            escape(merge),
            escape(dtype),
            escape(kv_dtype),
            escape(fault),
        );
        self.sample(name, &label, 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(metrics: &Metrics, speculates: bool) -> String {
        let path = AttentionPath {
            engine: "sharded".to_string(),
            ranks: 4,
            interleave_tokens: 2,
            block_tokens: 16,
            merge: "a2a".to_string(),
            dtype: "f32".to_string(),
            kv_dtype: "bf16".to_string(),
            fault: None,
        };
        metrics.page("a \"model\"", &path, speculates)
    }

    fn value(page: &str, start: &str) -> f64 {
        let line = page
            .lines()
            .find(|line| line.starts_with(start))
            .unwrap_or_else(|| panic!("no {start} in\n{page}"));
        line.rsplit(' ').next().expect("a value").parse().expect("a number")
    }

    #[test]
    fn counters_and_gauges_show_what_was_counted() {
        let metrics = Metrics::default();
        metrics.running.set(3);
        metrics.generation_tokens.add(5);
        metrics.generation_tokens.add(2);
        metrics.blocks_total.set(8);
        metrics.blocks_held.set(2);
        metrics.finished(&Finish::Length, Duration::from_millis(900));
        metrics.finished(&Finish::End, Duration::from_secs(1000));
        let page = page(&metrics, false);
        assert!(page.contains("vllm:num_requests_running{engine=\"0\",model_name=\"a \\\"model\\\"\"} 3\n"));
        assert_eq!(value(&page, "vllm:generation_tokens_total"), 7.0);
        assert_eq!(value(&page, "vllm:kv_cache_usage_perc"), 0.25);
        let bucket = |le| {
            format!(
                "vllm:e2e_request_latency_seconds_bucket{{engine=\"0\",model_name=\"a \\\"model\\\"\",le=\"{le}\"}}"
            )
        };
        assert_eq!(value(&page, &bucket("0.8")), 0.0);
        assert_eq!(value(&page, &bucket("1.0")), 1.0);
        assert_eq!(value(&page, &bucket("480.0")), 1.0);
        assert_eq!(value(&page, &bucket("+Inf")), 2.0);
        assert!(page.contains(
            "dcp=\"4\",interleave=\"2\",block_size=\"16\",merge=\"a2a\",dtype=\"f32\",kv_dtype=\"bf16\",fault=\"\"} 1"
        ));
    }

    #[test]
    fn speculation_is_shown_only_where_there_is_any() {
        let metrics = Metrics::default();
        metrics.drafted(3, 2);
        metrics.drafted(2, 0);
        metrics.drafted(3, 1);
        assert!(!page(&metrics, false).contains("spec_decode"));
        let page = page(&metrics, true);
        assert_eq!(value(&page, "vllm:spec_decode_num_drafts_total"), 3.0);
        assert_eq!(value(&page, "vllm:spec_decode_num_draft_tokens_total"), 8.0);
        assert_eq!(value(&page, "vllm:spec_decode_num_accepted_tokens_total"), 3.0);
        let at = |position| {
            let start = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
            value(
                &page,
                &format!("{start}{{engine=\"0\",model_name=\"a \\\"model\\\"\",position=\"{position}\"}}"),
            )
        };
        assert_eq!((at(0), at(1), at(2)), (2.0, 1.0, 0.0));
    }

    #[test]
    fn every_sample_belongs_to_a_described_metric() {
        let page = page(&Metrics::default(), true);
        let mut described = String::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                described = rest.split(' ').next().expect("a name").to_string();
            } else if !line.starts_with('#') {
                assert!(line.starts_with(&described), "{line} after {described}");
                line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number");
            }
        }
    }
}
