//! Models whose attention shapes the suites use, read from `models/*.toml`.

use std::sync::LazyLock;

use serde::Deserialize;
use shardcheck_engine::Attention;

/// Name of a model that is none of the list: its shape stands in the case itself.
pub const CUSTOM_MODEL: &str = "custom";

const FILES: [&str; 10] = [
    include_str!("../models/tiny-mla.toml"),
    include_str!("../models/tiny-gqa.toml"),
    include_str!("../models/tiny-gqa16.toml"),
    include_str!("../models/tiny-mha.toml"),
    include_str!("../models/deepseek-r1.toml"),
    include_str!("../models/deepseek-v4.toml"),
    include_str!("../models/kimi-k3.toml"),
    include_str!("../models/glm-5.2.toml"),
    include_str!("../models/llama-70b.toml"),
    include_str!("../models/qwen3-30b.toml"),
];

static MODELS: LazyLock<Vec<Model>> = LazyLock::new(|| FILES.map(read).into());

/// The attention shape of one model, whole (not divided over ranks).
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Name as it stands in case ids.
    pub name: String,
    /// Query heads of a layer.
    pub total_heads: usize,
    /// Query heads that share a KV head (GQA); all of them for MLA.
    pub heads_per_kv_head: usize,
    /// Factor of the scores: (query width before absorption)^−1/2, times the squared yarn factor where the model has one.
    pub softmax_scale: f32,
    /// Block size B that the published launch commands use, in tokens.
    pub default_block: usize,
    /// Head widths that the model's decode kernel dispatches on; empty for any.
    pub kernel_head_widths: Vec<usize>,
    /// Facts that no public source states and that were assumed.
    pub assumed: Vec<String>,
    /// Widths, with the KV heads of the whole layer.
    widths: Attention,
}

impl Model {
    /// Every model, tiny ones first.
    pub fn all() -> &'static [Model] {
        &MODELS
    }

    /// The model of that name.
    pub fn find(name: &str) -> Option<&'static Model> {
        MODELS.iter().find(|model| model.name == name)
    }

    /// Names of all models, for error texts.
    pub fn names() -> String {
        MODELS.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Whether the shape is made for the suites rather than taken from a model that exists.
    pub fn is_tiny(&self) -> bool {
        self.name.starts_with("tiny-")
    }

    /// Attention shape of a rank whose group gathers `gathered_heads` query heads.
    ///
    /// GQA: all ranks of a group hold the KV heads of the group's query heads, `gathered_heads / heads_per_kv_head` of them,
    /// or a single one where the group has only part of a KV head's query heads.
    pub fn attention(&self, gathered_heads: usize) -> Attention {
        match self.widths {
            mla @ Attention::Mla { .. } => mla,
            Attention::Gqa { head_dim, v_head_dim, .. } => {
                let whole = gathered_heads.is_multiple_of(self.heads_per_kv_head);
                let kv_heads = if whole { (gathered_heads / self.heads_per_kv_head).max(1) } else { 1 };
                Attention::Gqa { kv_heads, head_dim, v_head_dim }
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    name: String,
    total_heads: usize,
    default_block: usize,
    kernel_head_widths: Vec<usize>,
    assumed: Vec<String>,
    attention: AttentionFile,
    yarn: Option<Yarn>,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum AttentionFile {
    Mla { kv_lora_rank: usize, qk_rope_head_dim: usize, qk_nope_head_dim: usize, v_head_dim: usize },
    Gqa { kv_heads: usize, head_dim: usize, v_head_dim: usize },
}

/// DeepSeek's yarn: scores are multiplied by m², m = 0.1 · mscale_all_dim · ln factor + 1.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Yarn {
    factor: f64,
    mscale_all_dim: f64,
}

fn read(text: &str) -> Model {
    let file: ModelFile = toml::from_str(text).expect("a model file that the crate ships is well formed");
    let (widths, width, heads_per_kv_head) = match file.attention {
        AttentionFile::Mla { kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim } => (
            Attention::Mla { kv_lora_rank, qk_rope_head_dim, v_head_dim },
            qk_nope_head_dim + qk_rope_head_dim,
            file.total_heads,
        ),
        AttentionFile::Gqa { kv_heads, head_dim, v_head_dim } => {
            (Attention::Gqa { kv_heads, head_dim, v_head_dim }, head_dim, file.total_heads / kv_heads)
        }
    };
    let yarn = file.yarn.map_or(1.0, |yarn| 0.1 * yarn.mscale_all_dim * yarn.factor.ln() + 1.0);
    Model {
        name: file.name,
        total_heads: file.total_heads,
        heads_per_kv_head,
        softmax_scale: ((width as f64).sqrt().recip() * yarn * yarn) as f32,
        default_block: file.default_block,
        kernel_head_widths: file.kernel_head_widths,
        assumed: file.assumed,
        widths,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_file_reads_and_names_are_unique() {
        let mut names: Vec<_> = Model::all().iter().map(|model| model.name.clone()).collect();
        assert!(names.iter().all(|name| !name.contains('/') && name != CUSTOM_MODEL));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), FILES.len());
    }

    #[test]
    fn published_head_counts_and_widths_are_as_the_sources_give_them() {
        let shape = |name: &str| {
            let model = Model::find(name).unwrap();
            (
                model.total_heads,
                model.attention(model.total_heads).qk_dim(),
                model.attention(model.total_heads).v_head_dim(),
            )
        };
        assert_eq!(shape("deepseek-r1"), (128, 576, 128));
        assert_eq!(shape("kimi-k3"), (96, 576, 128));
        assert_eq!(shape("glm-5.2"), (64, 576, 256));
        assert_eq!(shape("llama-70b"), (64, 128, 128));
        assert_eq!(shape("qwen3-30b"), (32, 128, 128));
    }

    #[test]
    fn the_scale_comes_from_the_width_before_absorption_and_yarn_multiplies_it() {
        let scale = |name: &str| f64::from(Model::find(name).unwrap().softmax_scale);
        // (128 + 64)^-1/2 · (0.1 ln 40 + 1)²
        assert!((scale("deepseek-r1") - 0.135_233_8).abs() < 1e-6, "{}", scale("deepseek-r1"));
        assert!((scale("kimi-k3") - 192f64.powf(-0.5)).abs() < 1e-8);
        assert_eq!(scale("glm-5.2"), 0.0625);
    }

    #[test]
    fn a_group_holds_the_kv_heads_of_its_own_query_heads() {
        let llama = Model::find("llama-70b").unwrap();
        assert_eq!(llama.attention(64).kv_heads(), 8);
        assert_eq!(llama.attention(16).kv_heads(), 2);
        assert_eq!(llama.attention(4).kv_heads(), 1, "half the query heads of one KV head");
        assert_eq!(Model::find("tiny-mha").unwrap().attention(6).kv_heads(), 6);
        assert_eq!(Model::find("kimi-k3").unwrap().attention(96).kv_heads(), 1);
    }
}
