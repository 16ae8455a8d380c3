//! The dialects of the GSM8K run: which shots, which request and which rule of scoring belong together.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::vocabulary::named;

/// A way of running GSM8K. Scores of different dialects must not be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// lm-eval's task `gsm8k`, version 3: shots drawn per question, text equality, two filters.
    LmEval,
    /// vLLM's `tests/evals/gsm8k`: the first shots of the train file for all questions, the last integer counts.
    LastInt,
}

/// A rule that takes the answer out of a completion. Each dialect has its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Filter {
    /// lm-eval `strict-match`: what follows the first `#### `.
    StrictMatch,
    /// lm-eval `flexible-extract`: the last thing that looks like a number.
    FlexibleExtract,
    /// vLLM `get_answer_value`: the last run of digits, commas removed, signs and decimals ignored.
    LastInt,
}

impl Dialect {
    /// Every dialect.
    pub const ALL: [Dialect; 2] = [Dialect::LmEval, Dialect::LastInt];

    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::LmEval => "lm-eval",
            Dialect::LastInt => "last-int",
        }
    }

    /// The filters whose scores this dialect reports, the one that gates by default first.
    pub fn filters(self) -> &'static [Filter] {
        match self {
            Dialect::LmEval => &[Filter::StrictMatch, Filter::FlexibleExtract],
            Dialect::LastInt => &[Filter::LastInt],
        }
    }

    /// Where generation stops (lm-eval `generation_kwargs.until`; vLLM `gsm8k_eval.py`).
    pub fn stop(self) -> Vec<String> {
        let stop: &[&str] = match self {
            Dialect::LmEval => &["Question:", "</s>", "<|im_end|>"],
            Dialect::LastInt => &["Question", "Assistant:", "<|separator|>"],
        };
        stop.iter().map(|text| (*text).to_owned()).collect()
    }

    /// The `seed` of the request body: 1234 in lm-eval, 42 in vLLM's script.
    pub fn request_seed(self) -> u64 {
        match self {
            Dialect::LmEval => 1234,
            Dialect::LastInt => 42,
        }
    }

    /// The task version that reports name; only lm-eval has one.
    pub fn task_version(self) -> Option<f64> {
        match self {
            Dialect::LmEval => Some(3.0),
            Dialect::LastInt => None,
        }
    }
}

impl Filter {
    /// Every filter.
    pub const ALL: [Filter; 3] = [Filter::StrictMatch, Filter::FlexibleExtract, Filter::LastInt];

    /// The name used on the command line, in reports and in sample logs.
    pub fn name(self) -> &'static str {
        match self {
            Filter::StrictMatch => "strict-match",
            Filter::FlexibleExtract => "flexible-extract",
            Filter::LastInt => "last-int",
        }
    }
}

/// The `max_tokens` of every request: the default of lm-eval's `max_gen_toks` and of vLLM's script.
pub const MAX_TOKENS: u32 = 256;
/// The number of shots that all published scores use.
pub const NUM_FEWSHOT: usize = 5;
/// lm-eval's few-shot seed (the fourth of its default `0,1234,1234,1234`).
pub const FEWSHOT_SEED: u64 = 1234;

named!(Dialect, "dialect");
named!(Filter, "filter");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_agree_with_the_json_spelling() {
        for dialect in Dialect::ALL {
            assert_eq!(dialect.name().parse::<Dialect>(), Ok(dialect));
            assert_eq!(serde_json::to_string(&dialect).unwrap(), format!("\"{dialect}\""));
        }
        for filter in Filter::ALL {
            assert_eq!(filter.name().parse::<Filter>(), Ok(filter));
            assert_eq!(serde_json::to_string(&filter).unwrap(), format!("\"{filter}\""));
        }
        assert!("loose".parse::<Filter>().unwrap_err().contains("flexible-extract"));
    }

    #[test]
    fn every_filter_belongs_to_exactly_one_dialect() {
        for filter in Filter::ALL {
            let owners = Dialect::ALL.iter().filter(|dialect| dialect.filters().contains(&filter));
            assert_eq!(owners.count(), 1, "{filter}");
        }
    }
}
