//! A million damaged frames: each is read as something or refused with a reason, and none costs more memory than it has bytes.

use shardcheck_engine::{Tensor, Tensors, archive};
use shardcheck_formats::{Counter, Dtype};
use shardcheck_process::frame::{self, FrameError};
use shardcheck_process::message::{self, Question, Said};

const FRAMES: usize = 1_000_000;

/// Frames that an adapter sends, and some of the harness.
fn sound() -> Vec<Vec<u8>> {
    let tensors = Tensors::new()
        .with("out", Tensor::from_f32(Dtype::Bf16, &[2, 3], &[0., 1., 2., 3., 4., 5.]))
        .with("lse", Tensor::from_f32(Dtype::F32, &[2], &[0.5, f32::NEG_INFINITY]));
    let (image, _) = archive::pack(tensors.iter()).unwrap();
    let framed = |header: &str, payload: &[u8]| {
        let mut bytes = Vec::new();
        frame::write(&mut bytes, header.as_bytes(), &[payload]).unwrap();
        bytes
    };
    vec![
        framed(
            r#"{"type":"reply","id":7,"status":"ok","effective":{"route":"decode"},"collectives":[2,2]}"#,
            &image,
        ),
        framed(
            r#"{"type":"reply","id":7,"status":"ok","file":"outputs-7","strided":{"out":{"dtype":"f32","shape":[3,2],"strides":[1,3]}}}"#,
            &image,
        ),
        framed(r#"{"type":"reply","id":8,"status":"unsupported","reason":"no"}"#, &[]),
        framed(r#"{"type":"reply","id":9,"status":"error","class":"timeout","text":"x","rank":3}"#, &[]),
        framed(
            r#"{"type":"hello","token":"t","protocol":[1,1],"sdk":"x","profile":{"engine":"e","version":"1","operations":{},"rule_sets":[]}}"#,
            &[],
        ),
        framed(
            r#"{"type":"step","id":3,"session":1,"operation":{"operation":"attend","mask":"causal"},"kind":"decode"}"#,
            &image,
        ),
    ]
}

fn damage(bytes: &mut Vec<u8>, draws: &mut Counter) {
    for _ in 0..=draws.below(3) {
        let at = draws.below(bytes.len() as u64) as usize;
        match draws.below(6) {
            0 => bytes[at] ^= 1 << draws.below(8),
            1 => bytes[at] = draws.below(256) as u8,
            2 => bytes.truncate(at.max(1)),
            3 => bytes.insert(at, draws.below(256) as u8),
            4 => {
                let end = (at + 8).min(bytes.len());
                bytes[at..end].fill([0x00, 0xFF, 0x7F, b'[', b'{'][draws.below(5) as usize]);
            }
            _ => {
                let from = draws.below(bytes.len() as u64) as usize;
                let length = draws.below(32) as usize;
                let copied = bytes[from..(from + length).min(bytes.len())].to_vec();
                bytes.splice(at..at, copied);
            }
        }
    }
}

#[test]
fn a_million_damaged_frames_are_read_or_refused_and_never_a_panic() {
    let sound = sound();
    let folder = tempfile::tempdir().unwrap();
    let mut draws = Counter::new(1, 77);
    let (mut understood, mut refused) = (0usize, 0usize);
    for index in 0..FRAMES {
        let mut bytes = sound[index % sound.len()].clone();
        damage(&mut bytes, &mut draws);
        let length = bytes.len();
        let mut stream = bytes.as_slice();
        let head = match frame::read_head(&mut stream) {
            Ok(head) => head,
            Err(FrameError::Broken(error)) => panic!("a slice does not break: {error}"),
            Err(_) => {
                refused += 1;
                continue;
            }
        };
        assert!(head.header.len() <= length);
        let attached = match message::parse::<Said>(&head) {
            Ok(Said::Reply(reply)) => Some(reply.attached).filter(|attached| attached.strided.is_empty()),
            Ok(Said::Hello(hello)) => {
                // whatever it declares can be checked
                let _ = hello.profile.check();
                None
            }
            Err(_) => match message::parse::<Question>(&head) {
                Ok(Question::Step { attached, .. }) => Some(attached),
                _ => None,
            },
        };
        match attached.map(|attached| message::tensors(&mut stream, &head, &attached, folder.path())) {
            Some(Ok(tensors)) => {
                // what is read can be looked at
                tensors.iter().for_each(|(_, tensor)| assert_eq!(tensor.to_codes().len(), tensor.len()));
                understood += 1;
            }
            _ => refused += 1,
        }
    }
    assert_eq!(understood + refused, FRAMES);
    assert!(understood > FRAMES / 100 && refused > FRAMES / 4, "{understood} understood, {refused} refused");
}
