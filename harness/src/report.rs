//! interim
use crate::event::{CaseResult, Event};
#[derive(Debug, clap::Args)]
pub struct ReportArgs { #[arg(long)] pub junit: Option<std::path::PathBuf> }
pub struct Reports { n: usize, t: std::time::Instant }
impl Reports {
    pub fn open(_: &ReportArgs, _: &crate::run_directory::RunDirectory, _: Option<&crate::record::RunRecord>, n: usize) -> Result<Self, String> { Ok(Self{n, t: std::time::Instant::now()}) }
    pub fn event(&mut self, e: &Event) {
        match e {
            Event::CaseJudged(r) if r.status.is_failure() || r.status == crate::status::Status::Inconclusive => print!("{}", full_text(r)),
            Event::MutantTried{fault,state,property,case,tried} => println!("{fault} {state} {property:?} {case:?} {tried}"),
            Event::RunFinished{counts,..} => println!("{} cases {counts:?} {:?}", self.n, self.t.elapsed()),
            _ => {}
        }
    }
    pub fn finish(&mut self, _: &crate::run_directory::RunDirectory) -> Result<(), String> { Ok(()) }
}
pub fn full_text(r: &CaseResult) -> String {
    let mut s = format!("{} {} {:.1} ms\n", r.status, r.id, r.elapsed_s*1e3);
    for c in &r.checks { if !matches!(c.finding, crate::finding::Finding::Holds(_)|crate::finding::Finding::Unsupported(_)) { s += &format!("   {}: {:?}\n", c.property, c.finding); } }
    s
}
