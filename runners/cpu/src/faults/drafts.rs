//! Faults of the loop of a draft head: what is accepted, and what new drafts are made of.

use super::{Fault, FaultClass};

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "draft-head-accepts-every-draft",
        title: "drafts are accepted unseen",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.drafts", "stack.speculation"],
        apply: |p| p.stack.draft.accepts = |_, _| true,
    },
    Fault {
        name: "draft-head-goes-on-behind-rejected-drafts",
        title: "new drafts are made of the last row of the step, accepted or not",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.drafts"],
        apply: |p| p.stack.draft.last = |certain, _, drafts| certain + drafts,
    },
    Fault {
        name: "draft-head-goes-on-behind-the-verified-token",
        title: "new drafts are made of the last row that was no draft, whatever was accepted",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.drafts"],
        apply: |p| p.stack.draft.last = |certain, _, _| certain,
    },
    Fault {
        name: "draft-head-is-given-a-row-s-own-token",
        title: "a row of the head has its own token and not the one behind it",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.drafts"],
        apply: |p| p.stack.draft.token = |tokens, row| tokens[row],
    },
    Fault {
        name: "draft-head-samples-within-a-prompt",
        title: "in front of another chunk of a prompt the head has the token that the row gave, not the prompt's own",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.drafts"],
        apply: |p| p.stack.draft.knows_the_prompt = false,
    },
    Fault {
        name: "draft-head-shares-the-cache-of-the-last-layer",
        title: "the head writes its keys into the cache of the target's last layer",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["stack.attention", "stack.run"],
        apply: |p| p.stack.draft.cache = |_, last| last,
    },
    Fault {
        name: "draft-head-is-given-the-target-s-stream-again",
        title: "every further draft is made of the target's row, as the first one was",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["stack.drafts"],
        apply: |p| p.stack.draft.own_stream = false,
    },
    Fault {
        name: "draft-head-is-given-another-request-s-stream",
        title: "streams of the target are taken of the next request's rows",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["stack.drafts"],
        apply: |p| p.stack.draft.request = |request, requests| (request + 1) % requests,
    },
];
