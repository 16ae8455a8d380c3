//! Laws of accepting drafts: what is decided, what stands behind it, and that the law of what is emitted is the target's.

mod laws;

use shardcheck_cases::{AcceptanceCase, AcceptancePattern, Body, Case, Family};
use shardcheck_engine::AcceptanceMethod;
use shardcheck_formats::Dtype;
use shardcheck_references::acceptance::{interval::law_of_row, law, weights};

use super::{Property, always};
use crate::accepting::AcceptanceMaterial;
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};

const ACCEPTANCE: &[Family] = &[Family::Acceptance];
const BAND: &str = "exact outside the rounding of 32-bit softmax, logarithm and quotient; within it, all that follows from either side";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "acceptance.identities",
        statement: "a request emits its accepted drafts, one token more, and −1 behind; a draft −1 and what is behind it are never among them",
        source: "emitted = accepted + 1; ATOM `rejection_sample`, vLLM `rejection_sample`",
        bugs: &[],
        tolerance: "exact: integers",
        families: ACCEPTANCE,
        applies: always,
        check: identities,
    },
    Property {
        id: "acceptance.ranks",
        statement: "all ranks emit the same tokens and count the same accepted drafts",
        source: "each rank runs the next step on the tokens that it emitted itself",
        bugs: &["vllm-ascend#12036"],
        tolerance: "exact: integers",
        families: ACCEPTANCE,
        applies: always,
        check: ranks,
    },
    Property {
        id: "acceptance.greedy",
        statement: "a greedy request emits the argmax of the target's logits row by row, up to the first draft that is another token; ties go to the lowest id",
        source: "greedy decoding with drafts equals greedy decoding without",
        bugs: &[],
        tolerance: "exact: integers",
        families: ACCEPTANCE,
        applies: has_greedy_requests,
        check: greedy,
    },
    Property {
        id: "acceptance.decision",
        statement: "as many drafts are accepted as the numbers decide: each by itself against p / q, or the longest block",
        source: "Leviathan et al. 2211.17192; Sun et al. 2403.10444",
        bugs: &[],
        tolerance: BAND,
        families: ACCEPTANCE,
        applies: by_chance,
        check: decision,
    },
    Property {
        id: "acceptance.token",
        statement: "the token behind the accepted drafts is the argmax of its log weight and noise: of what is left of the target behind a rejection, of the target behind the last draft",
        source: "Leviathan et al. 2211.17192; Sun et al. 2403.10444; the Gumbel-max trick",
        bugs: &[],
        tolerance: BAND,
        families: ACCEPTANCE,
        applies: by_chance,
        check: token,
    },
    Property {
        id: "acceptance.support",
        statement: "no accepted draft has probability 0 in the target, and no token behind a rejection has nothing left of it",
        source: "the support of max(p − q, 0); a draft of probability 0 fails p > u·q for every u, 0 too",
        bugs: &[],
        tolerance: "exact: probabilities that are 0 for every rounding",
        families: ACCEPTANCE,
        applies: by_chance,
        check: support,
    },
    Property {
        id: "acceptance.enumeration",
        statement: "over all drafts and an exact partition of all numbers, the emitted tokens have the law of the target",
        source: "Leviathan et al. 2211.17192, theorem 1; Sun et al. 2403.10444, theorem 1",
        bugs: &[],
        tolerance: "a count; n sums of 64-bit numbers are within n·2⁻⁵²",
        families: ACCEPTANCE,
        applies: |case| has_pattern(case, AcceptancePattern::Enumerated),
        check: laws::enumeration,
    },
    Property {
        id: "acceptance.law",
        statement: "over many requests with the same rows, the emitted tokens have the law of the target at every place",
        source: "Leviathan et al. 2211.17192, theorem 1; Sun et al. 2403.10444, theorem 1",
        bugs: &[],
        tolerance: "Dvoretzky–Kiefer–Wolfowitz with Massart's constant: a conforming engine fails with a chance of at most 1e-9",
        families: ACCEPTANCE,
        applies: |case| has_pattern(case, AcceptancePattern::Sampled),
        check: laws::sampled,
    },
    Property {
        id: "acceptance.statistics",
        statement: "the mean acceptance length is 1 + accepted / requests, the acceptance rate accepted / drafted, and 0 where nothing was drafted",
        source: "serving metrics of vLLM and ATOM",
        bugs: &[],
        tolerance: "three roundings to 32 bits",
        families: ACCEPTANCE,
        applies: always,
        check: statistics,
    },
];

fn acceptance_case(case: &Case) -> Option<&AcceptanceCase> {
    match &case.body {
        Body::Acceptance(acceptance) => Some(acceptance),
        _ => None,
    }
}

fn has_pattern(case: &Case, pattern: AcceptancePattern) -> bool {
    acceptance_case(case).is_some_and(|case| case.pattern == pattern)
}

fn by_chance(case: &Case) -> bool {
    acceptance_case(case).is_some_and(|case| case.method != AcceptanceMethod::Greedy)
}

/// Whether a request may be greedy: by the method, or by its temperature.
fn has_greedy_requests(case: &Case) -> bool {
    let warm = [AcceptancePattern::Gaussian, AcceptancePattern::Zeros, AcceptancePattern::Ties];
    acceptance_case(case)
        .is_some_and(|case| case.method == AcceptanceMethod::Greedy || warm.contains(&case.pattern))
}

fn broken(headline: String) -> Halt {
    Failure::because(headline).at(Stage::Output).into()
}

/// What an engine may say of itself, and what it is not judged by then.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exactness {
    /// Any engine that is not lossy.
    Lossless,
    /// Only one that uses the numbers that it is given.
    Given,
}

/// Stops where the effective path of the reply says that this exactness is none of the engine's.
fn asks(laboratory: &Laboratory, exactness: Exactness) -> Result<(), Halt> {
    let effective = &laboratory.observed()?.reply.effective;
    if effective.get("acceptance") == Some("relaxed") {
        return Err(Halt::Unsupported("the engine declares relaxed acceptance, which is lossy".to_owned()));
    }
    if exactness == Exactness::Given && effective.get("numbers") == Some("own") {
        let why = "the engine draws numbers of its own: its law is judged, and not its decisions";
        return Err(Halt::Unsupported(why.to_owned()));
    }
    Ok(())
}

/// What one rank emitted for one request.
struct Emitted {
    tokens: Vec<i64>,
    accepted: i64,
}

impl Emitted {
    /// Accepted drafts, where there are so many.
    fn drafts(&self, material: &AcceptanceMaterial, request: usize) -> Option<usize> {
        usize::try_from(self.accepted)
            .ok()
            .filter(|accepted| *accepted <= material.request(request).drafts().len())
    }
}

/// What was emitted, request by request on each rank.
fn emitted(laboratory: &Laboratory) -> Result<Vec<Vec<Emitted>>, Halt> {
    let material = laboratory.accepting();
    let (ranks, count, width) = (material.case.ranks, material.count(), material.inputs.columns + 1);
    let observed = laboratory.observed()?;
    let tokens = observed.output("tokens", Dtype::I64, &[ranks, count, width])?.to_i64();
    let accepted = observed.output("accepted", Dtype::I32, &[ranks, count])?.to_i64();
    let one = |flat: usize| Emitted {
        tokens: tokens[flat * width..(flat + 1) * width].to_vec(),
        accepted: accepted[flat],
    };
    Ok((0..ranks).map(|rank| (0..count).map(|request| one(rank * count + request)).collect()).collect())
}

fn place(material: &AcceptanceMaterial, rank: usize, request: usize) -> String {
    let drafts = material.request(request).drafts().len();
    format!("rank {rank}, request {request} ({drafts} drafts)")
}

/// Judges each request on each rank: `(place in words, request, what was emitted)`.
fn each(
    laboratory: &Laboratory,
    judge: impl Fn(&AcceptanceMaterial, usize, &Emitted) -> Result<usize, String>,
) -> Result<Finding, Halt> {
    let material = laboratory.accepting();
    let mut compared = 0;
    for (rank, requests) in emitted(laboratory)?.iter().enumerate() {
        for (request, seen) in requests.iter().enumerate() {
            compared += judge(material, request, seen)
                .map_err(|headline| broken(format!("{}: {headline}", place(material, rank, request))))?;
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

fn identities(laboratory: &Laboratory) -> Result<Finding, Halt> {
    each(laboratory, |material, request, seen| {
        let drafts = material.request(request).drafts();
        let Some(accepted) = seen.drafts(material, request) else {
            return Err(format!("{} drafts are accepted", seen.accepted));
        };
        let (own, behind) = seen.tokens.split_at(accepted);
        if own != &drafts[..accepted] {
            return Err(format!("{own:?} are emitted as the accepted ones of the drafts {drafts:?}"));
        }
        if !(0..material.case.vocabulary as i64).contains(&behind[0]) {
            return Err(format!("{} behind {accepted} accepted drafts is no token", behind[0]));
        }
        match behind[1..].iter().find(|token| **token != -1) {
            Some(token) => Err(format!("{token} stands behind the {} emitted tokens", accepted + 1)),
            None => Ok(seen.tokens.len()),
        }
    })
}

fn ranks(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.accepting();
    let all = emitted(laboratory)?;
    for (rank, requests) in all.iter().enumerate().skip(1) {
        for (request, (first, own)) in all[0].iter().zip(requests).enumerate() {
            if first.tokens != own.tokens || first.accepted != own.accepted {
                return Err(broken(format!(
                    "{} emits {:?} where rank 0 emits {:?}",
                    place(material, rank, request),
                    own.tokens,
                    first.tokens
                )));
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(all.len() * material.count())))
}

fn greedy(laboratory: &Laboratory) -> Result<Finding, Halt> {
    asks(laboratory, Exactness::Lossless)?;
    each(laboratory, |material, request, seen| {
        if !material.request(request).is_greedy(material.method) {
            return Ok(0);
        }
        let wanted = &material.outcomes()[request][0];
        let drafts = material.request(request).drafts();
        if seen.accepted != wanted.accepted as i64 {
            let accepted = wanted.accepted;
            return Err(format!("{} drafts are accepted where {accepted} are the argmax", seen.accepted));
        }
        let tokens = &seen.tokens[..=wanted.accepted];
        let whole = drafts[..wanted.accepted].iter().copied().chain([wanted.tokens[0] as i64]);
        if whole.clone().ne(tokens.iter().copied()) {
            let whole: Vec<i64> = whole.collect();
            return Err(format!("{tokens:?} are emitted where the argmax of each row gives {whole:?}"));
        }
        Ok(tokens.len())
    })
}

fn decision(laboratory: &Laboratory) -> Result<Finding, Halt> {
    asks(laboratory, Exactness::Given)?;
    each(laboratory, |material, request, seen| {
        if material.request(request).is_greedy(material.method) {
            return Ok(0);
        }
        let may: Vec<i64> =
            material.outcomes()[request].iter().map(|outcome| outcome.accepted as i64).collect();
        if may.contains(&seen.accepted) {
            return Ok(1);
        }
        let may = may.iter().map(i64::to_string).collect::<Vec<_>>().join(" or ");
        Err(format!("{} drafts are accepted where the numbers accept {may}", seen.accepted))
    })
}

fn token(laboratory: &Laboratory) -> Result<Finding, Halt> {
    asks(laboratory, Exactness::Given)?;
    each(laboratory, |material, request, seen| {
        let Some(accepted) = seen.drafts(material, request) else { return Ok(0) };
        if material.request(request).is_greedy(material.method) {
            return Ok(0);
        }
        // where another number is accepted, that is said elsewhere
        let outcome = material.outcomes()[request].iter().find(|outcome| outcome.accepted == accepted);
        let Some(outcome) = outcome else { return Ok(0) };
        let seen = seen.tokens[accepted];
        if usize::try_from(seen).is_ok_and(|token| outcome.tokens.contains(&token)) {
            return Ok(1);
        }
        Err(format!(
            "{seen} stands behind {accepted} accepted drafts where it is {:?} that must",
            outcome.tokens
        ))
    })
}

fn support(laboratory: &Laboratory) -> Result<Finding, Halt> {
    asks(laboratory, Exactness::Lossless)?;
    each(laboratory, |material, request, seen| {
        let given = material.request(request);
        let (Some(accepted), vocabulary) = (seen.drafts(material, request), material.case.vocabulary) else {
            return Ok(0);
        };
        if given.is_greedy(material.method) {
            return Ok(0);
        }
        for (row, draft) in given.drafts()[..accepted].iter().enumerate() {
            let law = law_of_row(&given.target[row * vocabulary..][..vocabulary], given.temperature);
            if law[*draft as usize].high == 0.0 {
                return Err(format!(
                    "draft {row}, token {draft}, is accepted and has probability 0 in the target"
                ));
            }
        }
        let behind = usize::try_from(seen.tokens[accepted]).ok().filter(|token| *token < vocabulary);
        match behind {
            Some(token) if weights(material.method, &given, accepted)[token].high == 0.0 => {
                Err(format!("token {token} behind {accepted} accepted drafts has nothing left of the target"))
            }
            _ => Ok(accepted + 1),
        }
    })
}

fn statistics(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.accepting();
    let ranks = material.case.ranks;
    let seen = laboratory.observed()?.observable("statistics", Dtype::F32, &[ranks, 2])?.to_f64();
    let drafted: Vec<usize> =
        (0..material.count()).map(|request| material.request(request).drafts().len()).collect();
    let mut comparison = Comparison::new("statistics");
    for (rank, requests) in emitted(laboratory)?.iter().enumerate() {
        let accepted = |(number, one): (usize, &Emitted)| one.drafts(material, number);
        let Some(accepted) = requests.iter().enumerate().map(accepted).collect::<Option<Vec<_>>>() else {
            let why = "a request has more accepted drafts than drafts, or fewer than none";
            return Err(broken(format!("rank {rank}: {why}")));
        };
        let (mean, rate) = law::statistics(&accepted, &drafted);
        for (index, wanted) in [mean, rate].into_iter().enumerate() {
            let bound = 3.0 * wanted / f64::from(1 << 24);
            comparison.element(2 * rank + index, seen[2 * rank + index], Allowed::near(wanted, bound));
        }
    }
    let headline = "the figures of acceptance are not those of the tokens";
    Ok(comparison.finding(headline, Stage::Output, |flat| {
        let what = if flat % 2 == 0 { "mean acceptance length" } else { "acceptance rate" };
        format!("rank {}, {what}", flat / 2)
    }))
}
