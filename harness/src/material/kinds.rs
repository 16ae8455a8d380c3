//! Material by kind of case.

use shardcheck_cases::{Body, Case};
use shardcheck_engine::Profile;

use super::AttentionMaterial;
use crate::accepting::AcceptanceMaterial;
use crate::compressing::CompressMaterial;
use crate::delta::KdaMaterial;
use crate::event::Coverage;
use crate::indexing::IndexMaterial;
use crate::layer::MoeMaterial;
use crate::merging::MergeMaterial;
use crate::prefilling::PrefillMaterial;
use crate::routing::RouteMaterial;
use crate::selecting::SelectMaterial;
use crate::sequence::SequenceMaterial;
use crate::sharing::SharingMaterial;
use crate::stacking::StackMaterial;

/// Material by kind of case.
pub enum Material {
    /// Attention on an engine with caches.
    Attention(Box<AttentionMaterial>),
    /// Merge of given states.
    Merge(Box<MergeMaterial>),
    /// A batch over the ranks of prefill context parallelism.
    Sharing(Box<SharingMaterial>),
    /// Attention of a batch over those ranks.
    Prefilling(Box<PrefillMaterial>),
    /// Selection of tokens for such a batch.
    Indexing(Box<IndexMaterial>),
    /// Compression of its tokens.
    Compressing(Box<CompressMaterial>),
    /// Experts of given logits.
    Route(Box<RouteMaterial>),
    /// A layer of experts over ranks.
    Layer(Box<MoeMaterial>),
    /// Acceptance of drafted tokens.
    Accepting(Box<AcceptanceMaterial>),
    /// Selection of the tokens that rows attend to.
    Selecting(Box<SelectMaterial>),
    /// Kimi delta attention.
    Delta(Box<KdaMaterial>),
    /// Steps of one session.
    Sequence(Box<SequenceMaterial>),
    /// Steps of a session through all layers of a transformer.
    Stack(Box<StackMaterial>),
    /// A step without inputs needs none but itself.
    Step,
    /// Configuration rules need none.
    Rules,
}

impl Material {
    /// Makes the material of `case` for an engine of that profile: its conventions decide what the cache holds, its
    /// contract decides the bounds.
    ///
    /// # Errors
    /// Why the case can't be judged against such an engine.
    pub fn of(case: &Case, profile: &Profile) -> Result<Self, String> {
        // a contract that would let anything pass proves nothing
        profile.check()?;
        let (family, seed) = (case.family, case.seed);
        match &case.body {
            Body::Attention(attention) => AttentionMaterial::new(family, attention.clone(), seed, profile)
                .map(|material| Self::Attention(Box::new(material))),
            Body::Merge(own) => MergeMaterial::new(family, own, seed, profile).map(Box::new).map(Self::Merge),
            Body::Pcp(pcp) => Ok(Self::Sharing(Box::new(SharingMaterial::new(pcp)))),
            Body::AttendPcp(own) => {
                PrefillMaterial::new(own, seed, profile).map(Box::new).map(Self::Prefilling)
            }
            Body::SelectPcp(own) => IndexMaterial::new(own, seed, profile).map(Box::new).map(Self::Indexing),
            Body::CompressPcp(own) => {
                CompressMaterial::new(own, seed, profile).map(Box::new).map(Self::Compressing)
            }
            Body::Acceptance(drafts) => Ok(Self::Accepting(Box::new(AcceptanceMaterial::new(drafts, seed)))),
            Body::SelectSparse(own) => {
                SelectMaterial::new(own, seed, profile).map(Box::new).map(Self::Selecting)
            }
            Body::Kda(kda) => KdaMaterial::new(kda, seed, profile).map(Box::new).map(Self::Delta),
            Body::Route(route) => RouteMaterial::new(route, seed, profile).map(Box::new).map(Self::Route),
            Body::Moe(moe) => MoeMaterial::new(moe, seed, profile).map(Box::new).map(Self::Layer),
            Body::Sequence(own) => {
                SequenceMaterial::new(own, seed, profile).map(Box::new).map(Self::Sequence)
            }
            Body::Stack(own) => StackMaterial::new(own, seed, profile).map(Box::new).map(Self::Stack),
            Body::IndexLayers(_) => Ok(Self::Step),
            Body::Rules(_) => Ok(Self::Rules),
        }
    }

    /// What the case reaches, for the line against vacuity.
    pub fn coverage(&self) -> Coverage {
        match self {
            Self::Attention(material) => material.coverage(),
            Self::Sequence(material) => material.coverage(),
            Self::Stack(material) => material.coverage(),
            _ => Coverage::default(),
        }
    }
}
