//! The prompts of a run: which shots each question gets, the text that is sent, and the order of sending.

use sha2::{Digest, Sha256};

use crate::dataset::{Dataset, Item, hex, sha256_hex};
use crate::dialect::Dialect;
use crate::mersenne::PythonRandom;

/// One question, ready to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Position of the question in the test file; lm-eval's `doc_id`.
    pub doc_id: usize,
    /// Positions of its shots in the train file, in the order they appear in the text.
    pub shots: Vec<usize>,
    /// The whole prompt.
    pub text: String,
    /// SHA-256 of the text: lm-eval's `prompt_hash`, by which runs are paired.
    pub sha256: String,
}

/// The prompts of the first `limit` questions (all when `None`).
///
/// In the lm-eval dialect one generator lives through the whole run and every question draws its own shots, so
/// the first questions of a shorter run get the same prompts as in a full one.
///
/// # Panics
/// When `num_fewshot` exceeds the number of train questions.
pub fn build(
    data: &Dataset,
    dialect: Dialect,
    num_fewshot: usize,
    fewshot_seed: u64,
    limit: Option<usize>,
) -> Vec<Prompt> {
    let mut random = PythonRandom::new(fewshot_seed);
    data.test
        .iter()
        .take(limit.unwrap_or(usize::MAX))
        .enumerate()
        .map(|(doc_id, item)| {
            let shots = match dialect {
                Dialect::LmEval => random.sample(data.train.len(), num_fewshot),
                Dialect::LastInt => (0..num_fewshot).collect(),
            };
            let text = prompt_text(&data.train, &shots, item);
            let sha256 = sha256_hex(&text);
            Prompt { doc_id, shots, text, sha256 }
        })
        .collect()
}

/// SHA-256 over all prompts joined, the one number that says whether two runs asked the same things.
pub fn joint_sha256(prompts: &[Prompt]) -> String {
    let mut digest = Sha256::new();
    for prompt in prompts {
        digest.update(prompt.text.as_bytes());
    }
    hex(&digest.finalize())
}

/// Indices into `prompts` in the order they are sent: longest text first, equals in file order.
///
/// lm-eval's collator sorts so, by the number of characters (not bytes, not tokens).
pub fn sending_order(prompts: &[Prompt]) -> Vec<usize> {
    let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.text.chars().count()).collect();
    let mut order: Vec<usize> = (0..prompts.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(lengths[*index]));
    order
}

/// How many prompts begin with the same first `shots` shots as an earlier one: what a prefix cache could reuse.
pub fn sharing_first_shots(prompts: &[Prompt], shots: usize) -> usize {
    let mut seen = std::collections::HashSet::new();
    prompts
        .iter()
        .filter(|prompt| prompt.shots.len() >= shots && !seen.insert(&prompt.shots[..shots]))
        .count()
}

/// `Question: …\nAnswer:` after the shots, each with its answer and a blank line (lm-eval `gsm8k.yaml`).
fn prompt_text(train: &[Item], shots: &[usize], item: &Item) -> String {
    let mut text = String::new();
    for shot in shots {
        let example = &train[*shot];
        text.push_str(&format!("Question: {}\nAnswer: {}\n\n", example.question, example.answer));
    }
    text.push_str(&format!("Question: {}\nAnswer:", item.question));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data() -> Dataset {
        let item = |text: String| Item { answer: format!("{text} is it.\n#### 7"), question: text };
        Dataset {
            test: (0..4).map(|index| item(format!("T{}", "é".repeat(index % 3)))).collect(),
            train: (0..40).map(|index| item(format!("S{index}"))).collect(),
            test_sha256: String::new(),
            train_sha256: String::new(),
        }
    }

    #[test]
    fn a_prompt_is_its_shots_and_the_question_without_a_trailing_space() {
        let prompts = build(&data(), Dialect::LastInt, 1, 1234, Some(1));
        assert_eq!(prompts[0].text, "Question: S0\nAnswer: S0 is it.\n#### 7\n\nQuestion: T\nAnswer:");
        let bare = build(&data(), Dialect::LmEval, 0, 1234, Some(1));
        assert_eq!(bare[0].text, "Question: T\nAnswer:");
    }

    #[test]
    fn a_limited_run_keeps_the_prompts_of_the_full_one_and_a_seed_changes_them() {
        let full = build(&data(), Dialect::LmEval, 5, 1234, None);
        assert_eq!(build(&data(), Dialect::LmEval, 5, 1234, Some(2)), full[..2]);
        assert_ne!(build(&data(), Dialect::LmEval, 5, 1, None)[0].text, full[0].text);
        let fixed = build(&data(), Dialect::LastInt, 5, 1234, None);
        assert!(fixed.iter().all(|prompt| prompt.shots == [0, 1, 2, 3, 4]));
        assert_eq!(sharing_first_shots(&fixed, 2), 3);
        assert_eq!(sharing_first_shots(&full, 5), 0);
    }

    #[test]
    fn long_prompts_go_first_by_characters_and_equals_keep_their_order() {
        let prompts = build(&data(), Dialect::LastInt, 0, 0, None);
        // T, Té, Téé, T
        assert_eq!(sending_order(&prompts), [2, 1, 0, 3]);
        assert_ne!(joint_sha256(&prompts), joint_sha256(&prompts[..3]));
    }
}
