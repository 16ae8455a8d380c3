//! The report as text.

use std::fmt;

use super::RunReport;

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        provenance(self, f)?;
        scores(self, f)?;
        answers(self, f)?;
        server(self, f)?;
        writeln!(f, "what this run cannot have seen:")?;
        for sentence in &self.unseen {
            writeln!(f, "  - {sentence}")?;
        }
        Ok(())
    }
}

fn provenance(report: &RunReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (plan, server) = (&report.manifest.plan, &report.manifest.server);
    let version = plan.dialect.task_version().map_or(String::new(), |version| format!(" v{version:.0}"));
    writeln!(
        f,
        "GSM8K, dialect {}{version}, {}-shot, {} questions",
        plan.dialect, plan.num_fewshot, plan.questions
    )?;
    if let Some(limit) = plan.limit {
        writeln!(
            f,
            "  only the first {limit} questions: not comparable with a full run, and the first are easier"
        )?;
    }
    let origin = if plan.published_data { "the published files" } else { "NOT the published files" };
    writeln!(f, "  data: {origin}; test sha256 {}, train sha256 {}", plan.test_sha256, plan.train_sha256)?;
    writeln!(f, "  prompts sha256 {}", plan.prompts_sha256)?;
    writeln!(
        f,
        "  request: model {}, max_tokens {}, temperature {}, stop {:?}, seed {}; few-shot seed {}",
        plan.model, plan.max_tokens, plan.temperature, plan.stop, plan.request_seed, plan.fewshot_seed
    )?;
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "not known".to_owned());
    writeln!(
        f,
        "  server: {}, version given: {}, reported: {}, flags given: {}",
        server.url,
        or_unknown(&server.version_given),
        or_unknown(&server.version_reported),
        or_unknown(&server.flags_given)
    )
}

fn scores(report: &RunReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if let Some(mode) = &report.forced_acceptance {
        writeln!(f, "FORCED ACCEPTANCE ({mode}): drafts were accepted by decree, the scores say nothing")?;
    }
    if report.is_complete() {
        writeln!(f, "|Tasks|Filter          |n-shot|Metric     |Value       |   |Stderr      |Right    |")?;
        writeln!(f, "|-----|----------------|-----:|-----------|-----------:|---|-----------:|--------:|")?;
        for (filter, score) in &report.scores {
            writeln!(
                f,
                "|gsm8k|{filter:<16}|{:>6}|exact_match|{:.10}|±  |{:.10}|{:>4}/{}|",
                report.manifest.plan.num_fewshot,
                score.mean(),
                score.stderr(),
                score.correct,
                score.total
            )?;
        }
        return Ok(());
    }
    writeln!(
        f,
        "NO SCORE: {} of {} questions answered, {} requests failed, {} not sent; repeat the command with --resume",
        report.answered,
        report.manifest.plan.questions,
        report.failed_total(),
        report.not_sent
    )?;
    for (kind, count) in &report.failed {
        writeln!(f, "  {kind}: {count}")?;
    }
    for session in report.manifest.sessions.iter().filter_map(|session| session.stopped.as_ref()) {
        writeln!(f, "  a session was stopped: {session}")?;
    }
    for (filter, score) in &report.scores {
        if let Some((low, high)) = report.bounds(*filter) {
            writeln!(
                f,
                "  {filter}: {}/{} of the answered; between {:.4} and {:.4} whatever the rest is",
                score.correct,
                score.total,
                low.mean(),
                high.mean()
            )?;
        }
    }
    Ok(())
}

fn answers(report: &RunReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let share =
        |count: usize| format!("{count} ({:.1} %)", 100.0 * count as f64 / report.answered.max(1) as f64);
    writeln!(f, "answers: {} cut by max_tokens (finish_reason=length)", share(report.finished_by_length))?;
    if report.unknown_finish > 0 {
        writeln!(
            f,
            "  {} without a finish reason, so the share above is a lower bound",
            report.unknown_finish
        )?;
    }
    for (filter, count) in &report.invalid {
        writeln!(f, "  {filter}: no answer found in {}", share(*count))?;
    }
    if report.scores.len() > 1 {
        writeln!(f, "  the filters disagree on {}", share(report.filters_disagree))?;
    }
    writeln!(f, "  {} needed more than one attempt", report.retried)?;
    if let Some(reach) = &report.reach {
        writeln!(
            f,
            "  prompts of {} to {} tokens, longest sequence {} tokens ({} answers counted); {} prompt and {} \
             completion tokens in all",
            reach.shortest_prompt,
            reach.longest_prompt,
            reach.longest_sequence,
            reach.counted,
            report.prompt_tokens,
            report.completion_tokens
        )?;
    }
    if let Some(shards) = reach_of_shards(report) {
        writeln!(f, "  {shards}")?;
    }
    if let Some([median, p95, longest]) = report.latency_s {
        writeln!(f, "  latency: median {median:.2} s, 95 % below {p95:.2} s, longest {longest:.2} s")?;
    }
    Ok(())
}

fn reach_of_shards(report: &RunReport) -> Option<String> {
    let shards = report.reach.as_ref()?.shards.as_ref()?;
    let sharding = shards.sharding;
    let blocks = shards.virtual_blocks.map_or(String::new(), |blocks| {
        format!(
            ", {blocks} virtual blocks, {} requests crossed into a new one while decoding",
            shards.crossed_virtual_block.unwrap_or(0)
        )
    });
    Some(format!(
        "dcp {}, interleave {}: {} to {} tokens on a rank while decoding, {} requests with an empty shard, {} of {} \
         positions of a round{blocks}",
        sharding.dcp,
        sharding.interleave,
        shards.fewest_on_a_rank,
        shards.most_on_a_rank,
        shards.with_empty_shard,
        shards.residues_seen,
        sharding.dcp * sharding.interleave
    ))
}

fn server(report: &RunReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let allowed = report.manifest.sessions.iter().map(|session| session.concurrency).max().unwrap_or(0);
    writeln!(
        f,
        "sending: {:.1} s in {} sessions, {} of {allowed} allowed requests in flight at most",
        report.wall_s,
        report.manifest.sessions.len(),
        report.most_in_flight
    )?;
    for peak in report.manifest.sessions.iter().filter_map(|session| session.server_peak) {
        writeln!(
            f,
            "  the server ran {} and queued {} at most, in {} readings",
            peak.running, peak.waiting, peak.readings
        )?;
    }
    match &report.server_log {
        None => writeln!(f, "server log: not given (--server-log), so errors in it are not known")?,
        Some(scan) => {
            writeln!(f, "server log: {} findings in {} bytes", scan.total(), scan.bytes)?;
            for (finding, count) in &scan.counts {
                writeln!(f, "  {finding}: {count}")?;
            }
            for line in &scan.evidence {
                writeln!(f, "    {line}")?;
            }
        }
    }
    if let Some(acceptance) = &report.acceptance {
        write!(f, "{acceptance}")?;
    }
    Ok(())
}
