//! Conformance with lm-eval 0.4.13: every prompt, every scored row and the aggregate of its own recorded output.

mod support;

use serde_json::Value;
use shardcheck_gsm8k::dataset::Dataset;
use shardcheck_gsm8k::dialect::{Dialect, FEWSHOT_SEED, Filter, NUM_FEWSHOT};
use shardcheck_gsm8k::prompts;
use shardcheck_gsm8k::score::Score;
use shardcheck_gsm8k::scoring::{self, INVALID};
use support::{fixtures, json_lines};

fn indices(row: &Value) -> Vec<usize> {
    let list = row["fewshot_train_indices"].as_array().unwrap();
    list.iter().map(|index| index.as_u64().unwrap() as usize).collect()
}

#[test]
fn all_prompts_equal_those_of_lm_eval() {
    let Some(folder) = fixtures() else { return };
    let data = Dataset::load(&folder).unwrap();
    assert!(data.is_published());
    let built = prompts::build(&data, Dialect::LmEval, NUM_FEWSHOT, FEWSHOT_SEED, None);
    let expected = json_lines(&folder.join("prompt_index.jsonl"));
    assert_eq!((built.len(), expected.len()), (1319, 1319));
    for (prompt, row) in built.iter().zip(&expected) {
        assert_eq!(prompt.doc_id as u64, row["doc_id"].as_u64().unwrap());
        assert_eq!(prompt.shots, indices(row), "doc {}", prompt.doc_id);
        assert_eq!(prompt.sha256, row["prompt_sha256"].as_str().unwrap(), "doc {}", prompt.doc_id);
    }
    assert_eq!(
        prompts::joint_sha256(&built),
        "fe55992daa961797e918bae55b1fec70d674ace3e0b1a538d04d52564cb271af"
    );
    // what a prefix cache can reuse in an lm-eval run
    assert_eq!(prompts::sharing_first_shots(&built, 2), 0);
    assert_eq!(prompts::sharing_first_shots(&built, 1), 111);
}

#[test]
fn the_recorded_prompts_are_equal_to_the_letter_and_the_request_to_its_fields() {
    let Some(folder) = fixtures() else { return };
    let data = Dataset::load(&folder).unwrap();
    let built = prompts::build(&data, Dialect::LmEval, NUM_FEWSHOT, FEWSHOT_SEED, None);
    let expected = json_lines(&folder.join("prompts_fixture.jsonl"));
    assert_eq!(expected.len(), 5);
    for row in &expected {
        let doc_id = row["doc_id"].as_u64().unwrap() as usize;
        assert_eq!(built[doc_id].text, row["prompt"].as_str().unwrap());
        assert_eq!(data.test[doc_id].answer, row["gold"].as_str().unwrap());
        let until: Vec<&str> = row["gen_kwargs"]["until"]
            .as_array()
            .unwrap()
            .iter()
            .map(|stop| stop.as_str().unwrap())
            .collect();
        assert_eq!(Dialect::LmEval.stop(), until);
    }
}

#[test]
fn every_scored_row_agrees_in_both_filters_and_so_does_the_aggregate() {
    let Some(folder) = fixtures() else { return };
    let rows = json_lines(&folder.join("scoring_fixture.jsonl"));
    assert_eq!(rows.len(), 301);
    let aggregate: Value = serde_json::from_str(
        &std::fs::read_to_string(folder.join("scoring_fixture_aggregate.json")).unwrap(),
    )
    .unwrap();
    for (filter, name) in [(Filter::StrictMatch, "strict"), (Filter::FlexibleExtract, "flexible")] {
        let verdicts: Vec<bool> = rows
            .iter()
            .map(|row| {
                let output = row["output"].as_str().unwrap();
                let scored = scoring::score(filter, output, row["gold"].as_str().unwrap());
                assert_eq!(
                    scored.extracted,
                    row[format!("{name}_extracted")].as_str().unwrap(),
                    "{output:?}"
                );
                assert_eq!(scored.correct, row[name] == 1.0, "{output:?}");
                scored.correct
            })
            .collect();
        let score = Score::of(verdicts);
        let near = |value: f64, key: &str| (value - aggregate[key].as_f64().unwrap()).abs() < 1e-12;
        assert!(near(score.mean(), &format!("{name}_mean")), "{score}");
        assert!(near(score.stderr(), &format!("{name}_stderr")), "{score}");
    }
}

#[test]
fn every_row_agrees_with_the_last_integer_rule() {
    let Some(folder) = fixtures() else { return };
    let rows = json_lines(&folder.join("scoring_fixture_lastint.jsonl"));
    assert_eq!(rows.len(), 301);
    for row in &rows {
        let output = row["output"].as_str().unwrap();
        let gold = row["gold"].as_str().unwrap();
        let scored = scoring::score(Filter::LastInt, output, gold);
        let expected = row["last_int"].as_i64().map_or(INVALID.to_owned(), |value| value.to_string());
        assert_eq!(scored.extracted, expected, "{output:?}");
        assert_eq!(scoring::last_int(gold), row["gold_int"].as_i64().map(|value| value.to_string()));
        assert_eq!(scored.correct, row["correct"] == 1.0, "{output:?}");
    }
}

#[test]
fn a_gold_answer_scores_as_right_under_every_filter_and_question() {
    let Some(folder) = fixtures() else { return };
    let data = Dataset::load(&folder).unwrap();
    let mut with_comma_or_sign = 0;
    for item in &data.test {
        let answer = item.answer.rsplit_once("#### ").unwrap().1;
        with_comma_or_sign += usize::from(!answer.bytes().all(|byte| byte.is_ascii_digit()));
        for filter in Filter::ALL {
            assert!(scoring::score(filter, &item.answer, &item.answer).correct, "{filter}: {}", item.answer);
        }
    }
    assert_eq!(with_comma_or_sign, 16);
}
