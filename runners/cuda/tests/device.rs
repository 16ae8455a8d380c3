//! What the engine says of a machine, with a device or without one.

use shardcheck_cuda::{CudaEngine, Devices, NoDevice, Options, count};
use shardcheck_engine::{Answer, Engine, OperationKind, RuleSetName, Settings};

#[test]
fn a_machine_without_a_device_is_told_what_is_missing_and_one_with_it_opens() {
    match CudaEngine::open(Options::default()) {
        Ok(engine) => {
            let missing =
                OperationKind::ALL.iter().filter(|kind| engine.profile().operation(**kind).is_none());
            assert_eq!(
                missing.copied().collect::<Vec<_>>(),
                [
                    OperationKind::AttendPcp,
                    OperationKind::SelectPcp,
                    OperationKind::CompressPcp,
                    OperationKind::AcceptDrafts,
                    OperationKind::SelectSparse,
                    OperationKind::Kda,
                    OperationKind::IndexLayers,
                    OperationKind::Forward
                ]
            );
            engine.profile().check().unwrap();
            let answer = engine.validate(RuleSetName::Own, &Settings::new()).unwrap();
            assert!(matches!(answer, Answer::Unsupported(_)));
        }
        Err(error) => assert!(error.to_string().starts_with("no device"), "{error}"),
    }
}

#[test]
fn a_device_beyond_those_that_are_there_is_none() {
    let error =
        CudaEngine::open(Options { devices: Devices::One(1_000_000), ..Options::default() }).err().unwrap();
    match count() {
        Ok(count) => assert_eq!(error, NoDevice::Ordinal { ordinal: 1_000_000, count }),
        Err(missing) => assert_eq!(error, missing),
    }
}

#[test]
fn joined_devices_are_each_named_once_and_at_least_one() {
    let open = |devices| CudaEngine::open(Options { devices, ..Options::default() }).err().unwrap();
    assert_eq!(open(Devices::Joined(&[3, 1, 3])), NoDevice::Repeated { ordinal: 3 });
    assert_eq!(open(Devices::Joined(&[])), NoDevice::Unnamed);
    if let Err(missing) = count() {
        assert_eq!(open(Devices::All), missing);
    }
}
