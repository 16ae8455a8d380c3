//! Real NCCL on a communicator of one: all-gather, reduce-scatter, all-to-all to itself, each compared with what it has to be, and the device's
//! own exchange beside them.
//!
//! `collectives [FILE OF libnccl.so.2]`

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use shardcheck_collectives::{Collectives, Communicator, Element, UniqueId, Vendor};
use shardcheck_cuda::{CudaEngine, Options, Queue};

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).map(PathBuf::from);
    let library = Collectives::open(Vendor::Nccl, file.as_deref())?;
    println!("NCCL {}", library.version()?);
    let engine = CudaEngine::open(Options::default())?;
    let queue = Queue::new(Arc::clone(engine.device()))?;
    let id = UniqueId::new(&library)?;
    let mut communicator = Communicator::join(&library, &id, 0, 1)?;
    println!("rank {} of {}", communicator.rank(), communicator.world());
    let values: Vec<f32> = (0..100_003).map(|at| (at as f32 * 0.37).sin()).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let from = queue.upload(&bytes)?;
    let to = queue.allocate(bytes.len())?;
    let stream = queue.handle();
    for name in ["all_gather", "reduce_scatter", "all_to_all"] {
        queue.fill(&to, 0xFF)?;
        queue.wait()?;
        let count = values.len();
        // SAFETY: both buffers hold as many elements, the stream is the device's, and `read` waits for it.
        unsafe {
            match name {
                "all_gather" => {
                    communicator.all_gather(from.pointer(), to.pointer(), count, Element::F32, stream)?
                }
                "reduce_scatter" => {
                    communicator.reduce_scatter(from.pointer(), to.pointer(), count, Element::F32, stream)?
                }
                _ => communicator.all_to_all(
                    from.pointer(),
                    to.pointer(),
                    bytes.len(),
                    (Element::U8, 1),
                    stream,
                )?,
            }
        }
        let seen = queue.read(&to, bytes.len())?;
        communicator.check()?;
        if seen != bytes {
            return Err(format!("{name} brought something else").into());
        }
        println!("{name}: {} bytes, equal", bytes.len());
    }
    communicator.abort()?;
    let two = UniqueId::new(&library)?;
    let refused = std::thread::scope(|scope| {
        let joins: Vec<_> = (0..2)
            .map(|rank| {
                let (library, id, device) = (&library, &two, engine.device());
                scope.spawn(move || device.enter().map(|()| Communicator::join(library, id, rank, 2).err()))
            })
            .collect();
        joins.into_iter().map(|join| join.join().ok().and_then(Result::ok).flatten()).collect::<Vec<_>>()
    });
    println!("two ranks on one device: {refused:?}");
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
