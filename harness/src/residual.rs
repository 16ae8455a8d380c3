//! The residual of a case's whole output, examined request by request and group by group.

use shardcheck_formats::Dtype;
use shardcheck_references::layout::Layout;
use shardcheck_references::statistics::{Alarm, Detector, Examination, Model, Suspect};
use shardcheck_references::visibility::Visible;

use crate::expected::{problem, query_of, visible_rows};
use crate::finding::{Failure, Figures, Finding, Measured, Stage};
use crate::laboratory::{Halt, Laboratory, Observed};
use crate::localise;
use crate::material::AttentionMaterial;

/// Share of the excess of squares from which an alarm's template is taken for the explanation.
const EXPLAINED: f64 = 0.3;
/// Largest amplitude of a rank or a scale that is taken for one: templates are first derivatives.
const LINEAR: f64 = 1.0;

/// What the residual of a case shows.
pub(crate) struct CaseResidual {
    /// All requests of a group joined, by group; the last one holds all groups, without tokens and ranks.
    groups: Vec<Examination>,
    /// Most suspicious token and block of all requests, with their places.
    token: Option<(Place, Suspect)>,
    block: Option<(Place, Suspect)>,
    /// Worst state, with its place.
    row: Option<(Place, Examination)>,
    probable_ratio: f64,
}

/// One problem of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    request: usize,
    group: usize,
}

/// Examines the output of a step. `None` where it holds a number that is not finite.
///
/// # Errors
/// [`Halt::Inconclusive`] when no bound can be derived, [`Halt::Broken`] when the output has the wrong shape.
pub(crate) fn examine(
    material: &AttentionMaterial,
    observed: &Observed,
) -> Result<Option<CaseResidual>, Halt> {
    let seen = observed.output("out", material.output_dtype(), &material.output_shape())?.to_f64();
    let contract = material.contract()?;
    let groups = material.ranks() / material.configuration().dcp;
    let mut residual =
        CaseResidual { groups: Vec::new(), token: None, block: None, row: None, probable_ratio: 0.0 };
    for group in 0..groups {
        let mut joined: Option<Examination> = None;
        for (request, visible) in visible_rows(material).into_iter().enumerate() {
            if visible.iter().all(Visible::is_empty) {
                continue;
            }
            let place = Place { request, group };
            let query = query_of(material, request, group);
            let problem = problem(material, request, &query);
            let layout: &Layout = &material.layout;
            let model = Model::new(&problem, layout, &visible, &contract)
                .map_err(|error| Halt::Inconclusive(error.to_string()))?;
            let output = place.output(material, &seen);
            let Some(examination) = model.examine(&output) else { return Ok(None) };
            residual.probable_ratio =
                residual.probable_ratio.max(probable_ratio(&model, &output, contract.output));
            residual.take(place, &examination);
            match &mut joined {
                Some(joined) => joined.join(&examination),
                none => *none = Some(examination),
            }
        }
        residual.groups.extend(joined);
    }
    Ok(Some(residual))
}

/// Largest use of the probable bound, in states that take part.
fn probable_ratio(model: &Model, output: &[f64], dtype: Dtype) -> f64 {
    let (moments, probable) = (model.moments(), model.probable());
    let mut largest = 0.0f64;
    for (index, seen) in output.iter().enumerate() {
        let (state, d) = (index / moments.v_dim, index % moments.v_dim);
        if model.admitted()[state] {
            let out = moments.states[state].out[d];
            let (low, high) = shardcheck_references::bound::interval(out, probable.pre[index], dtype);
            largest = largest.max(shardcheck_references::bound::ratio(*seen, out, low, high));
        }
    }
    largest
}

impl Place {
    /// `[rows of the request, heads of the group, D]` of `out`, `[ranks, T, H, D]`.
    fn output(self, material: &AttentionMaterial, seen: &[f64]) -> Vec<f64> {
        let shape = material.output_shape();
        let (rows, heads, dim) = (shape[1], shape[2], shape[3]);
        let gathered = material.configuration().gathered_heads();
        let mut output = Vec::new();
        for row in
            (0..rows).filter(|row| material.rows[*row].is_some_and(|(request, _)| request == self.request))
        {
            for head in self.group * gathered..(self.group + 1) * gathered {
                let base = ((head / heads * rows + row) * heads + head % heads) * dim;
                output.extend_from_slice(&seen[base..base + dim]);
            }
        }
        output
    }

    fn name(self, material: &AttentionMaterial) -> String {
        let groups = material.ranks() / material.configuration().dcp;
        let of_group = if groups > 1 { format!(", group {}", self.group) } else { String::new() };
        format!("request {}{of_group}", self.request)
    }
}

impl CaseResidual {
    fn take(&mut self, place: Place, examination: &Examination) {
        let key = |suspect: &Suspect| (suspect.is_plausible(), suspect.filter.score().abs());
        for (kept, found) in [(&mut self.token, examination.token), (&mut self.block, examination.block)] {
            if let Some(found) = found
                && kept.as_ref().is_none_or(|(_, before)| key(before) < key(&found))
            {
                *kept = Some((place, found));
            }
        }
        if let Some(row) = examination.row
            && self
                .row
                .as_ref()
                .is_none_or(|(_, before)| before.row.is_some_and(|before| before.mean < row.mean))
        {
            self.row = Some((place, examination.clone()));
        }
    }

    /// All groups together.
    fn whole(&self) -> Option<Examination> {
        let mut groups = self.groups.iter();
        let mut whole = groups.next()?.clone();
        groups.for_each(|group| whole.join(group));
        (whole.token, whole.block) = (self.token.map(|found| found.1), self.block.map(|found| found.1));
        whole.row = self.row.as_ref().and_then(|(_, examination)| examination.row);
        Some(whole)
    }

    /// Every alarm, with the place where it has one.
    fn alarms(&self) -> Vec<(Option<Place>, Alarm)> {
        let Some(whole) = self.whole() else { return Vec::new() };
        let mut alarms: Vec<(Option<Place>, Alarm)> = whole
            .alarms()
            .into_iter()
            .filter(|alarm| alarm.detector != Detector::RankLse)
            .map(|alarm| match alarm.detector {
                Detector::Token => (self.token.map(|found| found.0), alarm),
                Detector::Block => (self.block.map(|found| found.0), alarm),
                Detector::RowChiSquare => (self.row.as_ref().map(|found| found.0), alarm),
                _ => (None, alarm),
            })
            .collect();
        // a rank is one of its group
        for group in &self.groups {
            let of_rank = |alarm: &Alarm| alarm.detector == Detector::RankLse;
            alarms.extend(group.alarms().into_iter().filter(of_rank).map(|alarm| (None, alarm)));
        }
        alarms
    }

    /// Largest statistic over its limit, alarms or not.
    fn worst_ratio(&self, whole: &Examination) -> f64 {
        let chi_square = whole.chi_square().unwrap_or(0.0) / Detector::ChiSquare.limit();
        let suspects = [(Detector::Token, self.token), (Detector::Block, self.block)];
        let mut worst = if whole.elements >= 4096 { chi_square } else { 0.0 };
        for (detector, suspect) in suspects {
            if let Some((_, suspect)) = suspect.filter(|(_, suspect)| suspect.is_plausible()) {
                worst = worst.max(suspect.filter.score().abs() / detector.limit());
            }
        }
        let ranks = self.groups.iter().flat_map(|group| &group.ranks);
        for filter in ranks.chain([&whole.value_scale, &whole.key_scale]) {
            worst = worst.max(filter.score().abs() / Detector::RankLse.limit());
        }
        worst
    }
}

/// Judges the residual of the case's step.
///
/// # Errors
/// [`Halt`].
pub(crate) fn judge(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let Some(residual) = examine(material, laboratory.observed()?)? else {
        return Err(Failure::because("an output holds a number that is not finite").at(Stage::Output).into());
    };
    let Some(whole) = residual.whole().filter(|whole| whole.elements > 0) else {
        return Ok(Finding::Unsupported(
            "in every row some rank holds a single token, or equal or crowded scores: its rounding errors are no sample"
                .to_owned(),
        ));
    };
    let figures = Figures {
        chi_square: whole.chi_square(),
        top_score: Some(whole.top_score()),
        probable_ratio: Some(residual.probable_ratio),
        lse_difference: lse_difference(material, laboratory.observed()?),
        excluded_states: whole.excluded as u64,
    };
    let alarms = residual.alarms();
    if alarms.is_empty() {
        return Ok(Finding::Holds(Measured {
            compared: whole.elements as u64,
            worst_ratio: residual.worst_ratio(&whole).min(1.0),
            exact: 0,
            figures: Some(figures),
        }));
    }
    Ok(Finding::Broken(Box::new(failure(laboratory, &whole, &alarms, &figures))))
}

/// The headline is the alarm whose template explains most of the residual, if any does.
fn failure(
    laboratory: &Laboratory,
    whole: &Examination,
    alarms: &[(Option<Place>, Alarm)],
    figures: &Figures,
) -> Failure {
    let material = laboratory.attention();
    let excess = (whole.square - whole.elements as f64).max(1.0);
    let sentence = |(place, alarm): &(Option<Place>, Alarm)| match place {
        Some(place) => format!("{}: {alarm}", place.name(material)),
        None => alarm.to_string(),
    };
    let explained = |alarm: &Alarm| alarm.value * alarm.value / excess;
    let whole_token = |alarm: &Alarm| matches!(alarm.detector, Detector::Token | Detector::Block);
    let located = alarms.iter().filter(|(_, alarm)| {
        alarm.amplitude.is_some_and(|amplitude| whole_token(alarm) || amplitude.abs() <= LINEAR)
    });
    let best = located.max_by(|a, b| explained(&a.1).total_cmp(&explained(&b.1)));
    let headline = match best {
        Some(best) if explained(&best.1) >= EXPLAINED => {
            format!("the output's error has a pattern: {}", sentence(best))
        }
        _ => format!(
            "the output's error is {:.1} times what rounding leaves, and no single token, rank or scale explains it",
            whole.chi_square().unwrap_or(0.0).sqrt()
        ),
    };
    let mut failure = Failure::because(headline).at(localise::stage_of(laboratory, Stage::Merge));
    failure.compared = whole.elements as u64;
    failure.notes = alarms.iter().map(sentence).collect();
    failure.notes.push(figures.to_string());
    failure
}

/// Largest difference of a merged LSE from the oracle's; `None` where none is comparable.
fn lse_difference(material: &AttentionMaterial, observed: &Observed) -> Option<f64> {
    let expected = material.expected().ok()?;
    let shape = material.output_shape();
    let seen = observed.output("lse", Dtype::F32, &shape[..3]).ok()?.to_f64();
    let mut largest = None;
    for (flat, seen) in seen.iter().enumerate() {
        let (rank, row, head) = (flat / shape[2] / shape[1], flat / shape[2] % shape[1], flat % shape[2]);
        let wanted = expected.lse[row * material.heads() + rank * shape[2] + head].expected();
        let difference = (seen - wanted).abs();
        if difference.is_finite() {
            largest = Some(difference.max(largest.unwrap_or(0.0)));
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::Material;
    use shardcheck_cases::Case;
    use shardcheck_cpu::{CpuEngine, fault};
    use shardcheck_engine::Engine;

    fn judged(id: &str, name: Option<&str>) -> Finding {
        let case: Case = id.parse().expect("a case id");
        let engine = name.map_or_else(shardcheck_cpu::engine, |name| {
            CpuEngine::with_fault(fault(name).expect("a fault of the embedded engine"))
        });
        let material = Material::of(&case, engine.profile()).expect("a case that can be judged");
        let laboratory = Laboratory::new(&case, &engine, &material);
        judge(&laboratory).unwrap_or_else(Finding::from)
    }

    fn headline(id: &str, name: &str) -> String {
        match judged(id, Some(name)) {
            Finding::Broken(failure) => failure.headline,
            other => panic!("{name} on {id}: {other:?}"),
        }
    }

    const VERIFY: &str = "verify/tiny-mla/tp4.dcp4.h2.s1.b16.n8.bf16.a2a.lo_hi.lat/90+3_40+2.seq/gaussian/11";
    const GROUPS: &str = "decode/tiny-gqa/tp6.dcp3.h2.s1.b16.n8.bf16.ag_rs/70+1_50+1.seq/gaussian/12";

    #[test]
    fn a_healthy_engine_holds_and_leaves_its_figures() {
        for id in [VERIFY, GROUPS] {
            let Finding::Holds(measured) = judged(id, None) else { panic!("{id}: {:?}", judged(id, None)) };
            let figures = measured.figures.expect("figures");
            assert!((0.3..1.5).contains(&figures.chi_square.unwrap()), "{figures:?}");
            assert!(
                figures.top_score.unwrap() < 5.0 && figures.lse_difference.unwrap() < 1e-5,
                "{figures:?}"
            );
            assert!(measured.worst_ratio < 1.0 && measured.compared > 200, "{measured:?}");
        }
    }

    #[test]
    fn the_token_that_a_row_misses_is_named_with_its_request() {
        let text = headline(VERIFY, "length-off-by-the-rank");
        assert!(text.contains("request ") && text.contains(" is missing or weighs too little"), "{text}");
    }

    #[test]
    fn the_rank_that_weighs_too_much_is_named_with_its_error() {
        for id in [VERIFY, GROUPS] {
            let text = headline(id, "first-rank-weighs-too-much");
            assert!(
                text.contains("the LSE of rank 0 is off by +2.")
                    || text.contains("the LSE of rank 0 is off by +1.9"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_scale_within_every_bound_is_measured() {
        let text = headline(GROUPS, "weights-short-of-one");
        assert!(text.contains("outputs are off by -4.") || text.contains("outputs are off by -3."), "{text}");
    }

    #[test]
    fn an_error_without_pattern_says_so() {
        let text = headline(VERIFY, "query-gathered-in-reverse");
        assert!(text.contains("no single token, rank or scale explains it"), "{text}");
    }

    #[test]
    fn a_batch_of_single_tokens_is_not_judged() {
        let finding =
            judged("decode/tiny-gqa/tp2.dcp2.h2.s1.b16.n8.bf16.a2a.hi_lo/0+1x3.seq/gaussian/3", None);
        assert!(matches!(&finding, Finding::Unsupported(why) if why.contains("single token")), "{finding:?}");
    }
}
