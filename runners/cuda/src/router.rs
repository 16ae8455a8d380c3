//! The router of a layer of experts: its tensors checked on the host, scores, choice and weights made on the device.

use std::sync::Arc;

use shardcheck_engine::{
    EngineError, ExpertChoice, MaskedFill, Renormalise, Reply, Router, Scoring, Tensors,
};
use shardcheck_formats::Dtype;

use crate::batch::{contiguous, crash, wrong_shape};
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::states::whole;

/// `Router` of the kernels, field by field.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct RouterShape {
    pub experts: i32,
    pub top_k: i32,
    pub groups: i32,
    pub top_groups: i32,
    pub table_rows: i32,
    pub is_softmax: i32,
    pub is_biased: i32,
    pub fills_zero: i32,
    pub normaliser: i32,
    pub scale: f32,
}

/// A router with what it needs beside logits.
pub struct Routing {
    shape: RouterShape,
    bias: Option<Buffer>,
    table: Option<Buffer>,
}

/// Experts and weights `[ranks, width, k]` of rows.
pub struct Chosen {
    /// Ids.
    pub experts: Buffer,
    /// Weights in the same order.
    pub weights: Buffer,
}

impl Routing {
    /// Reads bias and table.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit, a crash for a router that asks for more than there is.
    pub fn read(queue: &Arc<Queue>, inputs: &Tensors, router: &Router) -> Result<Self, EngineError> {
        let logits = inputs.get("logits")?;
        let &[_, experts] = logits.shape() else { return Err(wrong_shape("logits", logits, vec![0, 0])) };
        let size = experts.checked_div(router.groups).unwrap_or(0);
        if size == 0 || router.top_groups > router.groups || router.top_k > router.top_groups * size {
            return Err(crash(format!("{experts} experts do not do for {router:?}")));
        }
        let bias = match router.choice {
            ExpertChoice::Biased => {
                Some(queue.upload(&contiguous(inputs, "bias", Dtype::F32, &[experts])?)?)
            }
            _ => None,
        };
        let table = match router.choice {
            ExpertChoice::Hashed => Some(read_table(inputs, experts, router.top_k)?),
            _ => None,
        };
        let table_rows = table.as_ref().map_or(0, |(rows, _)| *rows);
        let table = table.map(|(_, entries)| queue.upload(&entries)).transpose()?;
        let shape = RouterShape {
            experts: word("experts", experts)?,
            top_k: router.top_k as i32,
            groups: router.groups as i32,
            top_groups: router.top_groups as i32,
            table_rows: word("rows of the table of experts", table_rows)?,
            is_softmax: i32::from(router.scoring == Scoring::Softmax),
            is_biased: i32::from(router.choice == ExpertChoice::Biased),
            fills_zero: i32::from(router.fill == MaskedFill::Zero),
            normaliser: match router.renormalise {
                Renormalise::Raw => 0,
                Renormalise::Sum => 1,
                Renormalise::SumAndTiny => 2,
            },
            scale: router.scale,
        };
        Ok(Self { shape, bias, table })
    }

    /// Experts that there are.
    pub fn experts(&self) -> usize {
        self.shape.experts as usize
    }

    /// Experts of a row.
    pub fn top_k(&self) -> usize {
        self.shape.top_k as usize
    }

    /// Enqueues the choice for the first `counts[rank]` rows of each rank's logits `[ranks, width, E]`, with the token id of each row
    /// `[ranks, width]` where there is a table.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enqueue(
        &self,
        queue: &Arc<Queue>,
        (ranks, width, counts): (usize, usize, &Buffer),
        logits: &Buffer,
        ids: &Buffer,
    ) -> Result<Chosen, EngineError> {
        let rows = ranks * width;
        let scratch = queue.unwritten(4 * rows * (2 * self.experts() + self.shape.groups as usize))?;
        let experts = queue.unwritten(4 * rows * self.top_k())?;
        let weights = queue.unwritten(4 * rows * self.top_k())?;
        let optional =
            |buffer: &Option<Buffer>| buffer.as_ref().map_or(Argument::Pointer(0), Buffer::argument);
        let arguments = [
            Argument::Router(self.shape),
            counts.argument(),
            Argument::Int(width as i32),
            logits.argument(),
            optional(&self.bias),
            ids.argument(),
            optional(&self.table),
            scratch.argument(),
            experts.argument(),
            weights.argument(),
        ];
        queue.launch("route_rows", Extent::blocks(width, ranks, 1), &arguments)?;
        Ok(Chosen { experts, weights })
    }
}

/// Rows of the table of experts and its entries, of which each is an expert.
fn read_table(inputs: &Tensors, experts: usize, top_k: usize) -> Result<(usize, Vec<u8>), EngineError> {
    let tensor = inputs.get("hash_table")?;
    let rows = tensor.shape().first().copied().unwrap_or(0);
    let entries = contiguous(inputs, "hash_table", Dtype::I32, &[rows, top_k])?;
    if rows == 0 {
        return Err(crash("the table of experts has no row"));
    }
    let known = |entry: &i64| usize::try_from(*entry).is_ok_and(|expert| expert < experts);
    if !tensor.to_i64().iter().all(known) {
        return Err(crash("the table names an unknown expert"));
    }
    Ok((rows, entries))
}

/// A size as a 32-bit word of the kernels.
///
/// # Errors
/// A crash where it is none.
pub fn word(what: &str, size: usize) -> Result<i32, EngineError> {
    i32::try_from(size).map_err(|_| crash(format!("{size} {what} are more than the kernels count")))
}

/// Token ids `[tokens]` on the device; `None` where the router takes none.
///
/// # Errors
/// [`EngineError::Input`] for a tensor that does not fit.
pub fn token_ids(
    queue: &Arc<Queue>,
    inputs: &Tensors,
    router: &Router,
    tokens: usize,
) -> Result<Option<Buffer>, EngineError> {
    if router.choice != ExpertChoice::Hashed {
        return Ok(None);
    }
    Ok(Some(queue.upload(&contiguous(inputs, "token_ids", Dtype::I64, &[tokens])?)?))
}

/// The experts of given logits.
///
/// # Errors
/// As [`Routing::read`].
pub fn route(queue: &Arc<Queue>, inputs: &Tensors, router: &Router) -> Result<Reply, EngineError> {
    let routing = Routing::read(queue, inputs, router)?;
    let tokens = inputs.get("logits")?.shape()[0];
    let count = queue.upload_i32(&[word("tokens", tokens)?])?;
    let logits = queue.upload(&contiguous(inputs, "logits", Dtype::F32, &[tokens, routing.experts()])?)?;
    let ids = match token_ids(queue, inputs, router, tokens)? {
        Some(ids) => ids,
        None => queue.unwritten(0)?,
    };
    let chosen = routing.enqueue(queue, (1, tokens, &count), &logits, &ids)?;
    let shape = [1, tokens, router.top_k];
    let outputs = Tensors::new()
        .with("topk_ids", whole(queue, &chosen.experts, Dtype::I32, &shape)?)
        .with("topk_weights", whole(queue, &chosen.weights, Dtype::F32, &shape)?);
    Ok(Reply { outputs, collectives: vec![0], ..Reply::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_is_as_long_as_the_ten_words_of_the_kernels() {
        assert_eq!(size_of::<RouterShape>(), 10 * 4);
    }

    #[test]
    fn a_table_without_rows_or_with_an_unknown_expert_is_refused() {
        let table = |rows: usize, entries: &[i32]| {
            let tensor = shardcheck_engine::Tensor::from_i32(&[rows, 2], entries);
            read_table(&Tensors::new().with("hash_table", tensor), 4, 2)
        };
        assert_eq!(table(1, &[3, 0]).unwrap(), (1, vec![3, 0, 0, 0, 0, 0, 0, 0]));
        for (rows, entries) in [(0, &[][..]), (1, &[4, 0]), (1, &[0, -1])] {
            assert!(matches!(table(rows, entries), Err(EngineError::Crash { .. })), "{entries:?}");
        }
    }
}
