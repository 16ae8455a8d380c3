//! The server's own metrics: a reader for the Prometheus text format, and a watch on how busy the server is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::client::Client;

/// One sample of a metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The metric's name, with its suffix (`_total`, …).
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

/// Reads the Prometheus text format (version 0.0.4); lines that do not fit are left out.
pub fn parse(text: &str) -> Vec<Sample> {
    text.lines().map(str::trim).filter(|line| !line.starts_with('#')).filter_map(parse_line).collect()
}

/// The sum of all samples of a metric over its labels, under any of the given names; `None` when there is none.
pub fn sum(samples: &[Sample], names: &[&str]) -> Option<f64> {
    let mut values = samples.iter().filter(|sample| names.contains(&sample.name.as_str())).peekable();
    values.peek()?;
    Some(values.map(|sample| sample.value).sum())
}

/// The most requests that the server itself said it ran and queued, over a run.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ServerPeak {
    /// Requests in the running batch (vLLM `num_requests_running`, SGLang `num_running_reqs`).
    pub running: f64,
    /// Requests waiting (vLLM `num_requests_waiting`, SGLang `num_queue_reqs`).
    pub waiting: f64,
    /// How often the metrics were read.
    pub readings: u32,
}

/// Reads `/metrics` every `interval_s` until `done`, and keeps the largest numbers. `None` without such metrics.
pub fn watch(client: &Client, interval_s: f64, done: &AtomicBool) -> Option<ServerPeak> {
    let mut peak: Option<ServerPeak> = None;
    while !done.load(Ordering::Relaxed) {
        let samples = parse(&client.get("/metrics").ok()?);
        let running = sum(&samples, &["vllm:num_requests_running", "sglang:num_running_reqs"]);
        let waiting = sum(&samples, &["vllm:num_requests_waiting", "sglang:num_queue_reqs"]);
        if let Some(running) = running {
            let peak = peak.get_or_insert_default();
            peak.running = peak.running.max(running);
            peak.waiting = peak.waiting.max(waiting.unwrap_or(0.0));
            peak.readings += 1;
        }
        let until = Instant::now() + Duration::from_secs_f64(interval_s);
        while !done.load(Ordering::Relaxed) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    peak
}

fn parse_line(line: &str) -> Option<Sample> {
    let name_end = line.find(|character: char| character == '{' || character.is_whitespace())?;
    let (name, rest) = line.split_at(name_end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => parse_labels(inside)?,
        None => (BTreeMap::new(), rest),
    };
    let value = match rest.split_whitespace().next()? {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        number => number.parse().ok()?,
    };
    Some(Sample { name: name.to_owned(), labels, value })
}

/// The labels up to the closing brace, and what follows it.
fn parse_labels(text: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next()? {
                (index, '"') => break index + 1,
                (_, '\\') => match characters.next()?.1 {
                    'n' => value.push('\n'),
                    escaped => value.push(escaped),
                },
                (_, character) => value.push(character),
            }
        };
        labels.insert(name.trim().to_owned(), value);
        rest = &after[end..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# HELP vllm:num_requests_running Number of requests\n\
# TYPE vllm:num_requests_running gauge\n\
vllm:num_requests_running{engine=\"0\",model_name=\"a \\\"b\\\" }\\\\\"} 3.0\n\
vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 4 1700000000000\n\
plain_total 7\n\
odd{le=\"+Inf\"} +Inf\n\
broken{ 1\n\
\n";

    #[test]
    fn names_labels_and_values_are_read_and_broken_lines_left_out() {
        let samples = parse(TEXT);
        assert_eq!(samples.len(), 4);
        assert_eq!(samples[0].labels["model_name"], "a \"b\" }\\");
        assert_eq!((samples[2].name.as_str(), samples[2].value), ("plain_total", 7.0));
        assert_eq!(samples[3].value, f64::INFINITY);
    }

    #[test]
    fn engines_are_added_up_and_a_missing_metric_is_not_zero() {
        let samples = parse(TEXT);
        assert_eq!(sum(&samples, &["vllm:num_requests_running"]), Some(7.0));
        assert_eq!(sum(&samples, &["vllm:num_requests_waiting"]), None);
    }
}
