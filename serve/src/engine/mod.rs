//! The engine: one thread that runs all sequences together, prompt chunks beside single tokens.

pub mod blocks;
pub mod draft;
pub mod logprobs;
pub mod request;
pub mod sampling;
mod scheduler;
mod sequence;

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::attention::Attention;
use crate::metrics::Metrics;
use crate::model::Model;
use crate::tokenizer::Tokenizer;
use request::{GenerateError, GenerateRequest, Generation, SubmitError};
use scheduler::Scheduler;
use sequence::Waiting;

/// Limits of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Sequences that run together.
    pub max_sequences: usize,
    /// Rows of one step that prompts may fill.
    pub prefill_tokens: usize,
    /// Longest sequence, prompt and output.
    pub max_model_tokens: usize,
    /// Requests that may wait.
    pub max_waiting: usize,
    /// Draft tokens per step by prompt lookup; 0 switches speculation off.
    pub draft_tokens: usize,
    /// Whether prompts reuse the blocks of earlier sequences.
    pub prefix_cache: bool,
    /// Threads of the numeric work.
    pub threads: usize,
}

/// The queue between callers and the engine's thread.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    stopping: bool,
    dead: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // A panic elsewhere leaves a queue that is still a queue.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle to the running engine.
pub struct Engine {
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    max_model_tokens: usize,
    max_waiting: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the engine's thread. The sequence limit is lowered to what the cache can hold.
    ///
    /// # Errors
    /// If threads can't be started.
    pub fn start(
        model: Arc<Model>,
        tokenizer: Arc<Tokenizer>,
        attention: Box<dyn Attention>,
        config: EngineConfig,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Self> {
        let cache_tokens = attention.virtual_blocks() * attention.virtual_block_tokens();
        let max_model_tokens = config.max_model_tokens.min(cache_tokens);
        let max_waiting = config.max_waiting;
        let shared = Arc::new(Shared::default());
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(config.threads)
            .thread_name(|index| format!("compute-{index}"))
            .build()
            .map_err(std::io::Error::other)?;
        let scheduler = Scheduler::new(model, tokenizer, attention, config, metrics.clone(), pool);
        let guard = DeathNote(shared.clone());
        let thread = std::thread::Builder::new().name("engine".to_string()).spawn(move || {
            let guard = guard;
            scheduler.run(&guard.0);
        })?;
        Ok(Self { shared, metrics, max_model_tokens, max_waiting, thread: Mutex::new(Some(thread)) })
    }

    /// Longest sequence, prompt and output, in tokens.
    pub fn max_model_tokens(&self) -> usize {
        self.max_model_tokens
    }

    /// Hands a request over; the result comes through the receiver. A receiver whose sender is gone means that the engine
    /// died.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn submit(
        &self,
        request: GenerateRequest,
    ) -> Result<Receiver<Result<Generation, GenerateError>>, SubmitError> {
        let (prompt, max_tokens, limit) = (request.prompt.len(), request.max_tokens, self.max_model_tokens);
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if prompt.saturating_add(max_tokens) > limit {
            return Err(SubmitError::TooLong { limit, prompt, max_tokens });
        }
        let mut queue = self.shared.queue();
        if queue.stopping || queue.dead {
            return Err(SubmitError::Stopped);
        }
        if queue.waiting.len() >= self.max_waiting {
            return Err(SubmitError::QueueFull { waiting: queue.waiting.len() });
        }
        let (reply, result) = channel();
        queue.waiting.push_back(Waiting { request, reply, arrived: Instant::now() });
        self.metrics.waiting.set(queue.waiting.len() as u64);
        self.shared.changed.notify_one();
        Ok(result)
    }

    /// Whether the engine takes requests.
    pub fn alive(&self) -> bool {
        let queue = self.shared.queue();
        !queue.dead && !queue.stopping
    }

    /// Stops the engine and waits for its thread; requests under way end with [`GenerateError::Stopped`].
    pub fn stop(&self) {
        self.shared.queue().stopping = true;
        self.shared.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the engine was printed by its own thread and is known as `dead`.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Marks the engine dead when its thread ends, also by a panic, and lets those that wait know.
struct DeathNote(Arc<Shared>);

impl Drop for DeathNote {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        queue.dead = true;
        for waiting in queue.waiting.drain(..) {
            let _ = waiting.reply.send(Err(GenerateError::Stopped));
        }
    }
}
