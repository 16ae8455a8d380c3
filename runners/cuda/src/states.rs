//! Merges of given states: partials of ranks, two states, segments of a split kernel; and the packing of an LSE.

use std::sync::Arc;

use shardcheck_engine::{
    Configuration, EffectivePath, EngineError, LseBase, Reply, Tensor, TensorError, Tensors,
};
use shardcheck_formats::Dtype;

use crate::batch::{contiguous, wrong_shape};
use crate::exchange::{MergeBuffers, MergeShape, Route, Wire};
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::shape::{Shape, code_of};
use crate::team::{Seat, Team};

/// `MergeStep` of the kernels.
pub const MERGE_CHUNK: i32 = 0;
/// `MergeStep` of the kernels.
pub const MERGE_SUFFIX: i32 = 1;

/// Merges the given partials over the ranks of one group. Outputs have the element type of the partials.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit.
pub fn merge_partials(
    team: &Team,
    configuration: &Configuration,
    inputs: &Tensors,
    lse_base: LseBase,
) -> Result<Reply, EngineError> {
    let tensor = inputs.get("partial_out")?;
    let world = configuration.dcp;
    let &[first, rows, heads, dim] = tensor.shape() else {
        return Err(wrong_shape("partial_out", tensor, vec![world, 0, configuration.gathered_heads(), 0]));
    };
    if first != world || !heads.is_multiple_of(world) {
        let expected = vec![world, rows, configuration.gathered_heads(), dim];
        return Err(wrong_shape("partial_out", tensor, expected));
    }
    let wire = wire("partial_out", tensor)?;
    let lse = inputs.get("partial_lse")?.expect("partial_lse", Dtype::F32, &[world, rows, heads])?;
    // one group alone merges
    let team = team.of_one_group();
    let route = Route::of(configuration, false);
    let own = heads / world;
    let states = team.each(|Seat { queue, shape }| {
        let ranks = shape.ranks as usize;
        let memory = (queue.upload(tensor.bytes())?, queue.upload(lse.bytes())?);
        let of_ranks = |given: &Tensor, memory: &Buffer| read_ranks(queue, shape, given, memory);
        let (partial, lse) = (of_ranks(tensor, &memory.0)?, of_ranks(lse, &memory.1)?);
        let out = queue.allocate(ranks * rows * own * dim * wire.bytes())?;
        Ok([on_wire(queue, partial, wire)?, lse, out, queue.allocate(4 * ranks * rows * own)?])
    })?;
    let merge = MergeShape { rows, heads, dim, wire, lse_base };
    let buffers = MergeBuffers::allocate(&team, merge, route.backend)?;
    let from: Vec<_> = states.iter().map(|[partial, lse, _, _]| (partial, lse)).collect();
    let to: Vec<_> = states.iter().map(|[_, _, out, lse]| (out, lse)).collect();
    team.begin();
    buffers.enqueue(&team, &from, &to)?;
    team.settle()?;
    let of_seat = |(Seat { queue, shape }, (out, out_lse)): (&Seat, &(&Buffer, &Buffer))| {
        let ranks = shape.ranks as usize;
        Ok(Tensors::new()
            .with("out", whole(queue, out, tensor.dtype(), &[ranks, rows, own, dim])?)
            .with("lse", whole(queue, out_lse, Dtype::F32, &[ranks, rows, own])?))
    };
    let parts = team.seats().iter().zip(&to).map(of_seat).collect::<Result<_, EngineError>>()?;
    let effective = team.report(route.report(configuration.lane_order));
    let collectives = team.entered(route.merge_collectives());
    Ok(Reply { outputs: team.assemble(parts)?, effective, collectives })
}

/// Merges two given states. The output has the element type of the first.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit.
pub fn merge_states(queue: &Arc<Queue>, inputs: &Tensors) -> Result<Reply, EngineError> {
    let prefix = inputs.get("prefix_out")?;
    let &[rows, heads, dim] = prefix.shape() else {
        return Err(wrong_shape("prefix_out", prefix, vec![0, 0, 0]));
    };
    let wire_of_output = wire("prefix_out", prefix)?;
    let state = |out_name: &str, lse_name: &str| -> Result<(Buffer, Buffer), EngineError> {
        let tensor = inputs.get(out_name)?;
        wire(out_name, tensor)?;
        tensor.expect(out_name, tensor.dtype(), &[rows, heads, dim])?;
        let lse = inputs.get(lse_name)?.expect(lse_name, Dtype::F32, &[rows, heads])?;
        Ok((read_single(queue, tensor)?, read_single(queue, lse)?))
    };
    let (first, second) = (state("prefix_out", "prefix_lse")?, state("suffix_out", "suffix_lse")?);
    let states = rows * heads;
    let out = queue.allocate(states * dim * wire_of_output.bytes())?;
    let lse = queue.allocate(4 * states)?;
    queue.fill(&out, 0xFF)?;
    queue.fill(&lse, 0xFF)?;
    enqueue_merge(queue, (&first, &second), (states, dim), wire_of_output, MERGE_SUFFIX, (&out, &lse))?;
    let outputs = Tensors::new()
        .with("out", whole(queue, &out, prefix.dtype(), &[1, rows, heads, dim])?)
        .with("lse", whole(queue, &lse, Dtype::F32, &[1, rows, heads])?);
    Ok(Reply { outputs, collectives: vec![0], ..Reply::default() })
}

/// Enqueues the merge of two f32 states `[states, D]` with their LSEs.
///
/// # Errors
/// What the driver says.
pub fn enqueue_merge(
    queue: &Arc<Queue>,
    (first, second): (&(Buffer, Buffer), &(Buffer, Buffer)),
    (states, dim): (usize, usize),
    wire: Wire,
    step: i32,
    (out, lse): (&Buffer, &Buffer),
) -> Result<(), EngineError> {
    let arguments = [
        first.0.argument(),
        first.1.argument(),
        second.0.argument(),
        second.1.argument(),
        Argument::Int(dim as i32),
        wire.argument(),
        Argument::Int(step),
        out.argument(),
        lse.argument(),
    ];
    queue.launch("merge_states", Extent::blocks(states, 1, 1), &arguments)
}

/// Merges the given segments of a split kernel, in f32.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit.
pub fn merge_segments(
    queue: &Arc<Queue>,
    inputs: &Tensors,
    tile_tokens: usize,
) -> Result<Reply, EngineError> {
    let tensor = inputs.get("segment_acc")?;
    let &[segments, rows, heads, dim] = tensor.shape() else {
        return Err(wrong_shape("segment_acc", tensor, vec![0, 0, 0, 0]));
    };
    let acc = contiguous(inputs, "segment_acc", Dtype::F32, &[segments, rows, heads, dim])?;
    let read = |name: &str| contiguous(inputs, name, Dtype::F32, &[segments, rows, heads]);
    let (max, sum) = (queue.upload(&read("segment_max")?)?, queue.upload(&read("segment_sum")?)?);
    let row_lens = queue.upload(&contiguous(inputs, "row_lens", Dtype::I32, &[rows])?)?;
    let acc = queue.upload(&acc)?;
    let count = rows * heads;
    let (out, lse) = (queue.allocate(4 * count * dim)?, queue.allocate(4 * count)?);
    queue.fill(&out, 0xFF)?;
    queue.fill(&lse, 0xFF)?;
    let ints = [segments, count, heads, dim, tile_tokens].map(|value| Argument::Int(value as i32));
    let given = [max.argument(), sum.argument(), acc.argument(), row_lens.argument()];
    let arguments = [&given[..], &ints, &[out.argument(), lse.argument()]].concat();
    queue.launch("merge_segments", Extent::blocks(count, 1, 1), &arguments)?;
    let outputs = Tensors::new()
        .with("out", whole(queue, &out, Dtype::F32, &[1, rows, heads, dim])?)
        .with("lse", whole(queue, &lse, Dtype::F32, &[1, rows, heads])?);
    Ok(Reply { outputs, collectives: vec![0], ..Reply::default() })
}

/// Splits LSEs into lanes and joins them again.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit.
pub fn pack_lse(
    queue: &Arc<Queue>,
    configuration: &Configuration,
    shape: &Shape,
    inputs: &Tensors,
) -> Result<Reply, EngineError> {
    let tensor = inputs.get("lse")?;
    let &[count] = tensor.shape() else { return Err(wrong_shape("lse", tensor, vec![0])) };
    let lse = queue.upload(&contiguous(inputs, "lse", Dtype::F32, &[count])?)?;
    let (lanes, unpacked) = (queue.allocate(4 * count)?, queue.allocate(4 * count)?);
    queue.fill(&lanes, 0xFF)?;
    queue.fill(&unpacked, 0xFF)?;
    let arguments = [
        Argument::Shape(*shape),
        lse.argument(),
        Argument::Long(count as i64),
        lanes.argument(),
        unpacked.argument(),
    ];
    queue.launch("pack_lse", Extent::over(count), &arguments)?;
    let outputs = Tensors::new()
        .with("lanes", whole(queue, &lanes, Dtype::U16, &[1, count, 2])?)
        .with("unpacked", whole(queue, &unpacked, Dtype::F32, &[1, count])?);
    let effective = EffectivePath::new().with("lane_order", configuration.lane_order.name());
    Ok(Reply { outputs, effective, collectives: vec![0] })
}

/// A buffer as a tensor.
///
/// # Errors
/// What the driver says.
pub fn whole(
    queue: &Arc<Queue>,
    buffer: &Buffer,
    dtype: Dtype,
    shape: &[usize],
) -> Result<Tensor, EngineError> {
    let bytes = shape.iter().product::<usize>() * dtype.size_bytes();
    Ok(Tensor::new(dtype, shape.to_vec(), queue.read(buffer, bytes)?)?)
}

fn wire(name: &str, tensor: &Tensor) -> Result<Wire, EngineError> {
    Wire::of(tensor.dtype()).ok_or_else(|| unknown(name, tensor.dtype()))
}

fn unknown(name: &str, found: Dtype) -> EngineError {
    TensorError::WrongDtype { name: name.to_owned(), expected: Dtype::Bf16, found }.into()
}

/// The elements of a given tensor in f32, row-major, whatever its strides; the walk is the device's.
fn read_single(queue: &Arc<Queue>, tensor: &Tensor) -> Result<Buffer, EngineError> {
    let memory = queue.upload(tensor.bytes())?;
    read_strided(queue, (tensor.dtype(), memory.pointer()), tensor.shape(), &tensor.strides())
}

/// The same of the ranks of a device alone, out of a rank-major tensor's `memory`.
fn read_ranks(
    queue: &Arc<Queue>,
    shape: &Shape,
    tensor: &Tensor,
    memory: &Buffer,
) -> Result<Buffer, EngineError> {
    let (mut extents, mut strides) = (tensor.shape().to_vec(), tensor.strides());
    let before = shape.first as usize * strides[0] * tensor.dtype().size_bytes();
    extents[0] = shape.ranks as usize;
    strides[0] *= shape.step as usize;
    read_strided(queue, (tensor.dtype(), memory.pointer() + before as u64), &extents, &strides)
}

fn read_strided(
    queue: &Arc<Queue>,
    (dtype, address): (Dtype, u64),
    extents: &[usize],
    strides: &[usize],
) -> Result<Buffer, EngineError> {
    let count = extents.iter().product::<usize>();
    let out = queue.allocate(4 * count)?;
    if count == 0 {
        return Ok(out);
    }
    let missing = 4 - extents.len();
    let extents = [&vec![1; missing], extents].concat();
    let strides = [&vec![0; missing], strides].concat();
    let code = code_of(dtype).ok_or_else(|| unknown("a given state", dtype))?;
    let mut arguments = vec![Argument::Pointer(address), Argument::Int(code)];
    arguments.push(Argument::Long(count as i64));
    arguments.extend(extents[1..].iter().map(|extent| Argument::Int(*extent as i32)));
    arguments.extend(strides.iter().map(|stride| Argument::Long(*stride as i64)));
    arguments.push(out.argument());
    queue.launch("read_strided", Extent::over(count), &arguments)?;
    Ok(out)
}

/// f32 elements in the wire's type.
fn on_wire(queue: &Arc<Queue>, single: Buffer, wire: Wire) -> Result<Buffer, EngineError> {
    if wire == Wire::F32 {
        return Ok(single);
    }
    let count = single.bytes() / 4;
    let half = queue.allocate(2 * count)?;
    if count > 0 {
        let arguments = [single.argument(), Argument::Long(count as i64), wire.argument(), half.argument()];
        queue.launch("narrow", Extent::over(count), &arguments)?;
    }
    Ok(half)
}
