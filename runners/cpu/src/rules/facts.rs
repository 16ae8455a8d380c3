//! Launch settings as the rules read them, coerced as the engines coerce them.

use serde_json::{Map, Value};
use shardcheck_engine::{RuleSetName, Settings};

/// A setting that the rules know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Name.
    pub name: &'static str,
    /// Type and default.
    pub default: &'static str,
    /// What it says.
    pub meaning: &'static str,
}

const fn setting(name: &'static str, default: &'static str, meaning: &'static str) -> Setting {
    Setting { name, default, meaning }
}

/// Every setting that the rules know.
pub const SETTING_NAMES: &[Setting] = &[
    setting("tensor_parallel_size", "integer, 1", "tp"),
    setting("decode_context_parallel_size", "integer, 1", "dcp, W"),
    setting("prefill_context_parallel_size", "integer, 1", "pcp"),
    setting("data_parallel_size", "integer, 1", "dp"),
    setting("pipeline_parallel_size", "integer, 1", "pp"),
    setting("world_size", "integer, pp·tp·pcp", "processes of one replica"),
    setting("block_size", "integer, 16", "tokens of a physical block, B"),
    setting(
        "dcp_config",
        "object, {}",
        "interleave_size 1, enable_query_replication true, enable_project_before_merge true, comm_backend \"a2a\" \
         (ATOM, and this engine)",
    ),
    setting("cp_kv_cache_interleave_size", "integer, 1", "interleave size S (vLLM, vLLM-Ascend)"),
    setting("dcp_comm_backend", "text, \"ag_rs\"", "exchange (vLLM, vLLM-Ascend)"),
    setting("speculative_tokens", "integer, 0", "draft tokens a step"),
    setting("speculative_method", "text, \"\"", "mtp, eagle3, dspark, …"),
    setting("dynamic_speculation", "truth, false", "draft length chosen step by step (vLLM-Ascend)"),
    setting("supports_mtp_with_interleave", "truth, false", "attention verifies drafts with S > 1 (vLLM)"),
    setting("arch", "text, \"gfx950\"", "gfx942, gfx950, a2, a3, a5, …"),
    setting("mxfp4", "truth, false", "absorbed products in mxfp4 (ATOM)"),
    setting("attention", "text, \"mla\", \"gqa\" where kv_heads > 1", "mla or gqa"),
    setting("query_heads", "integer, unknown", "query heads of the model"),
    setting("kv_heads", "integer, unknown", "KV heads of the model, 1 for MLA"),
    setting("draft_query_heads", "integer, unknown", "query heads of the draft model (vLLM-Ascend)"),
    setting("draft_model", "text, \"\"", "kind of the draft model: qwen3_dflash, qwen3_dspark, … (vLLM)"),
    setting("draft_kv_dtype", "text, \"auto\"", "format of the draft's cache (vLLM)"),
    setting(
        "draft_kv_heads",
        "integer, unknown",
        "KV heads of the draft model, 1 for MLA (vLLM, vLLM-Ascend)",
    ),
    setting("sparse", "truth, false", "sparse attention (DSA)"),
    setting("query_len", "integer, 1 + speculative_tokens", "rows a request in decode"),
    setting(
        "query_projection_widened",
        "truth, true",
        "the layer's query projection emits the group's heads (ATOM)",
    ),
    setting(
        "query_scale_layout",
        "text, \"none\"",
        "none, per_tensor, per_token, per_1x128, per_1x32 (ATOM)",
    ),
    setting("enable_tbo", "false, \"prefill\" or \"all\", false", "two-batch overlap (ATOM)"),
    setting("tbo_token_split", "truth, false", "two-batch overlap splits at the token midpoint (ATOM)"),
    setting("pcp_moe_merge", "truth, true", "experts sharded over pcp (ATOM)"),
    setting("enable_dp_attention", "truth, false", "data-parallel attention (ATOM)"),
    setting("forced_acceptance", "truth, false", "benchmark mode that accepts drafts by a schedule (ATOM)"),
    setting("confidence_schedule", "truth, false", "draft length by confidence (ATOM)"),
    setting("kv_transfer", "truth, false", "KV caches travel between instances"),
    setting("sparse_kv_offload", "truth, false", "sparse KV offload (vLLM-Ascend)"),
    setting("replicated_indexer", "truth, false", "indexer cache on every rank (vLLM-Ascend)"),
    setting("runner", "text, \"v1\"", "model runner v1 or v2 (vLLM-Ascend; v2 when absent in vLLM)"),
    setting("max_model_len", "integer, unlimited", "longest request in tokens"),
    setting("lora", "truth, false", "LoRA adapters"),
    setting("encoder_decoder", "truth, false", "encoder-decoder model"),
    setting("multimodal", "truth, false", "multimodal model"),
    setting("full_graph", "truth, false", "full graphs are captured"),
    setting("piecewise_graph", "truth, false", "piecewise graphs are captured"),
    setting("returns_decode_lse", "truth, true", "attention returns the LSE of decode (vLLM)"),
    setting("supports_pcp", "truth, true", "attention supports pcp (vLLM)"),
];

/// Two-batch overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlap {
    /// Off.
    Off,
    /// Prefill only.
    Prefill,
    /// Prefill and decode.
    All,
}

/// A switch with a default: what it says, and whether the user said it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switch {
    /// Whether it is on.
    pub on: bool,
    /// Whether the user set it.
    pub asked: bool,
}

/// Settings as the rules read them.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Settings as given.
    pub raw: Settings,
    /// Tensor-parallel size.
    pub tp: i64,
    /// Decode-context-parallel size.
    pub dcp: i64,
    /// Prefill-context-parallel size.
    pub pcp: i64,
    /// Interleave size.
    pub interleave: i64,
    /// Block size.
    pub block_size: i64,
    /// Exchange.
    pub comm_backend: String,
    /// Query replication.
    pub query_replication: Switch,
    /// Project before merge.
    pub project_before_merge: Switch,
    /// Whether drafts are verified.
    pub speculative: bool,
    /// Hardware.
    pub arch: String,
    /// Latent attention, or grouped-query attention.
    pub mla: bool,
    /// Query heads, where known.
    pub query_heads: Option<i64>,
    /// KV heads, where known.
    pub kv_heads: Option<i64>,
    /// Two-batch overlap.
    pub overlap: Overlap,
}

impl Facts {
    /// Reads settings with the defaults and coercions of an engine.
    ///
    /// # Errors
    /// The refusal of a value that the engine's own coercion refuses.
    pub fn read(set: RuleSetName, settings: &Settings) -> Result<Self, String> {
        let config = DcpConfig::read(settings)?;
        let atom_like = matches!(set, RuleSetName::Atom | RuleSetName::AtomNext | RuleSetName::Own);
        let interleave = settings.integer("cp_kv_cache_interleave_size", 1);
        let known = |name: &str| settings.get(name).map(|_| settings.integer(name, 0));
        let kv_heads = known("kv_heads");
        let attention = settings.text("attention", if kv_heads.unwrap_or(1) > 1 { "gqa" } else { "mla" });
        Ok(Self {
            tp: settings.integer("tensor_parallel_size", 1),
            dcp: settings.integer("decode_context_parallel_size", 1),
            pcp: settings.integer("prefill_context_parallel_size", 1),
            interleave: if atom_like { config.interleave.unwrap_or(interleave) } else { interleave },
            block_size: settings.integer("block_size", 16),
            comm_backend: match (atom_like, config.comm_backend) {
                (true, Some(backend)) => backend,
                (true, None) => settings.text("dcp_comm_backend", "a2a").to_owned(),
                (false, _) => settings.text("dcp_comm_backend", "ag_rs").to_owned(),
            },
            query_replication: config.query_replication,
            project_before_merge: config.project_before_merge,
            speculative: settings.integer("speculative_tokens", 0) > 0
                || !settings.text("speculative_method", "").is_empty(),
            arch: settings.text("arch", "gfx950").to_owned(),
            mla: attention != "gqa",
            query_heads: known("query_heads"),
            kv_heads,
            overlap: overlap(settings)?,
            raw: settings.clone(),
        })
    }

    /// Whether a truth setting holds.
    pub fn truth(&self, name: &str, default: bool) -> bool {
        self.raw.truth(name, default)
    }

    /// An integer setting.
    pub fn integer(&self, name: &str, default: i64) -> i64 {
        self.raw.integer(name, default)
    }

    /// Query heads that a group gathers, where known.
    pub fn gathered_heads(&self) -> Option<i64> {
        self.query_heads.filter(|_| self.tp >= 1).map(|heads| heads * self.dcp / self.tp)
    }

    /// Rows a request in decode.
    pub fn query_len(&self) -> i64 {
        self.integer("query_len", 1 + self.integer("speculative_tokens", i64::from(self.speculative)))
    }
}

fn overlap(settings: &Settings) -> Result<Overlap, String> {
    match settings.get("enable_tbo") {
        None | Some(Value::Null | Value::Bool(false)) => Ok(Overlap::Off),
        Some(Value::Bool(true)) => Ok(Overlap::Prefill),
        Some(Value::String(text)) => match text.as_str() {
            "prefill" => Ok(Overlap::Prefill),
            "all" => Ok(Overlap::All),
            _ => Err(format!("enable_tbo {text:?} is neither prefill nor all")),
        },
        Some(other) => Err(format!("enable_tbo {other} is neither prefill nor all")),
    }
}

/// ATOM's `--dcp-config`, coerced as its data class does: `int()`, `bool()` (any non-empty text is true), `str()`.
struct DcpConfig {
    interleave: Option<i64>,
    query_replication: Switch,
    project_before_merge: Switch,
    comm_backend: Option<String>,
}

impl DcpConfig {
    const KEYS: [&'static str; 4] =
        ["interleave_size", "enable_query_replication", "enable_project_before_merge", "comm_backend"];

    fn read(settings: &Settings) -> Result<Self, String> {
        let none = Map::new();
        let object = match settings.get("dcp_config") {
            None | Some(Value::Null) => &none,
            Some(Value::Object(object)) => object,
            Some(other) => return Err(format!("dcp_config {other} is no JSON object")),
        };
        if let Some(unknown) = object.keys().find(|key| !Self::KEYS.contains(&key.as_str())) {
            return Err(format!("unknown dcp_config key {unknown:?}; known are {}", Self::KEYS.join(", ")));
        }
        let inner = Settings(object.iter().map(|(key, value)| (key.clone(), value.clone())).collect());
        let switch = |key: &str| Switch { on: inner.truth(key, true), asked: inner.get(key).is_some() };
        Ok(Self {
            interleave: inner.get("interleave_size").map(python_int).transpose()?,
            query_replication: switch("enable_query_replication"),
            project_before_merge: switch("enable_project_before_merge"),
            comm_backend: inner.get("comm_backend").map(|value| match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            }),
        })
    }
}

/// Python's `int()` of a JSON value.
fn python_int(value: &Value) -> Result<i64, String> {
    let parsed = match value {
        Value::Number(number) => number.as_i64().or_else(|| number.as_f64().map(|v| v.trunc() as i64)),
        Value::String(text) => text.trim().parse().ok(),
        Value::Bool(truth) => Some(i64::from(*truth)),
        _ => None,
    };
    parsed.ok_or_else(|| format!("interleave_size {value} is no integer"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(config: Value) -> Result<Facts, String> {
        Facts::read(RuleSetName::Atom, &Settings::new().with("dcp_config", config))
    }

    #[test]
    fn the_four_knobs_default_to_the_new_path() {
        let facts = read(json!({})).unwrap();
        assert_eq!((facts.interleave, facts.comm_backend.as_str()), (1, "a2a"));
        assert!(facts.query_replication.on && facts.project_before_merge.on);
        assert!(!facts.query_replication.asked);
    }

    #[test]
    fn values_are_coerced_as_python_coerces_them() {
        let facts = read(json!({"interleave_size": "8", "enable_query_replication": 0})).unwrap();
        assert_eq!(facts.interleave, 8);
        assert!(!facts.query_replication.on);
        assert!(read(json!({"enable_query_replication": "false"})).unwrap().query_replication.on);
        assert!(read(json!({"interleave_size": "eight"})).is_err());
        // a truth is an integer in Python, a list is none
        let [on, off] =
            [true, false].map(|truth| read(json!({"interleave_size": truth})).unwrap().interleave);
        assert_eq!((on, off), (1, 0));
        assert!(read(json!({"interleave_size": [8]})).is_err());
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = read(json!({"interleave": 2})).unwrap_err();
        assert!(error.contains("\"interleave\"") && error.contains("interleave_size"), "{error}");
    }

    #[test]
    fn setting_names_are_unique() {
        let mut names: Vec<_> = SETTING_NAMES.iter().map(|setting| setting.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
