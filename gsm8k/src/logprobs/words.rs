//! The text of the probes: common words whose number of tokens is measured once, put together to exact lengths.

use crate::client::{Client, Failure, FailureKind};
use crate::completion::{Completion, CompletionRequest, Logprobs, PromptInput};
use crate::mersenne::PythonRandom;
use crate::outcome::Error;

/// What every probe begins with, so that all words have a space before them.
const LEAD: &str = "Words:";

/// Words that common tokenizers keep in one piece when a space precedes them.
const WORDS: &str = "time year people way day man thing woman life child world school state family student group country \
    problem hand part place case week company system program question work government number night point home water room \
    mother area money story fact month lot right study book eye job word business issue side kind head house service \
    friend father power hour game line end member law car city community name president team minute idea body \
    information back parent face level office door health person art war history party result change morning reason \
    research girl guy moment air teacher force education foot boy age policy music market sense nation plan college \
    interest death experience effect use class control field development role effort rate heart drug show leader light \
    voice wife police mind price report decision son view relationship town road arm difference value building action \
    season society tax director position player record paper space ground form event official matter center couple site \
    project activity star table need court oil situation cost industry figure street image phone data picture practice \
    piece land product doctor wall patient worker news test movie north love support technology step baby computer type \
    attention film tree source organization hair look century evidence window culture chance brother energy period course \
    summer plant opportunity term letter condition choice rule daughter south floor campaign material population call \
    economy hospital church risk fire future bank sport board subject officer rest behavior performance fight top goal \
    bed order author blood agency nature color store sound movement page race concern series language animal factor \
    decade article east artist scene stock";

/// The words with their token counts under one tokenizer.
#[derive(Debug, Clone, PartialEq)]
pub struct Vocabulary {
    /// Each word, with its leading space, and how many tokens it takes.
    words: Vec<(String, u64)>,
    /// Tokens of the lead, with whatever the server puts before a prompt.
    lead_tokens: u64,
}

/// The text of a probe in its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeText {
    /// What is sent to be continued: lead, filler, needle, filler, and the beginning of the needle again.
    pub context: String,
    /// The rest of the needle: what a model that sees the needle writes next.
    pub continuation: String,
    /// Characters from the needle's first character to the end of the context.
    pub needle_chars_before_end: usize,
    /// Characters of the cue, i.e. of the part of the needle that the context repeats.
    pub cue_chars: usize,
}

/// Words of a needle, and how many of them the cue repeats.
const NEEDLE_WORDS: usize = 14;
const CUE_WORDS: usize = 4;

impl Vocabulary {
    /// Measures the words on a server.
    ///
    /// # Errors
    /// [`Error::Server`] or [`Error::Usage`] when the server cannot echo a prompt with log-probabilities, which
    /// everything here rests on.
    pub fn measure(client: &Client, model: &str) -> Result<Self, Error> {
        let words: Vec<String> = WORDS.split_whitespace().map(|word| format!(" {word}")).collect();
        let text = format!("{LEAD}{}", words.concat());
        let echoed = echo(client, model, &text, 1).map_err(|failure| {
            let why = format!(
                "{} cannot echo a prompt with log-probabilities, which `logprobs` needs (the request is lm-eval's: echo, \
                 logprobs 1, max_tokens 1): {failure}",
                client.root_url()
            );
            match failure.kind {
                kind if kind.is_transient() && kind != FailureKind::BadJson => Error::Server(why),
                _ => Error::Usage(why),
            }
        })?;
        Self::from_tokens(words, &echoed.tokens)
    }

    /// Counts the tokens of each word in an echoed list of all of them; words that share a token with a neighbour are
    /// left out.
    fn from_tokens(words: Vec<String>, tokens: &[String]) -> Result<Self, Error> {
        let mut counted = Vec::new();
        let mut rest = tokens;
        for word in words.into_iter().rev() {
            let used = tokens_of_suffix(rest, word.chars().count());
            let (before, last) = rest.split_at(rest.len() - used);
            if last.concat().chars().count() == word.chars().count() {
                counted.push((word, used as u64));
            }
            rest = before;
        }
        if counted.len() < 4 * NEEDLE_WORDS {
            return Err(Error::Usage(format!(
                "only {} of the probe words keep their boundaries under this server's tokenizer; its tokens in logprobs \
                 do not spell the text",
                counted.len()
            )));
        }
        counted.reverse();
        Ok(Self { words: counted, lead_tokens: rest.len() as u64 })
    }

    /// The shortest context with a needle, in tokens.
    pub fn shortest_with_needle(&self) -> u64 {
        let longest = self.words.iter().map(|(_, tokens)| *tokens).max().unwrap_or(1);
        self.lead_tokens + longest * (NEEDLE_WORDS + CUE_WORDS + 4) as u64
    }

    /// A context of about `context_tokens` tokens, exact where the words' counts allow, with a needle whose first
    /// token has about the index `needle_at`. Without room for a needle it is filler only, and its continuation too.
    pub fn compose(&self, context_tokens: u64, needle_at: Option<u64>, seed: u64) -> ProbeText {
        let mut random = PythonRandom::new(seed);
        let order = random.sample(self.words.len(), self.words.len());
        let (needle, filler) = order.split_at(NEEDLE_WORDS);
        let spell =
            |words: &[usize]| words.iter().map(|index| self.words[*index].0.as_str()).collect::<String>();
        let length = |words: &[usize]| words.iter().map(|index| self.words[*index].1).sum::<u64>();
        let cue = &needle[..CUE_WORDS];
        let fixed = self.lead_tokens + length(needle) + length(cue);
        let Some(free) = context_tokens.checked_sub(fixed).filter(|_| needle_at.is_some()) else {
            let context = match context_tokens.checked_sub(self.lead_tokens) {
                Some(free) => format!("{LEAD}{}", spell(&self.fill(free, filler, &mut random))),
                // shorter than the lead: the shortest prompt that there is, one word
                None => spell(&filler[..1]).trim_start().to_owned(),
            };
            let continuation = spell(&needle[CUE_WORDS..]);
            return ProbeText { context, continuation, needle_chars_before_end: 0, cue_chars: 0 };
        };
        let before = needle_at.unwrap_or(0).saturating_sub(self.lead_tokens).min(free);
        let first = self.fill(before, filler, &mut random);
        let second = self.fill(free - length(&first).min(free), filler, &mut random);
        let after_needle = spell(needle) + &spell(&second) + &spell(cue);
        ProbeText {
            context: format!("{LEAD}{}{after_needle}", spell(&first)),
            continuation: spell(&needle[CUE_WORDS..]),
            needle_chars_before_end: after_needle.chars().count(),
            cue_chars: spell(cue).chars().count(),
        }
    }

    /// Random words out of `choice` that take exactly `tokens` tokens, or as many below as their counts allow.
    fn fill(&self, tokens: u64, choice: &[usize], random: &mut PythonRandom) -> Vec<usize> {
        // reachable[n]: whether n tokens can be made of whole words; it only matters near the end
        let horizon = 64.min(tokens) as usize;
        let mut reachable = vec![false; horizon + 1];
        reachable[0] = true;
        for sum in 1..=horizon {
            reachable[sum] = choice.iter().any(|index| {
                let count = self.words[*index].1 as usize;
                count <= sum && reachable[sum - count]
            });
        }
        let mut left = tokens;
        let mut chosen = Vec::new();
        let mut tries = 0;
        while left > 0 && tries < 10_000 {
            tries += 1;
            let index = choice[random.below(choice.len())];
            let Some(after) = left.checked_sub(self.words[index].1) else { continue };
            if after < reachable.len() as u64 && !reachable[after as usize] {
                continue;
            }
            chosen.push(index);
            left = after;
        }
        chosen
    }
}

/// Sends a prompt to be echoed with log-probabilities, as lm-eval does for likelihoods, and returns those of the prompt
/// alone.
///
/// # Errors
/// The request's failure, or [`FailureKind::BadJson`] when the lists do not fit together.
pub fn echo(client: &Client, model: &str, text: &str, top: u32) -> Result<Logprobs, Failure> {
    let request = request(model, text, 1, top, true);
    let (completion, attempts) = client.complete(&request)?;
    let generated = completion.completion_tokens.unwrap_or(1);
    let (logprobs, prompt_tokens) = lists(completion, attempts)?;
    let length = logprobs.tokens.len();
    let kept = prompt_tokens.map_or(length.saturating_sub(generated as usize), |tokens| tokens as usize);
    if kept < 2 || kept > length {
        return Err(malformed(
            format!("{length} tokens were returned for an echoed prompt of {kept}: is echo supported?"),
            attempts,
        ));
    }
    Ok(Logprobs {
        tokens: logprobs.tokens[..kept].to_vec(),
        token_logprobs: logprobs.token_logprobs[..kept].to_vec(),
        top_logprobs: logprobs.top_logprobs.iter().take(kept).cloned().collect(),
        text_offset: Vec::new(),
    })
}

/// Generates greedily; returns the log-probabilities of the generated tokens, the tokens of the prompt, and the text.
///
/// # Errors
/// As [`echo`].
pub fn generate(
    client: &Client,
    model: &str,
    text: &str,
    max_tokens: u32,
    top: u32,
) -> Result<(Logprobs, u64, String), Failure> {
    let (completion, attempts) = client.complete(&request(model, text, max_tokens, top, false))?;
    let written = completion.text.clone();
    let (logprobs, prompt_tokens) = lists(completion, attempts)?;
    let prompt_tokens = prompt_tokens
        .ok_or_else(|| malformed("the answer has no usage.prompt_tokens".to_owned(), attempts))?;
    Ok((logprobs, prompt_tokens, written))
}

/// How many of the last tokens spell at least `chars` characters.
pub fn tokens_of_suffix(tokens: &[String], chars: usize) -> usize {
    let mut spelled = 0;
    let mut used = 0;
    for token in tokens.iter().rev() {
        if spelled >= chars {
            break;
        }
        spelled += token.chars().count();
        used += 1;
    }
    used
}

fn request(model: &str, text: &str, max_tokens: u32, top: u32, echo: bool) -> CompletionRequest {
    CompletionRequest {
        prompt: PromptInput::Text(text.to_owned()),
        model: model.to_owned(),
        max_tokens,
        temperature: 0.0,
        stop: Vec::new(),
        seed: 1234,
        logprobs: Some(top),
        echo,
        return_tokens_as_token_ids: false,
    }
}

fn lists(completion: Completion, attempts: u32) -> Result<(Logprobs, Option<u64>), Failure> {
    let logprobs =
        completion.logprobs.ok_or_else(|| malformed("the answer has no logprobs".to_owned(), attempts))?;
    if logprobs.tokens.len() != logprobs.token_logprobs.len() {
        return Err(malformed("tokens and token_logprobs differ in length".to_owned(), attempts));
    }
    Ok((logprobs, completion.prompt_tokens))
}

fn malformed(detail: String, attempts: u32) -> Failure {
    Failure { kind: FailureKind::BadJson, status: None, detail, attempts }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer that cuts words of more than five letters in two.
    fn tokens(text: &str) -> Vec<String> {
        let mut tokens = vec!["<s>".to_owned(), LEAD.to_owned()];
        for word in
            text.trim_start_matches(LEAD).split_inclusive(' ').map(str::trim).filter(|word| !word.is_empty())
        {
            let word = format!(" {word}");
            if word.len() > 6 {
                let (left, right) = word.split_at(5);
                tokens.extend([left.to_owned(), right.to_owned()]);
            } else {
                tokens.push(word);
            }
        }
        tokens
    }

    fn vocabulary() -> Vocabulary {
        let words: Vec<String> = WORDS.split_whitespace().map(|word| format!(" {word}")).collect();
        let all = tokens(&words.concat());
        Vocabulary::from_tokens(words, &all).unwrap()
    }

    #[test]
    fn token_counts_of_all_words_and_the_lead_are_measured() {
        let vocabulary = vocabulary();
        assert_eq!(vocabulary.lead_tokens, 2);
        assert_eq!(vocabulary.words.len(), WORDS.split_whitespace().count());
        assert!(vocabulary.words.contains(&(" time".to_owned(), 1)));
        assert!(vocabulary.words.contains(&(" people".to_owned(), 2)));
    }

    #[test]
    fn contexts_have_the_wanted_length_and_the_needle_the_wanted_place() {
        let vocabulary = vocabulary();
        for (length, at) in [(80, 20), (81, 21), (333, 100), (1024, 700)] {
            let text = vocabulary.compose(length, Some(at), 7);
            let all = tokens(&text.context);
            assert_eq!(all.len() as u64, length);
            let after_needle = tokens_of_suffix(&all, text.needle_chars_before_end) as u64;
            assert_eq!(length - after_needle, at);
            // the needle occurs once in full and its beginning again at the end
            let needle = text.context[text.context.len() - text.needle_chars_before_end..].to_owned();
            let cue = &text.context[text.context.len() - text.cue_chars..];
            assert!(needle.starts_with(&format!("{cue}{}", text.continuation)), "{text:?}");
            assert_eq!(text.context.matches(&text.continuation).count(), 1);
        }
    }

    #[test]
    fn a_context_without_room_is_filler_of_the_same_length() {
        let text = vocabulary().compose(9, None, 7);
        assert_eq!(tokens(&text.context).len(), 9);
        assert_eq!(text.needle_chars_before_end, 0);
        assert!(!text.continuation.is_empty());
        let shortest = vocabulary().compose(1, None, 7).context;
        assert!(WORDS.split_whitespace().any(|word| word == shortest), "{shortest}");
    }

    #[test]
    fn different_seeds_give_different_texts() {
        let vocabulary = vocabulary();
        assert_ne!(vocabulary.compose(100, Some(20), 1), vocabulary.compose(100, Some(20), 2));
        assert_eq!(vocabulary.compose(100, Some(20), 1), vocabulary.compose(100, Some(20), 1));
    }

    #[test]
    fn tokens_that_do_not_spell_the_text_are_refused() {
        let words: Vec<String> = WORDS.split_whitespace().map(|word| format!(" {word}")).collect();
        let opaque: Vec<String> = (0..300).map(|index| format!("token_id:{index}")).collect();
        assert!(Vocabulary::from_tokens(words, &opaque).unwrap_err().to_string().contains("do not spell"));
    }
}
