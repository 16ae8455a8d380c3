//! What the layers of a stack are: kinds, their order, and the numbers of layers among those of one kind.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What mixes the rows of a sequence in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerKind {
    /// Latent attention over a KV cache, which decode context parallelism shards by token.
    Latent,
    /// The same over the tokens that the step names for each row, in this layer.
    Selecting,
    /// The same over the tokens of the last layer before it that had some named.
    Sharing,
    /// Kimi delta attention behind a state of each request, which is sharded by head alone.
    Recurrent,
}

impl LayerKind {
    /// All kinds, in a stable order.
    pub const ALL: [Self; 4] = [Self::Latent, Self::Selecting, Self::Sharing, Self::Recurrent];

    /// Letter of a pattern.
    pub fn letter(self) -> char {
        match self {
            Self::Latent => 'm',
            Self::Selecting => 's',
            Self::Sharing => 'r',
            Self::Recurrent => 'k',
        }
    }

    /// Whether it attends over a KV cache.
    pub fn attends(self) -> bool {
        self != Self::Recurrent
    }
}

/// The kind of each layer, a letter for each from the first one on: `kkkm` is three recurrent layers and a latent one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LayerPattern {
    /// Place of each layer's kind among all kinds, two bits each.
    places: [u64; 4],
    count: u8,
}

impl LayerPattern {
    /// Most layers.
    pub const MOST: usize = 128;

    /// Kinds of layers, in order.
    pub fn kinds(&self) -> Vec<LayerKind> {
        (0..usize::from(self.count)).filter_map(|layer| self.kind(layer)).collect()
    }

    /// Kind of a layer.
    pub fn kind(&self, layer: usize) -> Option<LayerKind> {
        let place = self.places.get(layer / 32)? >> (2 * (layer % 32)) & 3;
        (layer < usize::from(self.count)).then(|| LayerKind::ALL[place as usize])
    }

    /// The first layers alone; all of them where there are not so many.
    pub fn first(&self, layers: usize) -> Option<Self> {
        self.to_string().get(..layers.min(usize::from(self.count)))?.parse().ok()
    }
}

impl FromStr for LayerPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let count = text.chars().count();
        if !(1..=Self::MOST).contains(&count) {
            return Err(format!("{count} layers in the pattern {text:?}; there may be 1 to {}", Self::MOST));
        }
        let mut places = [0; 4];
        for (layer, letter) in text.chars().enumerate() {
            let known = LayerKind::ALL.into_iter().position(|known| known.letter() == letter);
            let place = known.ok_or_else(|| {
                let letters = LayerKind::ALL.map(|kind| kind.letter().to_string()).join(", ");
                format!("unknown kind of layer {letter:?} in {text:?}; known are {letters}")
            })?;
            places[layer / 32] |= (place as u64) << (2 * (layer % 32));
        }
        Ok(Self { places, count: count as u8 })
    }
}

impl TryFrom<String> for LayerPattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<LayerPattern> for String {
    fn from(pattern: LayerPattern) -> Self {
        pattern.to_string()
    }
}

impl fmt::Display for LayerPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kinds().iter().try_for_each(|kind| write!(f, "{}", kind.letter()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_its_letters_and_reads_back() {
        let pattern: LayerPattern = "kkkmm".parse().unwrap();
        assert_eq!(pattern.to_string(), "kkkmm");
        assert_eq!(pattern.kinds()[2..4], [LayerKind::Recurrent, LayerKind::Latent]);
        assert_eq!(serde_json::to_value(pattern).unwrap(), "kkkmm");
        assert_eq!(serde_json::from_value::<LayerPattern>("kkkmm".into()).unwrap(), pattern);
        assert_eq!(pattern.first(2).unwrap().to_string(), "kk");
        assert_eq!((pattern.kind(4), pattern.kind(5)), (Some(LayerKind::Latent), None));
        let long = "msrk".repeat(32);
        assert_eq!(long.parse::<LayerPattern>().unwrap().to_string(), long);
        for wrong in ["", "kx", &"m".repeat(129)] {
            assert!(wrong.parse::<LayerPattern>().is_err(), "{wrong}");
        }
    }
}
