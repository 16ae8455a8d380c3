//! Cases of layers that share a selection: what a model's configuration may say of its indexers.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{Configuration, IndexSharing, IndexerType, Operation, SharingRule};

use crate::pcp::nothing;
use crate::tokens::Tokens;
use crate::{Body, Case, CaseError, Family};

/// Most layers of a model, and of its drafts.
const MAX_LAYERS: usize = 4096;

/// The layers of one model. Nothing is drawn for it, so its seed is 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexLayersCase {
    /// What the model's configuration says, and whose reading is asked for.
    pub sharing: IndexSharing,
}

impl IndexLayersCase {
    /// What a session for the case is opened with: one rank of nothing.
    pub fn configuration(&self) -> Configuration {
        nothing()
    }

    /// The step.
    pub fn operation(&self) -> Operation {
        Operation::IndexLayers { sharing: self.sharing.clone() }
    }

    /// Checks sizes, and that the first layer has an indexer of its own: there is nobody before it whose selection it could share.
    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        let IndexSharing { rule, layers, draft_layers, frequency, offset, .. } = self.sharing;
        let starts = offset.unwrap_or(0);
        for (name, value, least) in
            [("l", layers, 1), ("m", draft_layers, 0), ("f", frequency, 1), ("o", starts, 0)]
        {
            if value < least || value > MAX_LAYERS {
                return fail(format!("{name} is {value}; it must be between {least} and {MAX_LAYERS}"));
            }
        }
        let letters = [self.sharing.pattern.clone(), self.sharing.types.as_deref().map(letters_of)];
        for letters in letters.into_iter().flatten() {
            if letters.is_empty() || letters.len() > layers || letters.contains(|c| c != 'F' && c != 'S') {
                return fail(format!(
                    "{letters:?} is not one of F and S for each of {layers} layers at most"
                ));
            }
            if letters.starts_with('S') {
                return fail(format!("{letters:?} begins with a layer that shares: nobody is before it"));
            }
        }
        let by_period = rule == SharingRule::Vllm && self.sharing.pattern.is_none() && frequency > 1;
        if by_period && offset == Some(0) {
            return fail("with an offset of 0 the first layer shares, and nobody is before it".to_owned());
        }
        Ok(())
    }

    /// Three parts of an id: the period, the pattern and the types, such as `atom.l8.m1.kept.f4.o3/none/FFSS`.
    pub(crate) fn spell(&self) -> String {
        let IndexSharing { rule, layers, draft_layers, index_cache, frequency, offset, .. } = self.sharing;
        let kept = if index_cache { ".kept" } else { "" };
        let offset = offset.map_or_else(String::new, |offset| format!(".o{offset}"));
        let pattern = self.sharing.pattern.as_deref().unwrap_or("none");
        let types = self.sharing.types.as_deref().map_or_else(|| "none".to_owned(), letters_of);
        format!("{rule}.l{layers}.m{draft_layers}{kept}.f{frequency}{offset}/{pattern}/{types}")
    }

    /// Reads what [`Self::spell`] wrote.
    pub(crate) fn read(period: &str, pattern: &str, types: &str) -> Result<Self, String> {
        let mut tokens = Tokens::split(period);
        let rule = tokens.need("rule", &SharingRule::ALL, SharingRule::name)?;
        let (layers, draft_layers) = (tokens.need_number("l")?, tokens.need_number("m")?);
        let frequency = tokens.need_number("f")?;
        let offset = tokens.take_number("o");
        let index_cache = tokens.take(|token| (token == "kept").then_some(())).is_some();
        tokens.finish()?;
        let given = |text: &str| (text != "none").then(|| text.to_owned());
        let type_of = |letter: char| match letter {
            'F' => Ok(IndexerType::Full),
            'S' => Ok(IndexerType::Shared),
            other => Err(format!("{other:?} is neither F nor S")),
        };
        let types = given(types).map(|types| types.chars().map(type_of).collect()).transpose()?;
        let pattern = given(pattern);
        let sharing =
            IndexSharing { rule, layers, draft_layers, index_cache, frequency, offset, pattern, types };
        Ok(Self { sharing })
    }
}

fn letters_of(types: &[IndexerType]) -> String {
    types.iter().map(|kind| if *kind == IndexerType::Full { 'F' } else { 'S' }).collect()
}

impl Case {
    /// A case of layers that share a selection of the current schema version.
    pub fn index_layers(body: IndexLayersCase) -> Self {
        Self::of(Family::IndexLayers, Body::IndexLayers(body), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_and_the_json_read_back() {
        for id in [
            "index_layers/atom.l8.m1.kept.f4.o3/none/FFSS",
            "index_layers/vllm.l78.m0.f1/FFFSSSF/none",
            "index_layers/atom.l1.m2.f2.o0/none/none",
        ] {
            Case::read_back(id).configuration().unwrap().check().unwrap();
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_reason() {
        for (id, reason) in [
            ("index_layers/atom.l0.m1.f4/none/none", "l is 0"),
            ("index_layers/atom.l8.m1.f0/none/none", "f is 0"),
            ("index_layers/atom.l8.m9999.f1/none/none", "m is 9999"),
            ("index_layers/atom.l2.m0.f1/FSS/none", "at most"),
            ("index_layers/atom.l2.m0.f1/FX/none", "F and S"),
            ("index_layers/atom.l2.m0.f1/none/FX", "neither F nor S"),
            ("index_layers/atom.l2.m0.f1/SF/none", "nobody is before it"),
            ("index_layers/vllm.l4.m0.f2.o0/none/none", "nobody is before it"),
            ("index_layers/sglang.l4.m0.f2/none/none", "rule"),
            ("index_layers/atom.l4.m0/none/none", "\"f\""),
            ("index_layers/atom.l4.m0.f2/none", "parts between slashes"),
        ] {
            let error = id.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains(reason), "{id}: {error}");
        }
        let seeded = Case { seed: 3, ..Case::read_back("index_layers/atom.l4.m0.f2/none/none") };
        assert!(seeded.check().unwrap_err().to_string().contains("seed"));
    }
}
