//! The examples of docs/protocol.examples.jsonl: each is a message, and comes out as it went in.

use serde_json::Value;
use shardcheck_process::message::{INLINE_BYTES, Question, Said};

#[test]
fn every_example_is_read_and_written_as_it_stands() {
    let text = include_str!("../../../docs/protocol.examples.jsonl");
    let (mut said, mut asked) = (0, 0);
    for line in text.lines() {
        let example: Value = serde_json::from_str(line).unwrap();
        let kind = example["type"].as_str().unwrap();
        let again = if matches!(kind, "hello" | "reply") {
            said += 1;
            let message: Said =
                serde_json::from_value(example.clone()).unwrap_or_else(|e| panic!("{line}: {e}"));
            serde_json::to_value(message).unwrap()
        } else {
            asked += 1;
            let message: Question =
                serde_json::from_value(example.clone()).unwrap_or_else(|e| panic!("{line}: {e}"));
            serde_json::to_value(message).unwrap()
        };
        assert_eq!(again, example, "{line}");
    }
    assert_eq!((said, asked), (7, 25), "a kind of message has an example less");
}

#[test]
fn a_field_that_is_not_known_is_ignored_and_an_unknown_kind_is_refused() {
    let newer = r#"{"type":"welcome","protocol":1,"since":"the future"}"#;
    let older = Question::Welcome { protocol: 1, inline_bytes: INLINE_BYTES };
    assert_eq!(serde_json::from_str::<Question>(newer).unwrap(), older);
    assert!(serde_json::from_str::<Said>(r#"{"type":"shrug","id":1}"#).is_err());
}
