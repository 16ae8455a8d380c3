//! Tokens of texts: the tiny vocabulary by hand, the real one against pairs that Hugging Face's tokenizer made.

mod support;

use serde::Deserialize;
use shardcheck_serve::kernels::Simd;
use shardcheck_serve::service::load;
use shardcheck_serve::tokenizer::{Tokenizer, TokenizerError};
use support::real_model;
use support::tiny::{SPECIALS, Tiny};

fn tiny() -> std::sync::Arc<Tokenizer> {
    let tiny = Tiny::new(1);
    load(tiny.file().path(), Simd::detect()).expect("the tiny model").1
}

fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text).expect("every byte has a token");
    ids.iter().map(|id| tokenizer.display(*id)).collect()
}

#[test]
fn merges_apply_inside_words_and_not_across() {
    let tokenizer = tiny();
    assert_eq!(pieces(&tokenizer, "in the inn"), ["in", " the", " ", "in", "n"]);
    assert_eq!(pieces(&tokenizer, "o n"), ["o", " ", "n"]);
    assert_eq!(pieces(&tokenizer, "x12"), ["x", "1", "2"]);
    assert_eq!(pieces(&tokenizer, "é"), ["bytes:\\xc3", "bytes:\\xa9"]);
}

#[test]
fn special_tokens_are_cut_out_of_the_text_first() {
    let tokenizer = tiny();
    let [first, end] = SPECIALS;
    assert_eq!(pieces(&tokenizer, &format!("on{end}{first}he")), ["on", end, first, "he"]);
    assert_eq!(tokenizer.encode(end).expect("a token"), [support::tiny::END]);
    assert!(tokenizer.is_control(1) && !tokenizer.is_control(2));
    assert_eq!(pieces(&tokenizer, "<|im_en").concat(), "<|im_en");
}

#[test]
fn any_text_comes_back_from_its_tokens() {
    let tokenizer = tiny();
    for text in ["", " ", "the  the\n\n", "naïve 漢字 🙂", "\0\u{7f}\u{85}\u{feff}", "a'll 've 12,345.60"]
    {
        let ids = tokenizer.encode(text).expect("every byte has a token");
        assert_eq!(tokenizer.decode(&ids), text.as_bytes(), "{text:?}");
    }
}

#[test]
fn a_megabyte_of_one_letter_is_one_word_and_no_trouble() {
    let ids = tiny().encode(&"n".repeat(1 << 20)).expect("every byte has a token");
    assert_eq!(ids.len(), 1 << 20);
}

#[test]
fn a_byte_without_a_token_is_refused_where_there_is_no_unknown_token() {
    let mut model = Tiny::new(1);
    model.writer.integers("tokenizer.ggml.token_type", &vec![3; model.vocabulary]);
    model.writer.texts("tokenizer.ggml.merges", &[]);
    let (_, tokenizer) = load(model.file().path(), Simd::detect()).expect("a vocabulary of control tokens");
    // Every token is matched as it is written, so only a character that is not written anywhere has no token.
    assert!(matches!(tokenizer.encode("漢"), Err(TokenizerError::UnknownByte(0xe6))));
    assert!(matches!(tokenizer.checked(100_000), Err(TokenizerError::UnknownId { id: 100_000, .. })));
}

#[derive(Deserialize)]
struct Pair {
    text: String,
    ids: Vec<u32>,
}

#[test]
fn smollm2_texts_have_the_tokens_that_hugging_face_gives_them() {
    let Some(path) = real_model("smollm2_texts_have_the_tokens_that_hugging_face_gives_them") else { return };
    let (_, tokenizer) = load(&path, Simd::detect()).expect("the real model");
    let pairs: Vec<Pair> =
        serde_json::from_str(include_str!("fixtures/smollm2_tokens.json")).expect("the fixture");
    assert_eq!(pairs.len(), 40);
    for pair in &pairs {
        assert_eq!(tokenizer.encode(&pair.text).expect("an unknown token"), pair.ids, "{:?}", pair.text);
    }
    let whole = pairs
        .iter()
        .filter(|pair| !pair.ids.contains(&0) && tokenizer.decode(&pair.ids) == pair.text.as_bytes());
    assert!(whole.count() >= 25, "texts of known bytes come back");
}
