//! Engines on a device, on a machine that has none: what they say, and that everything else goes on.

use crate::program::Program;

/// Names of the native engines whose device is not there.
fn missing() -> Vec<&'static str> {
    let cuda = shardcheck_cuda::CudaEngine::open(shardcheck_cuda::Options::default()).is_err();
    let engines = [("cuda", cuda), ("cuda:graphs", cuda), ("hip", shardcheck_hip::probe().is_err())];
    engines.into_iter().filter(|(_, missing)| *missing).map(|(name, _)| name).collect()
}

#[test]
fn a_native_engine_without_its_device_ends_with_a_code_of_its_own_and_says_what_is_missing() {
    let program = Program::new();
    for engine in missing() {
        for arguments in [
            &["run", "--engine", engine][..],
            &["doctor", "--engine", engine],
            &["run", "--suite", "engine-smoke", "--engine", engine],
        ] {
            let outcome = program.expect(9, arguments);
            assert!(outcome.err.contains(&format!("{engine}: no device")), "{}", outcome.err);
        }
    }
    assert!(!program.path("runs").exists(), "an engine that is not there leaves no run behind");
}

#[test]
fn the_faults_of_an_engine_are_listed_without_its_device() {
    let program = Program::new();
    let list = |arguments: &[&str]| program.expect(0, arguments).out;
    let all = list(&["mutants", "list"]);
    let kernels = list(&["mutants", "list", "--engine", "cuda"]);
    let graphs = list(&["mutants", "list", "--engine", "cuda:graphs"]);
    assert_eq!(all, list(&["mutants", "list", "--engine", "cpu"]));
    assert!(kernels.contains("ranks-averaged") && !kernels.contains("lengths-captured-by-bucket"));
    assert!(graphs.contains("lengths-captured-by-bucket"));
    let count = |text: &str| text.lines().count();
    assert!(count(&kernels) < count(&graphs) && count(&graphs) < count(&all));
    let refused = program.expect(2, &["mutants", "list", "--engine", "gpu"]);
    assert!(refused.err.contains("unknown engine"), "{}", refused.err);
}

#[test]
fn a_fault_that_the_native_engine_has_not_got_is_refused_before_its_device_is_looked_for() {
    let arguments = ["run", "--engine", "cuda", "--fault", "drafts-refused-everywhere"];
    let outcome = Program::new().expect(2, &arguments);
    assert!(outcome.err.contains("mutants list --engine cuda"), "{}", outcome.err);
}
