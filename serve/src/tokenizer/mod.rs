//! The byte-level BPE tokenizer that a GGUF file carries as tokens and merges.
//!
//! The rules are those of Hugging Face `tokenizers` (`ByteLevel` + `BPE` + added special tokens): special tokens are
//! cut out of the text first, leftmost and longest; the rest is cut into words; inside a word the pair of
//! lowest merge rank is joined first, the leftmost of equals.

mod alphabet;
mod merging;
mod words;

use std::collections::HashMap;

use thiserror::Error;

use crate::gguf::{Gguf, GgufError, Value};
use merging::Merges;
use words::WordRule;

/// Id of a token in the vocabulary.
pub type TokenId = u32;

/// Why a file's tokenizer can't be used, or a text can't be encoded.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// The metadata is absent or of the wrong type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tokenizer family that this crate does not have.
    #[error("`{key}` is \"{found}\"; this server has {supported}")]
    Family {
        /// The metadata key that names the family.
        key: &'static str,
        /// What the file says.
        found: String,
        /// What is there.
        supported: &'static str,
    },
    /// The lists of the vocabulary do not fit together.
    #[error("the vocabulary is damaged: {0}")]
    Vocabulary(String),
    /// A byte that no token stands for, in a vocabulary without an unknown token.
    #[error("no token stands for byte {0:#04x}, and the vocabulary has no unknown token")]
    UnknownByte(u8),
    /// An id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocabulary}")]
    UnknownId {
        /// The id.
        id: u64,
        /// Number of tokens.
        vocabulary: usize,
    },
}

/// ggml's token types that matter here (`enum llama_token_type`).
const NORMAL: i128 = 1;
const CONTROL: i128 = 3;
const USER_DEFINED: i128 = 4;

/// Vocabulary, merges and the rule that cuts text into words.
pub struct Tokenizer {
    /// The bytes that a token stands for.
    tokens: Vec<Vec<u8>>,
    control: Vec<bool>,
    /// Tokens that are matched in text as they are written, longest first.
    specials: Vec<(String, TokenId)>,
    bytes: [Option<TokenId>; 256],
    merges: Merges,
    rule: WordRule,
    unknown: Option<TokenId>,
    ends: Vec<TokenId>,
    start: Option<TokenId>,
}

impl Tokenizer {
    /// Reads `tokenizer.ggml.*`.
    ///
    /// # Errors
    /// [`TokenizerError`]: a key is missing, the family is not GPT-2's byte-level BPE, or the lists do not fit.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        let family = gguf.text("tokenizer.ggml.model")?;
        if family != "gpt2" {
            let (key, found) = ("tokenizer.ggml.model", family.to_string());
            return Err(TokenizerError::Family { key, found, supported: "gpt2 (byte-level BPE)" });
        }
        let pre = gguf.text("tokenizer.ggml.pre")?;
        let rule = WordRule::from_gguf_name(pre).ok_or_else(|| TokenizerError::Family {
            key: "tokenizer.ggml.pre",
            found: pre.to_string(),
            supported: "smollm and gpt-2",
        })?;
        let written = gguf.texts("tokenizer.ggml.tokens")?;
        let types = gguf.integers("tokenizer.ggml.token_type")?;
        if types.len() != written.len() {
            let message = format!("{} tokens but {} token types", written.len(), types.len());
            return Err(TokenizerError::Vocabulary(message));
        }
        let mut tokenizer = Self::without_merges(&written, &types, rule)?;
        let ids: HashMap<&str, TokenId> = (0..).zip(&written).map(|(id, text)| (*text, id)).collect();
        tokenizer.merges = Merges::parse(&gguf.texts("tokenizer.ggml.merges")?, &ids)?;
        let optional = |key: &str| tokenizer.optional_id(gguf, key);
        let unknown = optional("tokenizer.ggml.unknown_token_id")?;
        let mut ends = Vec::new();
        for key in ["eos", "eot", "eom"] {
            ends.extend(optional(&format!("tokenizer.ggml.{key}_token_id"))?);
        }
        let start = match gguf.get("tokenizer.ggml.add_bos_token") {
            Some(Value::Bool(true)) => optional("tokenizer.ggml.bos_token_id")?,
            _ => None,
        };
        Ok(Self { unknown, ends, start, ..tokenizer })
    }

    fn without_merges(written: &[&str], types: &[i128], rule: WordRule) -> Result<Self, TokenizerError> {
        let mut tokens = Vec::with_capacity(written.len());
        let mut specials = Vec::new();
        let mut bytes = [None; 256];
        for (id, (text, kind)) in (0..).zip(written.iter().zip(types)) {
            if *kind != NORMAL {
                tokens.push(text.as_bytes().to_vec());
                if matches!(*kind, CONTROL | USER_DEFINED) && !text.is_empty() {
                    specials.push((text.to_string(), id));
                }
                continue;
            }
            let spelled = alphabet::bytes_of(text).ok_or_else(|| {
                TokenizerError::Vocabulary(format!("token {id} {text:?} is not in the byte-level alphabet"))
            })?;
            if let [byte] = spelled[..] {
                bytes[usize::from(byte)] = Some(id);
            }
            tokens.push(spelled);
        }
        specials.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        let control = types.iter().map(|kind| *kind == CONTROL).collect();
        let merges = Merges::default();
        Ok(Self {
            tokens,
            control,
            specials,
            bytes,
            merges,
            rule,
            unknown: None,
            ends: Vec::new(),
            start: None,
        })
    }

    fn optional_id(&self, gguf: &Gguf, key: &str) -> Result<Option<TokenId>, TokenizerError> {
        if gguf.get(key).is_none() {
            return Ok(None);
        }
        let id = gguf.count(key)? as u64;
        self.checked(id).map(Some)
    }

    /// Number of tokens.
    pub fn vocabulary(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that end a generation (`eos`, `eot`, `eom` of the file).
    pub fn ends(&self) -> &[TokenId] {
        &self.ends
    }

    /// The token that the file wants before every text, if any (`add_bos_token`).
    pub fn start(&self) -> Option<TokenId> {
        self.start
    }

    /// Whether a token is a control token, which is left out of generated text.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.control[id as usize]
    }

    /// The bytes of one token, which need not be UTF-8 by themselves.
    ///
    /// # Panics
    /// If the id is outside the vocabulary.
    pub fn bytes_of(&self, id: TokenId) -> &[u8] {
        &self.tokens[id as usize]
    }

    /// A token as a JSON string can show it: its text, or `bytes:\x..` as OpenAI writes tokens that are not UTF-8.
    pub fn display(&self, id: TokenId) -> String {
        let bytes = self.bytes_of(id);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_string(),
            Err(_) => bytes.iter().fold("bytes:".to_string(), |text, byte| format!("{text}\\x{byte:02x}")),
        }
    }

    /// The bytes of a run of tokens, control tokens included.
    pub fn decode(&self, ids: &[TokenId]) -> Vec<u8> {
        ids.iter().flat_map(|id| self.bytes_of(*id)).copied().collect()
    }

    /// `id` as a token id.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownId`].
    pub fn checked(&self, id: u64) -> Result<TokenId, TokenizerError> {
        let vocabulary = self.vocabulary();
        if id < vocabulary as u64 {
            Ok(id as TokenId)
        } else {
            Err(TokenizerError::UnknownId { id, vocabulary })
        }
    }

    /// The ids of a text, without a start token.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownByte`], only for a vocabulary that lacks both the byte and an unknown token.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        let mut ids = Vec::new();
        let mut rest = text;
        while let Some((at, special, id)) = self.next_special(rest) {
            self.encode_plain(&rest[..at], &mut ids)?;
            ids.push(id);
            rest = &rest[at + special.len()..];
        }
        self.encode_plain(rest, &mut ids)?;
        Ok(ids)
    }

    /// The leftmost special token of a text; of those at one place the longest.
    fn next_special(&self, text: &str) -> Option<(usize, &str, TokenId)> {
        // One pass over the text, as a prompt may hold thousands of special tokens. `specials` is sorted by length.
        (0..text.len()).filter(|at| text.is_char_boundary(*at)).find_map(|at| {
            let (special, id) = self.specials.iter().find(|(special, _)| text[at..].starts_with(special))?;
            Some((at, special.as_str(), *id))
        })
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), TokenizerError> {
        for word in self.rule.split(text) {
            let mut symbols = Vec::with_capacity(word.len());
            for byte in word.bytes() {
                let id = self.bytes[usize::from(byte)].or(self.unknown);
                symbols.push(id.ok_or(TokenizerError::UnknownByte(byte))?);
            }
            self.merges.apply(symbols, ids);
        }
        Ok(())
    }
}
