//! The threads that send requests: one queue, one journal, and a stop when the server is dead.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use super::RunArgs;
use super::progress::Progress;
use crate::client::{Client, Failure};
use crate::completion::{CompletionRequest, PromptInput};
use crate::dataset::Dataset;
use crate::dialect::Dialect;
use crate::manifest::Session;
use crate::outcome::Error;
use crate::prompts::Prompt;
use crate::samples::{self, Journal};
use crate::server_metrics;

/// How often the server's metrics are read during a run, in seconds.
const WATCH_INTERVAL_S: f64 = 2.0;

/// What the threads share.
struct Shared<'a> {
    args: &'a RunArgs,
    client: &'a Client,
    data: &'a Dataset,
    prompts: &'a [Prompt],
    outstanding: &'a [usize],
    journal: &'a Journal,
    stop_texts: Vec<String>,
    give_up_after: usize,
    next: AtomicUsize,
    done: AtomicBool,
    progress: Progress,
    stopped: Mutex<Option<String>>,
    broken: Mutex<Option<Error>>,
}

/// Sends every outstanding prompt, `concurrency` at a time, and notes in `session` how it went.
pub(super) fn send_all(
    args: &RunArgs,
    client: &Client,
    data: &Dataset,
    prompts: &[Prompt],
    outstanding: &[usize],
    journal: &Journal,
    session: &mut Session,
) -> Result<(), Error> {
    let threads = args.concurrency.min(outstanding.len());
    let mut stop_texts = args.dialect.stop();
    stop_texts.extend(args.eos_string.clone());
    let shared = Shared {
        args,
        client,
        data,
        prompts,
        outstanding,
        journal,
        stop_texts,
        give_up_after: args.give_up_after.unwrap_or(args.concurrency.max(3 * args.attempts as usize)),
        next: AtomicUsize::new(0),
        done: AtomicBool::new(false),
        progress: Progress::new(prompts.len(), prompts.len() - outstanding.len(), args.dialect.filters()),
        stopped: Mutex::new(None),
        broken: Mutex::new(None),
    };
    let started = Instant::now();
    session.server_peak = std::thread::scope(|scope| {
        let watch = (!args.no_metrics)
            .then(|| scope.spawn(|| server_metrics::watch(client, WATCH_INTERVAL_S, &shared.done)));
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| shared.work())).collect();
        for worker in workers {
            worker.join().expect("a sending thread panicked: this is a bug");
        }
        shared.done.store(true, Ordering::Relaxed);
        watch.and_then(|watch| watch.join().expect("the watching thread panicked: this is a bug"))
    });
    session.wall_s = started.elapsed().as_secs_f64();
    session.most_in_flight = client.gauges().most_in_flight();
    (session.answered, session.failed) = shared.progress.finish();
    session.stopped = shared.stopped.into_inner().expect("threads are done");
    match shared.broken.into_inner().expect("threads are done") {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

impl Shared<'_> {
    fn work(&self) {
        while !self.client.gauges().is_stopped() {
            let Some(index) = self.outstanding.get(self.next.fetch_add(1, Ordering::Relaxed)) else { return };
            let prompt = &self.prompts[*index];
            let item = &self.data.test[prompt.doc_id];
            let result = self.client.complete(&self.request(prompt));
            let rows = samples::rows(self.args.dialect, &self.stop_texts, item, prompt, &result);
            if let Err(error) = self.journal.append(&rows) {
                self.client.gauges().stop();
                self.broken.lock().expect("no thread panics here").get_or_insert(error);
                return;
            }
            self.progress.count(&rows);
            if let Err(failure) = result {
                self.consider_stopping(&failure);
            }
        }
    }

    fn request(&self, prompt: &Prompt) -> CompletionRequest {
        CompletionRequest {
            prompt: PromptInput::Text(prompt.text.clone()),
            model: self.args.model.clone(),
            max_tokens: self.args.max_tokens,
            temperature: 0.0,
            stop: self.stop_texts.clone(),
            seed: self.args.request_seed.unwrap_or(Dialect::request_seed(self.args.dialect)),
            logprobs: None,
            echo: false,
            return_tokens_as_token_ids: false,
        }
    }

    /// Stops the run when no other request can work, or when nothing has worked for a while.
    fn consider_stopping(&self, failure: &Failure) {
        let in_a_row = self.client.gauges().failures_in_a_row();
        let reason = if failure.kind.is_fatal() {
            failure.to_string()
        } else if in_a_row >= self.give_up_after {
            format!("{in_a_row} attempts in a row failed, the server seems dead; last: {failure}")
        } else {
            return;
        };
        self.client.gauges().stop();
        let mut stopped = self.stopped.lock().expect("no thread panics here");
        if stopped.is_none() {
            self.progress.note(&reason);
            *stopped = Some(reason);
        }
    }
}
