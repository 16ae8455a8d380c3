//! What the page holds, and what it must not let through.

use super::*;
use crate::sample;

fn page() -> String {
    let glossary = Glossary::new([("attention.bound", "the output is attention over the visible keys")]);
    render(&sample::record(), &glossary).unwrap()
}

/// Names of the elements that are open when the text ends, with every mismatch on the way as an error.
fn check_nesting(html: &str) -> Result<(), String> {
    const VOID: [&str; 6] = ["meta", "input", "line", "rect", "br", "!doctype"];
    let mut open: Vec<String> = Vec::new();
    let mut rest = html;
    while let Some(start) = rest.find('<') {
        rest = &rest[start + 1..];
        let end = rest.find('>').ok_or("a tag is not closed")?;
        let (tag, after) = (&rest[..end], &rest[end + 1..]);
        let name: String =
            tag.trim_start_matches('/').chars().take_while(|c| c.is_alphanumeric() || *c == '!').collect();
        let name = name.to_lowercase();
        if tag.starts_with('/') {
            let expected = open.pop();
            if expected.as_deref() != Some(name.as_str()) {
                return Err(format!("</{name}> closes {expected:?}"));
            }
        } else if !VOID.contains(&name.as_str()) || (name == "rect" && !tag.ends_with('/')) {
            if matches!(name.as_str(), "script" | "style") {
                let close = format!("</{name}>");
                rest = &after[after.find(&close).ok_or("raw text is not closed")? + close.len()..];
                continue;
            }
            open.push(name);
        }
        rest = after;
    }
    if open.is_empty() { Ok(()) } else { Err(format!("left open: {open:?}")) }
}

#[test]
fn the_page_is_well_nested() {
    // a rect has a title inside, so it is no void element there
    let html = page();
    check_nesting(&html).unwrap_or_else(|error| panic!("{error}"));
    assert!(check_nesting("<p><b></p>").is_err(), "the check itself can fail");
}

#[test]
fn hostile_ids_stay_text() {
    let html = page();
    assert!(!html.contains("<script>alert"), "an id became an element");
    assert!(html.contains("verify&#x2f;&lt;script&gt;alert(&#x27;1&#x27;)"), "the id is not there");
    assert_eq!(html.matches("<script").count(), 1, "the page's own script only");
}

#[test]
fn the_page_asks_for_nothing_from_the_network() {
    let html = page();
    for foreign in ["http://", "https://", "src=", "@import", "url(", "<link"] {
        assert!(!html.contains(foreign), "{foreign} is in the page");
    }
    assert!(html.contains("default-src 'none'"));
}

#[test]
fn verdict_and_environment_come_first() {
    let html = page();
    let places: Vec<usize> = [
        "exit code 1: something failed",
        "id=\"environment\"",
        "id=\"failures\"",
        "id=\"grid\"",
        "id=\"cases\"",
    ]
    .map(|part| html.find(part).unwrap_or_else(|| panic!("{part} is missing")))
    .to_vec();
    assert!(places.is_sorted(), "{places:?}");
}

#[test]
fn every_link_inside_the_page_has_its_target() {
    let html = page();
    let mut checked = 0;
    for part in html.split("href=\"#").skip(1) {
        let target = &part[..part.find('"').unwrap()];
        assert!(html.contains(&format!("id=\"{target}\"")), "#{target} leads nowhere");
        checked += 1;
    }
    assert!(checked > 15, "{checked}");
}

#[test]
fn the_page_tells_the_same_numbers_as_the_other_reports() {
    let html = page();
    let summary = crate::summary::Summary::of(&sample::record());
    assert!(html.contains(&summary.vacuity_line()));
    assert!(html.contains("2 fail of 2<small>25.0</small>"), "the cell of the failing property");
    assert!(html.contains("2 hold<small>0.500</small>"), "the cell of the property that holds");
    assert!(html.contains("the output is attention over the visible keys"));
    assert!(html.contains("survived") && html.contains("swap-lanes"));
    assert_eq!(html.matches("data-status=").count(), 7);
}

#[test]
fn a_killed_run_says_that_it_did_not_end() {
    let mut record = sample::record();
    record.finished = None;
    let html = render(&record, &Glossary::default()).unwrap();
    assert!(html.contains("did not come to its end; so far: something failed"));
}

#[test]
fn a_case_keeps_its_anchor_from_run_to_run() {
    assert_eq!(case_anchor("abc"), "case-6437b3ac3846", "from the published BLAKE3 hash of abc");
    assert_ne!(case_anchor("verify/a"), case_anchor("verify/b"));
}

#[test]
fn the_file_is_written_when_the_run_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.html");
    let mut reporter = HtmlReporter::new(path.clone(), Glossary::default());
    sample::events(&sample::header()).iter().for_each(|event| reporter.event(event).unwrap());
    assert!(std::fs::read_to_string(path).unwrap().starts_with("<!DOCTYPE html>"));
}
