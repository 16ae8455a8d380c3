//! What a person who asks gets.

use super::*;
use crate::finding::Stage;
use crate::select::Axis;
use crate::status::{Exit, Status};
use shardcheck_cases::{Family, Probe};

#[test]
fn each_vocabulary_is_told_whole() {
    let text = |topic: Topic| topic.text();
    for exit in Exit::ALL {
        assert!(text(Topic::ExitCodes).contains(exit.meaning()), "{exit:?}");
    }
    for status in Status::ALL {
        assert!(text(Topic::Statuses).contains(status.meaning()), "{status}");
    }
    for family in Family::ALL {
        assert!(text(Topic::Families).contains(family.name()), "{family}");
    }
    for probe in Probe::ALL {
        assert!(text(Topic::Probes).contains(probe.name()), "{probe}");
    }
    for stage in Stage::ALL {
        assert!(text(Topic::Stages).contains(stage.name()), "{stage}");
    }
    for axis in Axis::ALL {
        assert!(text(Topic::FilterExpressions).contains(axis.meaning()), "{}", axis.name());
    }
}

#[test]
fn topics_are_found_by_name_and_listed() {
    let explainer = Explainer::new();
    for topic in Topic::ALL {
        assert!(explainer.explain(topic.name()).unwrap().starts_with(topic.headline()));
        assert!(explainer.index().contains(topic.name()));
    }
}

#[test]
fn ids_of_other_sources_are_explained_too() {
    let explainer = Explainer::new()
        .with("property", ["merge.bound"], |id| (id == "merge.bound").then(|| "a statement".to_owned()))
        .with("fault", ["swap-lanes"], |id| (id == "swap-lanes").then(|| "a defect".to_owned()))
        .with("case", Vec::<String>::new(), |id| id.contains('/').then(|| "a case".to_owned()));
    assert_eq!(explainer.explain("merge.bound").unwrap(), "property merge.bound\n\na statement");
    assert_eq!(explainer.explain("swap-lanes").unwrap(), "fault swap-lanes\n\na defect");
    assert!(explainer.explain("decode/x").unwrap().ends_with("a case"));
    assert!(explainer.index().contains("swap-lanes"));
}

#[test]
fn an_unknown_word_gets_the_nearest_known_one() {
    let explainer = Explainer::new().with("fault", ["swap-lanes"], |_| None);
    let message = explainer.explain("swap-lane").unwrap_err().to_string();
    assert!(message.contains("did you mean \"swap-lanes\"?"), "{message}");
    let message = explainer.explain("exit-code").unwrap_err().to_string();
    assert!(
        message.contains("did you mean \"exit-codes\"?") && message.contains("filter-expressions"),
        "{message}"
    );
}

#[test]
fn topic_names_parse_back() {
    for topic in Topic::ALL {
        assert_eq!(topic.name().parse::<Topic>().unwrap(), topic);
    }
    assert!("exits".parse::<Topic>().unwrap_err().contains("exit-codes"));
}
