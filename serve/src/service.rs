//! Everything put together: a model file behind an address.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shardcheck_cpu::Fault as EmbeddedFault;
use shardcheck_formats::Dtype;
use thiserror::Error;

use crate::api::Api;
use crate::attention::dtype::OutputDtype;
use crate::attention::embedded::{Embedded, EmbeddedConfig, EmbeddedError};
use crate::attention::fault::Fault;
use crate::attention::interleave::{Interleave, LayoutError};
use crate::attention::merge::MergeOrder;
use crate::attention::sharded::{Sharded, ShardedConfig, ShardedError};
use crate::attention::{Attention, AttentionPath, AttentionShape};
use crate::engine::{Engine, EngineConfig};
use crate::gguf::{Gguf, GgufError};
use crate::http::message::Limits;
use crate::http::server::{Server, ServerConfig};
use crate::kernels::Simd;
use crate::metrics::Metrics;
use crate::model::{Model, ModelError};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Why a service can't start.
#[derive(Debug, Error)]
pub enum ServiceError {
    /// The file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model in it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer in it.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The layout of KV.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The sharded attention.
    #[error(transparent)]
    Sharded(#[from] ShardedError),
    /// The embedded engine.
    #[error(transparent)]
    Embedded(#[from] EmbeddedError),
    /// Threads.
    #[error("cannot start threads: {0}")]
    Threads(std::io::Error),
    /// The address.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Where to.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Who computes attention.
#[derive(Debug, Clone, Copy)]
pub enum AttentionChoice {
    /// This crate's own sharded attention.
    Sharded {
        /// Dtype of partial and merged outputs.
        dtype: OutputDtype,
        /// Injected fault.
        fault: Option<Fault>,
        /// See [`ShardedConfig::fault_max_rows`].
        fault_max_rows: usize,
    },
    /// The project's embedded multi-rank engine.
    Embedded {
        /// Dtype of the KV cache.
        kv_dtype: Dtype,
        /// Injected fault.
        fault: Option<&'static EmbeddedFault>,
    },
}

impl AttentionChoice {
    /// The sharded attention without fault, in f32.
    pub const SHARDED: Self =
        Self::Sharded { dtype: OutputDtype::F32, fault: None, fault_max_rows: usize::MAX };

    /// The embedded engine without fault, with a bf16 cache.
    pub const EMBEDDED: Self = Self::Embedded { kv_dtype: Dtype::Bf16, fault: None };
}

/// Which model, where, and how.
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// GGUF file.
    pub model_path: PathBuf,
    /// Name that clients use.
    pub model_name: String,
    /// Address; port 0 takes a free one.
    pub address: SocketAddr,
    /// DCP ranks W.
    pub ranks: usize,
    /// Interleave S in tokens.
    pub interleave_tokens: usize,
    /// Block B in tokens.
    pub block_tokens: usize,
    /// Merge order.
    pub merge: MergeOrder,
    /// Who computes attention.
    pub attention: AttentionChoice,
    /// Tokens that the KV cache holds.
    pub cache_tokens: usize,
    /// Limits of the engine; its longest sequence is lowered to the model's.
    pub engine: EngineConfig,
    /// Open connections.
    pub max_connections: usize,
    /// Longest request body in bytes.
    pub max_body_bytes: usize,
}

impl ServiceConfig {
    /// One rank on a free loopback port, with the program's default limits.
    pub fn new(model_path: PathBuf) -> Self {
        let model_name =
            model_path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            model_path,
            model_name,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            ranks: 1,
            interleave_tokens: 1,
            block_tokens: 16,
            merge: MergeOrder::A2a,
            attention: AttentionChoice::EMBEDDED,
            cache_tokens: 16_384,
            engine: EngineConfig {
                max_sequences: 8,
                prefill_tokens: 128,
                max_model_tokens: usize::MAX,
                max_waiting: 256,
                draft_tokens: 0,
                prefix_cache: true,
                threads,
            },
            max_connections: 128,
            max_body_bytes: 8 << 20,
        }
    }
}

/// A served model. Dropping it stops it without grace.
pub struct Service {
    server: Server,
    engine: Arc<Engine>,
    path: AttentionPath,
}

impl Service {
    /// Loads the model with the chosen attention and serves it.
    ///
    /// # Errors
    /// [`ServiceError`].
    pub fn start(config: ServiceConfig) -> Result<Self, ServiceError> {
        let layout = Interleave::new(config.ranks, config.interleave_tokens, config.block_tokens)?;
        let (merge, cache_tokens) = (config.merge, config.cache_tokens);
        let attention = config.attention;
        Self::start_with(config, |shape, simd| match attention {
            AttentionChoice::Sharded { dtype, fault, fault_max_rows } => {
                let sharded = ShardedConfig { layout, merge, dtype, fault, fault_max_rows, cache_tokens };
                Ok(Box::new(Sharded::new(shape, sharded, simd)?))
            }
            AttentionChoice::Embedded { kv_dtype, fault } => {
                let embedded = EmbeddedConfig { layout, merge, kv_dtype, fault, cache_tokens };
                Ok(Box::new(Embedded::new(shape, embedded)?))
            }
        })
    }

    /// Loads the model with an attention of the caller's own and serves it: this is where another engine goes in.
    ///
    /// # Errors
    /// [`ServiceError`].
    pub fn start_with(
        mut config: ServiceConfig,
        attention: impl FnOnce(AttentionShape, Simd) -> Result<Box<dyn Attention>, ServiceError>,
    ) -> Result<Self, ServiceError> {
        let (model, tokenizer) = load(&config.model_path, Simd::detect())?;
        let attention = attention(model.config().attention, Simd::detect())?;
        let path = attention.path();
        config.engine.max_model_tokens = config.engine.max_model_tokens.min(model.config().context_tokens);
        let speculates = config.engine.draft_tokens > 0;
        let metrics = Arc::new(Metrics::default());
        let engine = Engine::start(model, tokenizer.clone(), attention, config.engine, metrics.clone());
        let engine = Arc::new(engine.map_err(ServiceError::Threads)?);
        let api = Api::new(engine.clone(), tokenizer, metrics, path.clone(), config.model_name, speculates);
        let limits = Limits { head_bytes: 16 << 10, body_bytes: config.max_body_bytes };
        let server_config = ServerConfig { limits, max_connections: config.max_connections };
        let address = config.address;
        let server = Server::start(address, server_config, Arc::new(api))
            .map_err(|source| ServiceError::Bind { address, source })?;
        Ok(Self { server, engine, path })
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// What computes attention.
    pub fn path(&self) -> &AttentionPath {
        &self.path
    }

    /// Longest sequence, prompt and output, in tokens.
    pub fn max_model_tokens(&self) -> usize {
        self.engine.max_model_tokens()
    }

    /// Takes no more requests, gives those under way up to `grace` to end, and stops. Returns the number of connections
    /// that were not done by then; their requests are answered with an error.
    pub fn stop(mut self, grace: Duration) -> usize {
        let cut = self.server.stop(grace);
        self.engine.stop();
        if cut > 0 {
            // The engine has just failed their requests: time to write those answers.
            self.server.stop(Duration::from_secs(1));
        }
        cut
    }
}

/// A model and its tokenizer from one file.
///
/// # Errors
/// [`ServiceError`].
pub fn load(path: &Path, simd: Simd) -> Result<(Arc<Model>, Arc<Tokenizer>), ServiceError> {
    let gguf = Gguf::open(path)?;
    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    let model = Model::from_gguf(&gguf, simd)?;
    Ok((Arc::new(model), Arc::new(tokenizer)))
}
