//! What the inputs of a case may hold, and inputs that are turned for a comparison.

use super::{Inputs, Visible};

/// Turns the sign of every token behind the first new row of its request.
pub(crate) fn negate_future(inputs: &mut Inputs) {
    let attention = inputs.case.configuration.attention;
    for (index, request) in inputs.case.workload.requests.iter().enumerate() {
        let hidden = request.context_tokens + 1;
        for (tokens, width) in [
            (&mut inputs.keys[index], attention.qk_dim()),
            (&mut inputs.values[index], attention.value_dim()),
        ] {
            let from = (hidden * attention.kv_heads() * width).min(tokens.len());
            tokens[from..].iter_mut().for_each(|value| *value = -*value);
        }
    }
}

/// Whether each row was given different tokens that it sees: anything else is a case that no engine can be asked.
pub(super) fn check_selected(inputs: &Inputs) -> Result<(), String> {
    let rows = inputs.case.workload.rows();
    for (row, own) in inputs.selected.iter().enumerate() {
        let seen = rows[row].map_or(0, |(request, t)| inputs.visible_tokens(request, t));
        let own = Visible::set(own.clone()).map_err(|error| format!("row {row}: {error}"))?;
        if own.end() > seen {
            let last = own.end() - 1;
            return Err(format!("row {row} is to attend to position {last}, but sees {seen} tokens"));
        }
    }
    Ok(())
}
